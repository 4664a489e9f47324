"""Steps that run twice: equal bits, and a device that computes wrongly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import Memory
from jaxpp_flax.trainers.loop.compiled_step import CompiledStep
from jaxpp_flax.verify import Replay, ReplayError
from tests.trainers import models as m


def make_trainer(**options: Any) -> PipelineTrainer:
    options = {"num_stages": 2, "mesh": {"data": 2}, **options}
    tx = optax.sgd(0.1, momentum=0.9)
    return PipelineTrainer(m.Layers(), tx, m.squared_error, num_microbatches=2, logging=False, **options)


BATCHES = [m.make_xy(8, seed=seed) for seed in range(4)]


@pytest.mark.parametrize(
    "options",
    [{"memory": Memory(optimizer_state="pinned_host")}, {"num_stages": 1, "mesh": {}}],
    ids=["on the host", "without a pipeline"],
)
def test_replays_change_nothing(options: dict[str, Any]):
    replayed, plain, replay = make_trainer(**options), make_trainer(**options), Replay(every=2)
    replayed.fit(BATCHES, steps=4, callbacks=[replay])
    plain.fit(BATCHES, steps=4)
    assert replay.replayed == [2, 4]
    for one, other in zip(jax.tree.leaves(replayed.state.params), jax.tree.leaves(plain.state.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_device_that_computes_wrongly_is_named(monkeypatch: pytest.MonkeyPatch):
    again = CompiledStep.__call__

    def damaged(self: CompiledStep, *of: Any, **named: Any) -> Any:
        """One bit of one number of one device is another one."""
        state, metrics = again(self, *of, **named)
        kernel: MpmdArray = state.params["layers"][1]["kernel"]
        (array,) = kernel._partially_addressable_arrays.values()
        parts = [np.array(shard.data) for shard in array.addressable_shards]
        parts[1].view(np.uint32)[1, 2] ^= 1
        devices = [shard.device for shard in array.addressable_shards]
        arrays = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
        whole = jax.make_array_from_single_device_arrays(array.shape, array.sharding, arrays)
        state.params["layers"][1]["kernel"] = MpmdArray({1: whole}, kernel.sharding)
        return state, metrics

    monkeypatch.setattr(CompiledStep, "__call__", damaged)
    trainer = make_trainer()
    with pytest.raises(
        ReplayError, match=r"step 1 gave other bits .*: params/layers/1/kernel on device .* of rank 1, at \(1, 2\)"
    ):
        trainer.fit(BATCHES, steps=4, callbacks=[Replay(every=1)])
