"""What cannot run is refused when an mpmd function is lowered: what, where, and what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.tasks import MpmdMesh, mpmd, task, transfer
from tests.engine.toys import mesh_of

X = np.ones((4, 2), np.float32)


@pytest.fixture(scope="module")
def mesh() -> MpmdMesh:
    return mesh_of(2, fsdp=2)


def on(mesh: MpmdMesh, rank: int, *spec: Any, memory_kind: str | None = None) -> NamedSharding:
    return NamedSharding(mesh.unstack[rank], P(*spec), memory_kind=memory_kind)


def double(submeshes: MpmdMesh, x: Any, **options: Any) -> Any:
    return task(lambda x: 2 * x, name="double", **{"out_shardings": on(submeshes, 0), **options})(x)


def elsewhere() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[4:6]).reshape(1, 2), ("stage", "fsdp")), P())


def done_twice(mesh: MpmdMesh, x: Any) -> Any:
    future = transfer(x, out_shardings=on(mesh, 1))
    return future.done(), future.done()


def used_after_donation(mesh: MpmdMesh, x: Any) -> Any:
    y = double(mesh, x)
    return double(mesh, y, donate_argnums=0), double(mesh, y)


def returned_after_donation(mesh: MpmdMesh, x: Any) -> Any:
    y = double(mesh, x)
    return double(mesh, y, donate_argnums=0), y


def donated_after_sending(mesh: MpmdMesh, x: Any) -> Any:
    y = double(mesh, x)
    sent = transfer(y, out_shardings=on(mesh, 1)).done()
    return double(mesh, y, donate_argnums=0), sent


def donated_and_read_again(mesh: MpmdMesh, x: Any) -> Any:
    y = double(mesh, x)
    return task(jnp.add, out_shardings=on(mesh, 0), name="add", donate_argnums=0)(y, y)


def two_ranks_without_a_mesh(mesh: MpmdMesh, x: Any) -> Any:
    there = transfer(x, out_shardings=on(mesh, 1)).done()
    return task(jnp.add, out_shardings=P(), name="add")(x, there)


REFUSALS: dict[str, tuple[Callable[[MpmdMesh, Any], Any], type[Exception], str]] = {
    "operation": (lambda mesh, x: double(mesh, x) + 1, ValueError,
        r"`add` at .*test_refusals.py:\d+.*, which gives f32\[4,2\], stands outside of the tasks .* Move it into"),
    "two meshes": (lambda mesh, x: double(mesh, x, out_shardings=on(mesh, 0), mesh=mesh.unstack[1]), ValueError,
        r"task 'double' is on several meshes: rank 0 \(out_shardings\), rank 1 \(mesh\)\. A task runs on one rank"),
    "no mesh": (lambda mesh, x: task(lambda: jnp.ones(2), out_shardings=P(), name="ones")(), ValueError,
        r"task 'ones' names no mesh, and no argument has a rank\. Tell the rank: `mesh=mpmd_mesh.unstack"),
    "arguments of two ranks": (two_ranks_without_a_mesh, ValueError,
        r"task 'add' names no mesh, and its arguments are on the ranks \[0, 1\]\. Tell the rank"),
    "no rank": (lambda mesh, x: double(mesh, x, out_shardings=elsewhere()), ValueError,
        r"a sharding in out_shardings of task 'double' is over a mesh that is no rank of .* its devices \[4, 5\]"),
    "several ranks": (lambda mesh, x: double(mesh, x, mesh=mesh.mpmd_submesh([0, 1]).jax_mesh), ValueError,
        r"`mesh` of task 'double' is over a mesh that is no rank of .* its devices \[0, 1, 2, 3\]"),
    "axis": (lambda mesh, x: double(mesh, x, out_shardings=P("tensor")), ValueError,
        r"out_shardings of task 'double' is P\('tensor',?\), but rank 0 has only the axes"),
    "prefix": (lambda mesh, x: double(mesh, x, out_shardings=[P(), P()]), ValueError,
        r"out_shardings of task 'double' is not a prefix of the tree"),
    "no out sharding": (lambda mesh, x: double(mesh, x, out_shardings=None), ValueError,
        r"out_shardings of task 'double' is None, but on a mesh with Auto axes"),
    "in_shardings": (lambda mesh, x: double(mesh, x, in_shardings=P("fsdp")), ValueError,
        r"argument leaf 0 of task 'double', float32\[4,2\], has the partition P\(\), but in_shardings say P\('fsdp'"),
    "count of in_shardings": (lambda mesh, x: double(mesh, x, in_shardings=(P(), P())), ValueError,
        r"task 'double' has 2 in_shardings for 1 positional arguments"),
    "no array": (lambda mesh, x: double(mesh, "word"), TypeError,
        r"argument leaf 0 of task 'double' is a str, which is no array\. Close over it"),
    "donate_argnums": (lambda mesh, x: double(mesh, x, donate_argnums=1), ValueError,
        r"task 'double' has donate_argnums=1, but is called with 1 arguments"),
    "done twice": (done_twice, RuntimeError, r"`\.done\(\)` of transfer 0 was called twice\. The first call returned"),
    "never done": (lambda mesh, x: (transfer(x, out_shardings=on(mesh, 1)), x)[1], ValueError,
        r"f starts 1 transfers and never takes the values of transfer 0 .* Call `\.done\(\)`"),
    "same rank": (lambda mesh, x: transfer(x, out_shardings=on(mesh, 0, "fsdp")).done(), ValueError,
        r"`transfer` of float32\[4,2\] on rank 0: transfer out_shardings is on rank 0 too\. A transfer goes to"),
    "other spec": (lambda mesh, x: transfer(x, out_shardings=on(mesh, 1, "fsdp")).done(), ValueError,
        r"transfer out_shardings is P\('fsdp',?\), but the value has P\(\)\. A transfer does not repartition"),
    "other memory": (lambda mesh, x: transfer(x, out_shardings=on(mesh, 1, memory_kind="pinned_host")),
        ValueError, r"transfer out_shardings is P\(\) in 'pinned_host', but the value has P\(\)\."),
    "a spec to transfer to": (lambda mesh, x: transfer(x, out_shardings=P()).done(), TypeError,
        r"transfer out_shardings must be a NamedSharding, got P"),
    "nothing to transfer": (lambda mesh, x: transfer((), out_shardings=on(mesh, 1)), ValueError,
        r"`transfer` got no array"),
    "transfer of a constant": (lambda mesh, x: transfer(X, out_shardings=on(mesh, 1)), TypeError,
        r"`transfer` got .* which is neither an argument nor the result of a task"),
    "donated and used": (used_after_donation, ValueError,
        r"task 'double' at .*test_refusals.py:\d+.* reads f32\[4,2\], which task 'double' at .* has taken as a don"),
    "donated and returned": (returned_after_donation, ValueError,
        r"result leaf 1 of the mpmd function reads f32\[4,2\], which task 'double'"),
    "donated and sent": (donated_after_sending, ValueError,
        r"donates its operand 0, f32\[4,2\], which an earlier transfer sends: the copy may still be reading it"),
    "donated and read twice": (donated_and_read_again, ValueError, r"but reads it twice"),
    "donated argument": (lambda mesh, x: double(mesh, x, donate_argnums=0), ValueError,
        r"which is an argument of the mpmd function that the caller keeps\. Name the argument in `donate_argnums`"),
    "ordered effect": (lambda mesh, x: task(printing, out_shardings=on(mesh, 0))(x), ValueError,
        r"has a side effect with ordered=True"),
    "grad": (lambda mesh, x: jax.grad(lambda x: double(mesh, x)[0, 0])(x), NotImplementedError,
        r"task 'double' got, as argument leaf 0, a value inside of `jax.grad`, .* Call the transformation in the task"),
    "vmap": (lambda mesh, x: jax.vmap(lambda x: double(mesh, x))(x), NotImplementedError,
        r"task 'double' got, as argument leaf 0, a value inside of `jax.grad`, `jax.vmap`"),
    "loop": (lambda mesh, x: jax.lax.fori_loop(0, 2, lambda _, x: double(mesh, x), x), ValueError,
        r"`scan` at .*test_refusals.py:\d+.* stands outside of the tasks"),
    "a task in a task": (lambda mesh, x: task(lambda x: double(mesh, x), out_shardings=on(mesh, 0))(x), RuntimeError,
        r"task 'double' was called outside of an mpmd function, .* and not inside a task"),
}  # fmt: skip


def printing(x: Any) -> Any:
    jax.debug.print("{}", x[0, 0], ordered=True)
    return x


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_when_it_is_lowered(mesh: MpmdMesh, name: str):
    function, error, text = REFUSALS[name]

    def f(x: Any) -> Any:
        return function(mesh, x)

    with pytest.raises(error, match=f"(?s){text}"):
        mpmd(mesh, in_shardings=on(mesh, 0))(f).lower(X)


def test_refused_around_the_function(mesh: MpmdMesh):
    here = on(mesh, 0)
    with pytest.raises(TypeError, match=r"mpmd_mesh must be an MpmdMesh, got Mesh\. Wrap the mesh"):
        mpmd(mesh.jax_mesh, in_shardings=here)  # pyright: ignore[reportArgumentType]
    f = mpmd(mesh, in_shardings=here)(lambda x: double(mesh, x))
    with pytest.raises(ValueError, match=r"was called with keyword arguments \(x\), .* Pass them by position"):
        f(x=X)
    with pytest.raises(TypeError, match=r"argument\[0\] is a str, which is no array"):
        f("word")
    with pytest.raises(TypeError, match=r"in_shardings of <lambda> must be a NamedSharding, got P"):
        mpmd(mesh, in_shardings=P())(lambda x: x)(X)
    with pytest.raises(ValueError, match=r"in_shardings of <lambda> is over a mesh that is no rank of"):
        mpmd(mesh, in_shardings=elsewhere())(lambda x: x)(X)
    with pytest.raises(ValueError, match=r"argument\[0\] has shape \(3,\), .* 3 is no multiple of 2"):
        mpmd(mesh, in_shardings=on(mesh, 0, "fsdp"))(lambda x: x)(np.ones(3))


def test_outside_of_a_function(mesh: MpmdMesh):
    with pytest.raises(RuntimeError, match=r"task 'double' was called outside of an mpmd function"):
        double(mesh, X)
    with pytest.raises(RuntimeError, match=r"`transfer` was called outside of an mpmd function"):
        jax.jit(lambda x: transfer(x, out_shardings=on(mesh, 0)))(X)
    with pytest.raises(RuntimeError, match=r"jax\.disable_jit is on"), jax.disable_jit():
        mpmd(mesh, in_shardings=on(mesh, 0))(lambda x: x)(X)


def test_a_task_without_out_shardings():
    with pytest.raises(TypeError, match="out_shardings"):
        task(lambda x: x)  # pyright: ignore[reportCallIssue]


def test_explicit_types_need_no_out_shardings():
    mesh = mesh_of(2, AxisType.Explicit, fsdp=1)
    f = mpmd(mesh, in_shardings=on(mesh, 0, "fsdp"))(lambda x: double(mesh, x, out_shardings=None))
    assert f.lower(X).out_shardings == on(mesh, 0, "fsdp")
