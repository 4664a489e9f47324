"""Run by `test_mpmd.py` as two processes of four devices: programs of `mpmd.jit` over meshes of both.

Usage: run_mpmd.py NAMES; the names are JSON. Each process compares with what it computes alone by plain `jax.jit`.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any

from tests.processes.running import join_run
from tests.running import ROOT

# XLA runs a process's devices in as many threads as there are cores or devices. If there are no more threads than
# devices, collectives of two computations can take half of the threads each, and wait for the other half forever.
os.environ["NPROC"] = "16"
join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxpp_flax import mpmd  # noqa: E402
from jaxpp_flax.processes.comparison import ProgramMismatchError, ValuesMismatchError  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402
from tests.mpmd.programs import batches, block, config, in_runs, in_turn, model, train_step, weights  # noqa: E402

# Sums of float32 in another order, over the shards of a batch.
RTOL = 1e-5
me = jax.process_index()
own = [[device for device in jax.devices() if device.process_index == process] for process in range(2)]


def mesh(process: int, first: int, *shape: int) -> Mesh:
    """A mesh of one process's devices from the number `first` on."""
    count = int(np.prod(shape))
    return Mesh(np.array(own[process][first : first + count]).reshape(shape), ("data", "model")[: len(shape)])


def on_host(tree: Any) -> Any:
    """Copies that no process places: JAX gives every process its own."""
    return jax.tree.map(np.array, tree)


def compare(actual: Any, expected: Any) -> int:
    """Compare what this process has of the results; return the number of results of which it has a part."""
    compared = 0
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert isinstance(got, jax.Array)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        for shard in got.addressable_shards:
            tree_allclose(np.asarray(shard.data), np.asarray(want)[shard.index], rtol=RTOL, atol=1e-6)
        compared += bool(got.addressable_shards)
    return compared


def train(meshes: dict[str, Mesh], assignment: dict[str, str], schedule: str | None, **options: Any) -> Any:
    """Three steps, each on the results of the last one; return the last results."""
    ws, xs = on_host(weights(4)), on_host(batches(4, rows=8))
    step = mpmd.jit(train_step, config(meshes, assignment, schedule), **options)
    plain = jax.jit(train_step)
    actual, expected = ws, ws
    for _ in range(3):
        (actual, loss), (expected, want) = step(actual, xs), plain(expected, xs)
        found = compare((actual, loss), (expected, want))
    owners = {device.process_index for array in jax.tree.leaves(actual) for device in array.sharding.device_set}
    assert owners == {0, 1}
    assert 0 < found < 5
    return actual


def one_mesh_each() -> None:
    """Forward alone, on a mesh of one device in each process."""
    ws, x = on_host(weights(2)), on_host(batches(1)[0])
    meshes = {"m0": mesh(0, 0, 1), "m1": mesh(1, 0, 1)}
    lowered = mpmd.jit(model, config(meshes, in_runs(2, 2))).lower(ws, x)
    compiled = lowered.compile()
    for run in (compiled, compiled, lowered.compile()):
        result = run(ws, x)
        assert compare(result, jax.jit(model)(ws, x)) == (me == 1)
    assert result.sharding.device_set == set(meshes["m1"].devices.flat)
    # What another process reads may be a shape; what this process reads may not.
    read_here = [number == me for number in range(2)]
    given = [w if here else jax.ShapeDtypeStruct(w.shape, w.dtype) for w, here in zip(ws, read_here, strict=True)]
    compare(compiled(given, x), jax.jit(model)(ws, x))
    if me == 0:
        assert not result.is_fully_addressable
        with pytest.raises(RuntimeError, match="non-addressable"):
            np.asarray(result)


def other_shapes() -> None:
    """Meshes of other sizes and axes, with rows and columns cut."""
    rows = (None, P("data"))
    meshes = {"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}
    train(meshes, in_runs(4, 2), None, in_shardings=rows)
    meshes = {"m0": mesh(0, 0, 1, 2), "m1": mesh(1, 0, 2, 2)}
    train(meshes, in_turn(4, 2), None, in_shardings=([P(None, "model")] * 4, P("data")))


def three_meshes() -> None:
    """Process 0 has two of three, by 1F1B."""
    meshes = {"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4), "m2": mesh(0, 2, 1)}
    assignment = {"block_0": "m0", "block_1": "m1", "block_2": "m1", "block_3": "m2"}
    train(meshes, assignment, "ONE_FWD_ONE_BWD", in_shardings=(None, P("data")))


def pipeline() -> None:
    """1F1B with donated weights, which stay where they are."""
    meshes = {"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}
    results = train(meshes, in_runs(4, 2), "ONE_FWD_ONE_BWD", donate_argnums=0)
    places = [{d.process_index for d in w.sharding.device_set} for w in results]
    assert places == [{0}, {0}, {1}, {1}]


def zero_bubble() -> None:
    """A split backward pass over a mesh that both processes share, beside a mesh of one of them."""
    shared = Mesh(np.array([own[0][0], own[1][0], own[0][1], own[1][1]]), ("data",))
    meshes = {"m0": shared, "m1": mesh(1, 2, 2)}
    ws, xs = on_host(weights(2)), on_host(batches(3, rows=8))
    step = mpmd.jit(train_step, config(meshes, in_runs(2, 2), "ZERO_BUBBLE_H1"), in_shardings=(None, P("data")))
    for _ in range(2):
        results = step(ws, xs)
        assert compare(results, jax.jit(train_step)(ws, xs)) == (1 if me == 0 else 3)


def shared_scalars() -> None:
    """Adam over both meshes: all read the count of steps, which a step returns on the mesh of process 0."""
    optimizer = optax.adam(0.1)

    def step(ws: Any, state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda ws: jnp.mean(model(ws, x) ** 2))(ws)
        updates, state = optimizer.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state, loss

    ws, xs = on_host(weights(2)), on_host(batches(3, rows=8))
    state = on_host(optimizer.init(ws))
    run = mpmd.jit(step, config({"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}, in_runs(2, 2)))
    actual, expected = (ws, state), (ws, state)
    for x in xs:
        *actual, loss = run(*actual, x)
        *expected, want = jax.jit(step)(*expected, x)
        compare((actual, loss), (expected, want))
    assert len(actual[1][0].count.sharding.device_set) < 6


def other_partitions() -> None:
    """One computation reads values with other partitions each time, and keys, and an argument passes through."""

    def step(w: jax.Array, key: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        apply = mpmd.named_computation(lambda w, x: jnp.tanh(x @ w), name="block_0")
        noise = mpmd.named_computation(lambda x, key: x + jax.random.uniform(key, x.shape), name="block_1")
        first = noise(apply(w, x), key)
        second = noise(apply(w, y), jax.random.split(key)[1])
        return apply(w, first), apply(w, second.T @ second), jax.random.split(key), x, jnp.ones(3)

    args = on_host((weights(1)[0], batches(1, rows=8)[0], batches(2, rows=8)[1]))
    args = args[0], jax.random.key(0), *args[1:]
    meshes = {"m0": mesh(0, 0, 2, 2), "m1": mesh(1, 0, 2)}
    specs = P(None, "model"), None, P("data"), P("model", "data")
    run = mpmd.jit(step, config(meshes, in_runs(2, 2)), in_shardings=specs)
    results, expected = run(*args), jax.jit(step)(*args)
    compare((*results[:2], *results[3:]), (*expected[:2], *expected[3:]))
    for shard in results[2].addressable_shards:
        np.testing.assert_array_equal(jax.random.key_data(shard.data), jax.random.key_data(expected[2]))
    # The first microbatch is cut, the second is not: the fragments of one task are compiled for both.
    ws, xs = on_host(weights(2)), on_host(batches(3, rows=8))
    meshes = {"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}
    lowered = mpmd.jit(
        train_step, config(meshes, in_runs(2, 2), "ONE_FWD_ONE_BWD"), in_shardings=(None, [P("data"), P(), P("data")])
    ).lower(ws, xs)
    compare(lowered.compile()(ws, xs), jax.jit(train_step)(ws, xs))
    assert bool(lowered.executables.variants) == (me == 0)


def arrays_on_meshes() -> None:
    """Arguments that `jax.device_put` has placed by `input_specs`, in all processes alike."""
    ws, x = on_host(weights(2)), on_host(batches(1)[0])
    lowered = mpmd.jit(model, config({"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}, in_runs(2, 2))).lower(ws, x)
    args = jax.device_put((ws, x), lowered.function_named_shardings.input_specs)
    assert [bool(w.addressable_shards) for w in args[0]] == [me == 0, me == 1]
    compare(lowered.compile()(*args), jax.jit(model)(ws, x))


def many_microbatches() -> None:
    """More microbatches than XLA's CPU client takes computations."""
    ws, xs = on_host(weights(2)), on_host(batches(40, rows=4))
    meshes = {"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}
    step = mpmd.jit(train_step, config(meshes, in_runs(2, 2), "GPIPE"), in_shardings=(None, P("data")))
    for _ in range(2):
        results = step(ws, xs)
    compare(results, jax.jit(train_step)(ws, xs))


def teacher_and_student() -> None:
    """The example, with a process for each model."""
    example = runpy.run_path(str(ROOT / "examples" / "mpmd" / "teacher_and_student.py"))
    step = example["step"]
    large, small = mesh(0, 0, 2), mesh(1, 0, 1)
    names = {"teacher": "large", "student": "small"}
    meshes = {"large": large, "small": small}
    cfg = mpmd.make_config(meshes, names, output_mesh_assignment=(None, None, "small", None))
    teacher, student = (example["init"](jax.random.key(i), width) for i, width in enumerate((64, 32)))
    xs = [jax.random.normal(jax.random.key(10 + i), (64, 16)) for i in range(3)]
    first = example["network"](teacher, xs[0])
    teacher, student, state, xs, labels = on_host((teacher, student, example["optimizer"].init(student), xs, first))
    distil = mpmd.jit(step, cfg, in_shardings=(None, None, None, None, None, P("data")))
    actual, expected = (student, state, labels), (student, state, labels)
    for x, following in itertools.pairwise(xs):
        *actual, loss = distil(teacher, *actual[:2], x, actual[2], following)
        *expected, want = jax.jit(step)(teacher, *expected[:2], x, expected[2], following)
        # Everything that the step returns is the student's.
        assert compare((actual, loss), (expected, want)) == (0 if me == 0 else len(jax.tree.leaves((actual, loss))))


def refusals() -> None:
    """What differs between the processes is refused in both, before anything is sent."""
    ws, x = on_host(weights(2)), on_host(batches(1)[0])
    meshes = {"m0": mesh(0, 0, 2), "m1": mesh(1, 0, 4)}
    cfg = config(meshes, in_runs(2, 2))

    def other(w: jax.Array, x: jax.Array) -> jax.Array:
        return block(w, x) if me == 0 else block(w, x) + 1

    with pytest.raises(ProgramMismatchError, match=r"do not agree on program [0-9]+. The first difference:"):
        mpmd.jit(lambda ws, x: model(ws, x, [other] * 2), cfg)(ws, x)
    swapped = meshes if me == 0 else {"m0": meshes["m1"], "m1": meshes["m0"]}
    with pytest.raises(ProgramMismatchError, match=r"process 0: rank 0 has the mesh \{'data': 2\} of the devices \["):
        mpmd.jit(model, config(swapped, in_runs(2, 2)))(ws, x)
    shared = {"m0": Mesh(np.array([own[0][0], own[1][0]]), ("data",)), "m1": mesh(1, 1, 1)}
    with pytest.raises(ValuesMismatchError, match=r"the arguments of program [0-9]+, .*: argument\[1\]"):
        mpmd.jit(model, config(shared, in_runs(2, 2)))(ws, x + np.float32(me))
    captured = jnp.full((), me, jnp.float32)
    with pytest.raises(ValuesMismatchError, match=r"the constants of program [0-9]+"):
        mpmd.jit(lambda ws: model([w + captured for w in ws], x), cfg)(ws)
    only = {"m0": mesh(0, 0, 1), "m1": mesh(0, 1, 1)}
    compiled = mpmd.jit(model, config(only, in_runs(2, 2))).lower(ws, x)
    if me == 0:  # a program of one process alone concerns no other
        compare(compiled.compile()(ws, x), jax.jit(model)(ws, x))
    else:
        with pytest.raises(ValueError, match=r"the topology \{'m0': .* has no device of process 1: all are of \[0\]"):
            compiled.compile()


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        one_mesh_each,
        other_shapes,
        three_meshes,
        pipeline,
        zero_bubble,
        shared_scalars,
        other_partitions,
        arrays_on_meshes,
        many_microbatches,
        teacher_and_student,
        refusals,
    )
}

if __name__ == "__main__":
    for name in json.loads(sys.argv[1]):
        faulthandler.dump_traceback_later(100, exit=True)
        CASES[name]()
        print(f"passed {name}", flush=True)
