"""The state without a trainer: sources, and places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.reading import plan_restore, read_whole_metadata
from jaxpp_flax.checkpoint.writing import save_step
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.sources import Arrays, Checkpoint
from jaxpp_flax.trainers.state.train_state import WIDENED, is_abstract
from jaxpp_flax.trainers.step.optimizer_update import Update


def held(value: float) -> StateHolder:
    update = Update(tx=optax.sgd(0.1, momentum=0.9))
    return StateHolder(update.first_state({"w": jnp.full(2, value)}, {}), update.tx.init)


def on_disk(path: Path, target: StateHolder) -> Checkpoint:
    return Checkpoint(plan_restore(path, read_whole_metadata(path), target.target(), widen=WIDENED))


def test_a_state_of_which_a_leaf_is_gone_is_none():
    there = held(1.0)
    there.whole()
    there.check_owned("trainer.fit")
    there.memory.params["w"].delete()
    with pytest.raises(RuntimeError, match=r"trainer.fit: the trainer has no state.*restore a checkpoint"):
        there.check_owned("trainer.fit")


STEP = object()  # a compiled step: without ranks nobody asks for its places
PLACES: list[Any] = [StateHolder.whole, lambda other: other.place(STEP)]


def test_the_users_arrays_are_copied_to_their_place():
    users = {"w": jnp.ones(2)}
    update = Update(tx=optax.sgd(0.1, momentum=0.9))
    made = StateHolder(update.first_state(users, {}), update.tx.init)
    assert is_abstract(made.memory.params)
    assert is_abstract(made.weights().opt_state)
    made.place(STEP)
    assert made.places is not None
    assert not is_abstract(made.memory.opt_state)
    made.memory.params["w"].delete()
    assert not users["w"].is_deleted()


@pytest.mark.parametrize("read", PLACES)
def test_a_state_on_disk_is_read_when_it_is_placed(read: Callable[[StateHolder], Any], tmp_path: Path):
    path, other = save_step(tmp_path / "saved", held(2.0).whole(), {}), held(1.0)
    other.take(on_disk(path, other))
    assert is_abstract(other.memory.params)
    read(other)
    np.testing.assert_array_equal(other.memory.params["w"], [2.0, 2.0])


def test_what_is_placed_is_replaced_at_once(tmp_path: Path):
    path, placed = save_step(tmp_path / "saved", held(3.0).whole(), {}), held(1.0)
    placed.place(STEP)
    before = placed.memory
    placed.take(on_disk(path, placed))
    assert placed.places is not None
    np.testing.assert_array_equal(placed.memory.params["w"], [3.0, 3.0])
    assert before.params["w"].is_deleted(), "memory never holds both"
    placed.take(Arrays({"params/w": placed.memory.params["w"]}))  # the array that is there
    np.testing.assert_array_equal(placed.memory.params["w"], [3.0, 3.0])


def test_the_last_source_of_a_leaf_is_read(tmp_path: Path):
    path, other = save_step(tmp_path / "saved", held(2.0).whole(), {}), held(1.0)
    other.take(on_disk(path, other))
    other.take(Arrays({"params/w": jnp.full(2, 5.0)}))
    state = other.whole()
    np.testing.assert_array_equal(state.params["w"], [5.0, 5.0])
    other.begin_anew()
    assert is_abstract(other.memory.opt_state)
    assert not is_abstract(other.whole().opt_state)


@pytest.mark.parametrize("read", PLACES)
def test_an_average_on_disk_may_be_narrower(read: Callable[[StateHolder], Any], tmp_path: Path):
    """Checkpoints of older versions have the average in the parameters' type; parameters fit exactly."""
    update = Update(tx=optax.sgd(0.1), ema_decay=0.5)
    made = lambda dtype: StateHolder(update.first_state({"w": jnp.full(2, 1.5, dtype)}, {}), update.tx.init)  # noqa: E731
    state = made(jnp.bfloat16).whole()
    path = save_step(tmp_path / "old", replace(state, ema={"w": jnp.full(2, 0.25, jnp.bfloat16)}), {})
    other = made(jnp.bfloat16)
    other.take(on_disk(path, other))
    read(other)
    assert (other.memory.params["w"].dtype, other.memory.ema["w"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(other.memory.ema["w"], [0.25, 0.25])
    plan_restore(path, read_whole_metadata(path), other.memory, widen=WIDENED)
    for target, leaf in ((made(jnp.float32), "params"), (made(jnp.float16), "ema"), (made(jnp.float16), "params")):
        narrow = replace(target.whole(), ema={"w": jnp.ones(2, jnp.float16)}) if leaf == "ema" else target.whole()
        with pytest.raises(CheckpointMismatchError, match=rf"{leaf}/w: dtype bfloat16 in the checkpoint, wanted float"):
            plan_restore(path, read_whole_metadata(path), narrow, widen=WIDENED)
