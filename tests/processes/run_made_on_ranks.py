"""Run by `test_trainer.py` as two processes: a model that is given as a function, and one that differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.processes.comparison import ValuesMismatchError  # noqa: E402
from jaxpp_flax.trainers import Memory, Training  # noqa: E402
from tests.trainers.models import Layers, make_xy, squared_error  # noqa: E402

WIDTH = 32
LEAF = WIDTH * WIDTH * 4
BATCH = make_xy(4, WIDTH)


def make(factory: Any, **options: Any) -> PipelineTrainer:
    options = {"num_stages": 2, "num_microbatches": 2, "logging": False, **options}
    return PipelineTrainer(factory, optax.adam(1e-2), squared_error, training=Training(ema_decay=0.5), **options)


def factory(rngs: nnx.Rngs) -> Layers:
    return Layers(4, WIDTH, rngs=rngs, use_bias=False, dropout=0.1)


def own_bytes() -> int:
    """The bytes of all parameters' size in this process."""
    shards = [shard.data for array in jax.live_arrays() if array.size > WIDTH for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


def check(tree: Any, expected: Any) -> None:
    """The parts of this process have the values of the eager model."""
    found = dict(jax.tree_util.tree_leaves_with_path(tree))
    for path, right in jax.tree_util.tree_leaves_with_path(expected):
        for part in found[path]._partially_addressable_arrays.values():
            np.testing.assert_allclose(np.asarray(part), right, rtol=1e-6, atol=1e-8)


def main() -> None:
    directory = Path(sys.argv[1])
    trainer = make(factory)
    trainer.save(directory / "before")  # before anything is compiled
    # Two of the four kernels, with two moments and the average.
    assert own_bytes() <= 8 * LEAF, own_bytes() / LEAF
    trainer.compile(BATCH)
    assert own_bytes() <= 8 * LEAF, own_bytes() / LEAF
    eager = jax.tree.map(np.asarray, nnx.state(Layers(4, WIDTH, use_bias=False), nnx.Param))
    check(trainer.state.params, eager)
    check(trainer.state.ema, eager)
    losses = [float(trainer.train_step(BATCH)["loss"]) for _ in range(2)]

    read = make(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))
    read.restore(directory / "before")
    assert [float(read.train_step(BATCH)["loss"]) for _ in range(2)] == losses
    first = make(factory)
    first.evaluate([BATCH])
    assert [float(first.train_step(BATCH)["loss"]) for _ in range(2)] == losses
    # The optimizer's state lies on the host, and a layer of it goes to the other process when the step is compiled.
    on_host = make(factory, memory=Memory(optimizer_state="pinned_host"), assignment=[3, 1])
    on_host.restore(directory / "before")
    # The stages are other programs, which round otherwise: a few units in the last place.
    np.testing.assert_allclose([float(on_host.train_step(BATCH)["loss"]) for _ in range(2)], losses, rtol=1e-6)
    moments = [leaf for leaf in jax.tree.leaves(on_host.state.opt_state) if leaf.size > 1]
    kinds = {part.sharding.memory_kind for x in moments for part in x._partially_addressable_arrays.values()}
    assert kinds == {x.sharding.memory_kind for x in moments} == {"pinned_host"}, kinds
    print("losses", *losses, flush=True)

    differing = make(lambda: factory(nnx.Rngs(jax.process_index())))
    try:
        differing.train_step(BATCH)
    except ValuesMismatchError as error:
        print(f"differing: {error}", flush=True)


main()
