"""One of several processes that save and restore together: `run(N, JOBS)`.

JOBS is JSON: a list of lists, each the name of a function below and its arguments. Every process has 8/N of the
devices, so that layouts (`tests/checkpoint/layouts.py`) mean the same whatever N is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxpp_flax.trainers import Checkpoints
from tests.processes.running import Processes, run_processes, start_processes

DEVICES = 8


def start(count: int, jobs: Sequence[Sequence[Any]]) -> Processes:
    """Start `count` processes, one of which will be killed: the others are to notice soon."""
    soon = {"TEST_FAILURE_TIMEOUT": "8"}
    return start_processes(
        count, "tests.checkpoint.processes", json.dumps(jobs), devices=DEVICES // count, environment=soon
    )


def run(count: int, jobs: Sequence[Sequence[Any]]) -> list[str]:
    """Start `count` processes, wait for their end, and give what each printed.

    Raises:
      AssertionError: with all their output, if one fails or does not end.
    """
    return run_processes(count, "tests.checkpoint.processes", json.dumps(jobs), devices=DEVICES // count)


def layout_of(name: str) -> Any:
    """A layout of the table, or the one that is for several processes alone."""
    from tests.checkpoint.layouts import LAYOUTS, SHARED_STAGES

    return {**LAYOUTS, "stages of 2 processes": SHARED_STAGES}[name]


def put(state: Any, shardings: dict[str, Any]) -> Any:
    """The state where the shardings say, from what every process knows."""
    from jaxpp_flax.checkpoint.format.paths import flatten
    from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding

    def one(leaf: Any, sharding: Any) -> Any:
        if isinstance(sharding, MpmdSharding):
            local = [rank for rank in sharding.ranks if sharding.mpmd_mesh.is_local(rank)]
            parts = {rank: one(leaf, sharding.local_sharding(rank)) for rank in local}
            return MpmdArray(parts, sharding, shape=leaf.shape, dtype=leaf.dtype)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(one(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index], dtype=host.dtype)

    leaves, structure = flatten(state)
    return jax.tree.unflatten(structure, [one(leaf, shardings[path]) for path, leaf in leaves.items()])


def check(tree: Any, expected: Any, shardings: dict[str, Any]) -> None:
    """Every shard of this process, of every replica, bit by bit."""
    from jaxpp_flax.checkpoint.format.paths import flatten
    from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding

    wanted = flatten(expected)[0]
    compared = 0
    for path, leaf in flatten(tree)[0].items():
        sharding, want = shardings[path], wanted[path]
        assert leaf.sharding == sharding, path
        assert (leaf.shape, leaf.dtype) == (want.shape, want.dtype), path
        if isinstance(sharding, MpmdSharding):
            assert isinstance(leaf, MpmdArray), path
            parts = leaf._partially_addressable_arrays
            assert list(parts) == [rank for rank in sharding.ranks if sharding.mpmd_mesh.is_local(rank)], path
            replicas = list(parts.values())
        else:
            replicas = [leaf]
        if jax.dtypes.issubdtype(want.dtype, jax.dtypes.prng_key):
            replicas, want = [jax.random.key_data(replica) for replica in replicas], jax.random.key_data(want)
        for replica in replicas:
            for shard in replica.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(want)[shard.index], err_msg=path)
                compared += 1
    print("compared", compared)


def save(layout: str, seed: int, path: str) -> None:
    """A state made from `seed`, on `layout`."""
    from jaxpp_flax.checkpoint import save
    from tests.checkpoint.layouts import make_state

    state = make_state(seed)
    save(path, put(state, layout_of(layout).shardings(state)))


def restore(layout: str, seed: int, path: str) -> None:
    """What is at `path`, onto `layout`; it must be the state made from `seed`."""
    from jaxpp_flax.checkpoint import restore
    from tests.checkpoint.layouts import make_state

    state = make_state(seed)
    check(restore(path, layout_of(layout).target(state)), state, layout_of(layout).shardings(state))


def stock_save(seed: int, path: str) -> None:
    """Stock Orbax in one process, of the parameters alone."""
    import orbax.checkpoint as ocp

    from tests.checkpoint.layouts import make_state

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, make_state(seed)["params"])


def restore_params(layout: str, seed: int, path: str) -> None:
    """Parameters that stock Orbax wrote."""
    from jaxpp_flax.checkpoint import restore
    from tests.checkpoint.layouts import make_state

    state = {"params": make_state(seed)["params"]}
    restored = restore(path, layout_of(layout).target(state), rename={"params": ""})
    check(restored, state, layout_of(layout).shardings(state))


def store(layout: str, directory: str, first: int, last: int) -> None:
    """Saves in the background, keeping two; the arrays are given up at once, as steps do."""
    from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
    from tests.checkpoint.layouts import make_state

    checkpoints = CheckpointStore(directory, every=1, keep=2)
    for step in range(first, last + 1):
        state = make_state(step)
        tree = put(state, layout_of(layout).shardings(state))
        assert checkpoints.wants(step)
        checkpoints.save(step, tree, {"about": {"step": step}})
        for leaf in jax.tree.leaves(tree):
            leaf.delete()
    checkpoints.close()
    assert checkpoints.steps() == (last - 1, last)


def standard(layout: str, other: str, seed: int, path: str) -> None:
    """Orbax's own checkpointer after `register`, of parameters."""
    import orbax.checkpoint as ocp

    from jaxpp_flax.checkpoint import abstract_state, register
    from jaxpp_flax.checkpoint.format.orbax_io import multiprocessing_options
    from tests.checkpoint.layouts import make_state

    register()
    state = make_state(seed)["params"]
    with ocp.StandardCheckpointer(multiprocessing_options=multiprocessing_options("test")) as checkpointer:
        checkpointer.save(path, put(state, layout_of(layout).shardings(state)))
        checkpointer.wait_until_finished()
        shardings = layout_of(other).shardings(state)
        check(checkpointer.restore(path, abstract_state(put(state, shardings))), state, shardings)


def fails(message: str, *job: Any) -> None:
    """Whatever `job` does must fail with this in its message, in every process."""
    import pytest

    from jaxpp_flax.checkpoint import CheckpointError

    with pytest.raises(CheckpointError, match=message):
        globals()[job[0]](*job[1:])
    print("failed as it should")


def make_trainer(checkpoints: Any, stages: int, **options: Any) -> Any:
    """A trainer of four blocks whose ranks are spread over all processes; with `data`, each over several of them."""
    from jax.sharding import Mesh

    from tests.checkpoint import program

    data = options.pop("data", 1)
    devices = np.array(jax.devices()).reshape(stages, data, -1)[:, :, 0]
    mesh = Mesh(devices, ("stage", "data")) if data > 1 else Mesh(devices[:, 0], ("stage",))
    return program.make_trainer(checkpoints, stages, depth=4, mesh=mesh, **options)


def train(directory: str, stages: int, steps: int, signal_at: int | None = None, data: int = 1) -> None:
    """Go on to `steps`, with a checkpoint of every second one; process 1 gets SIGTERM after step `signal_at`."""
    from jaxpp_flax.trainers import Callback
    from tests.checkpoint.program import batches

    class Signal(Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            print("took step", record.step, flush=True)
            if record.step == signal_at and jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(Checkpoints(directory, every=2), stages, data=data)
    try:
        last = trainer.fit(batches(), steps=steps, resume=True, callbacks=[Signal()])
        print("loss", repr(last["loss"]), "step", trainer.step)
    except SystemExit as ended:
        print("status", ended.code, "step", trainer.step)


def back_and_forth(directory: str) -> None:
    """Save to paths before the first step and later, go back, and take the same step again."""
    from tests.checkpoint.program import batches

    first, second, *_ = batches(2)
    trainer = make_trainer(None, 2)
    trainer.save(f"{directory}/start")
    trainer.train_step(first)
    trainer.save(f"{directory}/one")
    loss = float(trainer.train_step(second)["loss"])
    for _ in range(2):
        trainer.restore(f"{directory}/one")
        assert trainer.step == 1
        assert float(trainer.train_step(second)["loss"]) == loss
    fresh = make_trainer(None, 2)
    fresh.restore(f"{directory}/one", only="params/*")  # before its place is known
    fresh.restore(f"{directory}/start")
    fresh.train_step(first)
    assert float(fresh.train_step(second)["loss"]) == loss


def main() -> None:
    from jaxpp_flax.launch import initialize

    # What these compute is compared by tolerances; what they save and restore, bit by bit.
    jax.config.update("jax_disable_most_optimizations", True)
    count = int(os.environ["TEST_PROCESSES"])
    if count > 1:
        initialize(
            coordinator_address=os.environ["TEST_COORDINATOR"],
            num_processes=count,
            process_id=int(os.environ["TEST_PROCESS"]),
            failure_timeout_s=float(os.environ.get("TEST_FAILURE_TIMEOUT", "15")),
        )
    jobs = json.loads(sys.argv[1])
    for function, *arguments in jobs:
        globals()[function](*arguments)
    print("all done", flush=True)


if __name__ == "__main__":
    main()
