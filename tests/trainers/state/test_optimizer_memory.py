"""The optimizer's state in host memory: the same training, and fewer bytes on the devices between steps."""

from __future__ import annotations

import gc
from collections import Counter
from importlib import import_module
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Memory, Training
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

stream_updates = import_module("jaxpp_flax.engine.passes.stream_updates")  # the package has the function's name
HOST = Memory(optimizer_state="pinned_host")
BATCH = m.make_xy(8)
OPTIMIZERS: dict[str, Any] = {
    "adam": optax.adam(1e-2),
    "clip_adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "rmsprop": optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "novograd": optax.novograd(1e-2),
    "nadam": optax.nadam(1e-2),
}


@sharing_steps()
def make(
    memory: Memory | None, num_stages: int = 2, model: Any = None, tx: Any = None, **options: Any
) -> PipelineTrainer:
    tx = OPTIMIZERS["clip_adamw"] if tx is None else tx
    model = m.Layers(rngs=nnx.Rngs(0)) if model is None else model
    return PipelineTrainer(
        model, tx, m.squared_error, num_stages=num_stages, num_microbatches=2, assignment="even", logging=False,
        memory=memory, **options,
    )  # fmt: skip


def live_bytes() -> Counter[tuple[Any, str]]:
    """The bytes of all live arrays, by device and kind of memory."""
    gc.collect()
    found: Counter[tuple[Any, str]] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            found[shard.device, str(array.sharding.memory_kind)] += shard.data.nbytes
    return found


def host_bytes(opt_state: Any) -> Counter[tuple[Any, str]]:
    """The bytes of an optimizer's arrays by device; the kind is the one where they are when they leave the device."""
    found: Counter[tuple[Any, str]] = Counter()
    for leaf in jax.tree.leaves(opt_state):
        for shard in (leaf if isinstance(leaf, jax.Array) else leaf.as_jax_array()).addressable_shards:
            if leaf.size > 1:
                found[shard.device, "pinned_host"] += shard.data.nbytes
    return found


def trained(memory: Memory | None, steps: int, **options: Any) -> tuple[PipelineTrainer, list[float], Counter[Any]]:
    """Train, and count what this has left live, if a trainer before it has made what is kept for all."""
    before = live_bytes()
    trainer = make(memory, **options)
    losses = [float(trainer.train_step(BATCH)["loss"]) for _ in range(steps)]
    jax.block_until_ready(jax.tree.leaves(trainer.state))
    after = live_bytes()
    after.subtract(before)
    return trainer, losses, Counter({key: size for key, size in after.items() if size})


def same(actual: Any, expected: Any) -> None:
    """Bit for bit: only the place of bytes differs."""
    jax.tree.map(lambda a, e: np.testing.assert_array_equal(np.asarray(a), np.asarray(e)), actual, expected)


def kinds(opt_state: Any) -> dict[bool, set[str]]:
    """The kinds of memory of the leaves that are single numbers, and of the others."""
    found: dict[bool, set[str]] = {}
    for leaf in jax.tree.leaves(opt_state):
        found.setdefault(leaf.size == 1, set()).add(leaf.sharding.memory_kind)
    return found


ON_HOST = {True: {"device"}, False: {"pinned_host"}}
OPTIONS = {
    "training": Training(ema_decay=0.9, frozen=["layers/0/bias"], on_nonfinite="skip"),
}


@pytest.mark.parametrize("num_stages", [slow(1), 2])  # which ends as one stage
def test_training_is_the_same_and_the_devices_hold_less(num_stages: int, tmp_path: Any):
    options = {"num_stages": num_stages, **OPTIONS}
    for memory in (None, HOST):  # what each way keeps for all trainers
        trained(memory, 1, **options)
    plain, expected, on_devices = trained(None, 3, **options)
    trainer, losses, on_host = trained(HOST, 3, **options)
    assert losses == expected
    assert kinds(trainer.state.opt_state) == ON_HOST
    same(trainer.state, plain.state)
    moved = host_bytes(trainer.state.opt_state)
    assert len(moved) == num_stages
    assert all(moved.values())
    for (device, kind), size in moved.items():
        assert on_host[device, kind] == size
        assert on_devices[device, "device"] - on_host[device, "device"] == size
        assert (device, kind) not in on_devices
    if num_stages > 1:
        analyses = [t.compile(BATCH).memory_analysis() for t in (plain, trainer)]
        freed = [a.argument_bytes - b.argument_bytes for a, b in zip(*analyses, strict=True)]
        assert freed == list(moved.values())

    saved = trainer.save(tmp_path / "saved")
    trainer.restore(saved)
    assert kinds(trainer.state.opt_state) == ON_HOST
    other = make(HOST, 3 - num_stages, **OPTIONS)
    other.restore(saved)
    assert kinds(other.state.opt_state) == ON_HOST  # before a step is compiled
    same(other.state, trainer.state)
    plain.restore(saved)  # a checkpoint knows no memory
    assert kinds(plain.state.opt_state) == {True: {"device"}, False: {"device"}}
    assert float(plain.train_step(BATCH)["loss"]) == float(trainer.train_step(BATCH)["loss"])


@pytest.mark.slow
@pytest.mark.full_compilation
@pytest.mark.parametrize("num_layers", [2, 4])  # a rank has one leaf of each shape, or two
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_leaves_that_are_fetched_alone_are_updated_alike(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, num_layers: int
):
    """XLA optimizes each program alone: last bits may differ from those of one program.

    Three updates of size 1e-2 beside weights of size 1: 1e-7 covers their last bits, and 1e-5 those of moments made
    from such weights.
    """

    def make_one(memory: Memory | None) -> PipelineTrainer:
        model = m.Layers(num_layers, 8, rngs=nnx.Rngs(0))
        return make(memory, model=model, tx=OPTIMIZERS[optimizer])

    plain = make_one(None)
    monkeypatch.setattr(stream_updates, "WINDOW_BYTES", 1)
    trainer, batch = make_one(HOST), m.make_xy(8, 8)
    for _ in range(3):
        losses = [float(each.train_step(batch)["loss"]) for each in (trainer, plain)]
        np.testing.assert_allclose(*losses, rtol=1e-6)
        tree_allclose(*(jax.tree.map(np.asarray, t.state) for t in (trainer, plain)), rtol=1e-5, atol=1e-7)
    assert kinds(trainer.state.opt_state)[False] == {"pinned_host"}
    assert len(trainer.compile(batch).program.tasks) > len(plain.compile(batch).program.tasks) + 1


def test_a_factory_makes_the_state_on_the_host():
    """A step written for this option also runs on a state that lies on the devices."""
    trainer = make(HOST, model=lambda rngs: m.Layers(rngs=rngs))
    assert kinds(trainer.state.opt_state) == ON_HOST
    step = jax.jit(trainer.step_function(BATCH))
    microbatches = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), BATCH)
    ordinary = make(None)
    ordinary_state = jax.tree.map(np.asarray, ordinary.state)
    state, metrics = step(ordinary_state, microbatches)
    assert kinds(state.opt_state) == ON_HOST
    assert float(metrics["loss"]) == pytest.approx(float(ordinary.train_step(BATCH)["loss"]), rel=1e-6)
