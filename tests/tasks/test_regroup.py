"""Values of several ranks joined, computed with as one, and taken apart again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import tasks
from tests.helpers import tree_allclose
from tests.running import ROOT, run_python


def mesh_of(kind: AxisType = AxisType.Auto) -> tasks.MpmdMesh:
    devices = np.array(jax.devices()[:6]).reshape(3, 2)
    return tasks.MpmdMesh(Mesh(devices, ("stage", "data"), axis_types=(kind, kind)), "stage")


def on(mesh: tasks.MpmdMesh, ranks: list[int], *spec: Any) -> NamedSharding:
    return NamedSharding(mesh.mpmd_submesh(ranks).jax_mesh, P(*spec))


A, B = np.arange(8, dtype=np.float32).reshape(1, 8), np.arange(16, dtype=np.float32).reshape(2, 8) ** 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_parts_along_the_ranks_axis(kind: AxisType):
    mesh = mesh_of(kind)
    first = NamedSharding(mesh.unstack[0], P("stage", "data"))

    @tasks.mpmd(mesh, in_shardings=(first, on(mesh, [1, 2], "stage", "data")))
    def regroup(a: Any, b: Any) -> Any:
        whole = tasks.stack(a, b)
        total = tasks.task(lambda x: x.sum(0), out_shardings=on(mesh, [0, 1, 2], "data"), name="total")(whole)
        return whole, tasks.slice(whole, [[0, 1], 2]), tasks.slice(total, [0, [1, 2]])

    whole, parts, totals = regroup(A, B)
    both = np.concatenate([A, B])
    tree_allclose((whole, parts, totals), (both, (both[:2], both[2:]), (both.sum(0),) * 2))
    assert whole.sharding.is_equivalent_to(on(mesh, [0, 1, 2], "stage", "data"), 2)
    assert parts[0].sharding.is_equivalent_to(on(mesh, [0, 1], "stage", "data"), 2)
    assert [set(x.devices()) for x in (*parts, *totals)] == [
        set(jax.devices()[i:j]) for i, j in ((0, 4), (4, 6), (0, 2), (2, 6))
    ]
    text = regroup.lower(A, B).as_text(rank=1)
    assert "ranks 1+2: s" in text
    assert "ranks 0+1+2: " in text
    assert "total(" in text


def test_values_without_the_ranks_axis_get_one():
    mesh = mesh_of()
    each = [NamedSharding(submesh, P("data")) for submesh in mesh.unstack]

    @tasks.mpmd(mesh, in_shardings=each[:2])
    def regroup(x: Any, y: Any) -> Any:
        return tasks.stack(y, x)

    x, y = np.arange(2.0, dtype=np.float32), np.ones(2, np.float32)
    found = regroup(x, y)
    tree_allclose(found, np.stack([y, x]), rtol=0, atol=0)
    assert found.sharding.is_equivalent_to(on(mesh, [1, 0], "stage", "data"), 2)


def test_a_transfer_between_groups():
    mesh = tasks.MpmdMesh(Mesh(np.array(jax.devices()[:4]), ("stage",)), "stage")
    source, target = on(mesh, [0, 1], "stage"), on(mesh, [2, 3], "stage")
    move = tasks.mpmd(mesh, in_shardings=source)(lambda x: tasks.transfer(x, out_shardings=target).done())
    found = move(B)
    tree_allclose(found, B, rtol=0, atol=0)
    assert found.sharding.is_equivalent_to(target, 2)
    assert move.lower(B).as_text() == "ranks 0+1 -> ranks 2+3: send v0 receive v1"


REFUSALS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "one rank twice": (lambda a, b: tasks.stack(a, a), ValueError,
        r"`stack` got values of the ranks \[0, 0\]: it joins"),
    "nothing": (lambda a, b: tasks.stack(), ValueError, r"`stack` got values of the ranks \[\]"),
    "shapes": (lambda a, b: tasks.stack(tasks.task(lambda x: x[:, :4], out_shardings=P("stage"))(a), b), ValueError,
        r"`stack` got values that differ behind the first dimension: float32\[1, 4\]"),
    "extents": (lambda a, b: tasks.stack(tasks.task(lambda x: jnp.concatenate([x, x]), out_shardings=P("stage"))(a), b),
        ValueError, r"`stack` got values with \[1, 2\] entries for each rank"),
    "a constant": (lambda a, b: tasks.stack(a, 1.0), TypeError, r"`stack` got 1.0, which no task and no argument gave"),
    "groups": (lambda a, b: tasks.slice(b, [2, 1]), ValueError,
        r"`slice` got the groups \[2, 1\] for a value of the ranks \[1, 2\]"),
    "dimension": (lambda a, b: tasks.slice(tasks.task(jnp.transpose, out_shardings=P(None, "stage"))(b), [1, 2]),
        ValueError, r"`slice` got float32\[8,2\] cut as P\(None, .stage.\): .stage. must cut the first dimension"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(name: str):
    mesh = mesh_of()
    function, error, text = REFUSALS[name]
    f = tasks.mpmd(mesh, in_shardings=(NamedSharding(mesh.unstack[0], P("stage")), on(mesh, [1, 2], "stage")))(function)
    with pytest.raises(error, match=text):
        f.lower(A, B)


def test_outside_of_a_function():
    with pytest.raises(RuntimeError, match=r"`stack` was called outside of an mpmd function"):
        tasks.stack(A)


@pytest.mark.processes
def test_two_processes():
    program = str(ROOT / "tests" / "tasks" / "run_regroup.py")
    output = run_python(
        "-m", "jaxpp_flax.launch", "-n", "2", "--devices-per-process", "2", program, XLA_FLAGS=None
    ).stdout
    assert "process 0: [[10.0, 12.0]]" in output
    assert "process 1: [[10.0, 12.0]]" in output
