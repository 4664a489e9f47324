"""The state's three cases, without a trainer: made, on disk, placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.reading import plan_restore
from jaxpp_flax.checkpoint.writing import save_step
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.train_state import WIDENED, is_abstract
from jaxpp_flax.trainers.step.optimizer_update import Update


def held(value: float) -> StateHolder:
    update = Update(tx=optax.sgd(0.1, momentum=0.9))
    return StateHolder(update.first_state({"w": jnp.full(2, value)}, {}), update.tx.init)


def test_a_made_state_is_whole_for_a_caller_and_copied_to_its_place():
    made = held(1.0)
    users = made.memory.params["w"]
    assert is_abstract(made.weights().opt_state)
    made.place(None, lambda: made.memory)
    assert made.is_placed
    assert not is_abstract(made.memory.opt_state)
    assert made.memory.params["w"] is not users


def test_a_state_on_disk_is_read_when_it_is_placed_or_loaded(tmp_path: Path):
    path = save_step(tmp_path / "saved", held(2.0).whole(), {})
    for read in (StateHolder.load, lambda other: other.place(None, lambda: other.memory)):
        other = held(1.0)
        other.is_on_disk(path)
        assert other.memory.params["w"].shape == (2,)  # right in shapes alone
        for ask in (other.whole, other.weights):
            with pytest.raises(RuntimeError, match=r"the state is the checkpoint .*/saved, which `fit\(resume=True\)`"):
                ask()
        read(other)
        np.testing.assert_array_equal(other.memory.params["w"], [2.0, 2.0])


def test_what_is_restored_lies_where_the_state_did():
    made, placed = held(1.0), held(1.0)
    placed.place(None, lambda: placed.memory)
    for each, is_placed in ((made, False), (placed, True)):
        each.restored(held(3.0).whole())
        assert each.is_placed == is_placed
        assert float(each.weights().params["w"][0]) == 3.0


@pytest.mark.parametrize("read", [StateHolder.load, lambda other: other.place(None, lambda: other.memory)])
def test_an_average_on_disk_may_be_narrower(read: Callable[[StateHolder], None], tmp_path: Path):
    """Checkpoints of older versions have the average in the parameters' type; parameters fit exactly."""
    update = Update(tx=optax.sgd(0.1), ema_decay=0.5)
    made = lambda dtype: StateHolder(update.first_state({"w": jnp.full(2, 1.5, dtype)}, {}), update.tx.init)  # noqa: E731
    state = made(jnp.bfloat16).whole()
    path = save_step(tmp_path / "old", replace(state, ema={"w": jnp.full(2, 0.25, jnp.bfloat16)}), {})
    other = made(jnp.bfloat16)
    other.is_on_disk(path)
    read(other)
    assert (other.memory.params["w"].dtype, other.memory.ema["w"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(other.memory.ema["w"], [0.25, 0.25])
    plan_restore(path, other.memory, widen=WIDENED)
    for target, leaf in ((made(jnp.float32), "params"), (made(jnp.float16), "ema"), (made(jnp.float16), "params")):
        narrow = replace(target.whole(), ema={"w": jnp.ones(2, jnp.float16)}) if leaf == "ema" else target.whole()
        with pytest.raises(CheckpointMismatchError, match=rf"{leaf}/w: dtype bfloat16 in the checkpoint, wanted float"):
            plan_restore(path, narrow, widen=WIDENED)
