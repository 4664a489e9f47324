"""Programs whose tasks are written by hand compute what plain `jax.jit` computes, as their author has laid them out."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import tasks
from tests.engine import toys
from tests.examples.running import load_example
from tests.helpers import slow, tree_allclose


def mesh_of(stages: int, data: int = 1, kind: AxisType = AxisType.Auto) -> tasks.MpmdMesh:
    return toys.mesh_of(stages, kind, fsdp=data)


def places(mesh: tasks.MpmdMesh, *spec: Any, memory_kind: str | None = None) -> list[NamedSharding]:
    return [NamedSharding(submesh, P(*spec), memory_kind=memory_kind) for submesh in mesh.unstack]


X = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    return load_example("tasks/one_f_one_b.py")


class TestOneForwardOneBackward:
    """The example of this kind, for several numbers of stages."""

    def _inputs(self, example: SimpleNamespace, stages: int, microbatches: int) -> Any:
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.normal(0, 0.3, shape).astype(np.float32)  # noqa: E731
        shapes = [(example.WIDTH, example.HIDDEN), (example.HIDDEN, example.WIDTH)]
        weights = [[tuple(draw(*s) for s in shapes) for _ in range(example.LAYERS)] for _ in range(stages)]
        return weights, *([draw(8, example.WIDTH) for _ in range(microbatches)] for _ in range(2))

    @pytest.mark.parametrize(("stages", "fsdp"), [(2, 2), slow(1, 1), slow(4, 2), slow(4, 1)])
    def test_losses_and_gradients(self, example: SimpleNamespace, stages: int, fsdp: int):
        weights, inputs, targets = self._inputs(example, stages, 4)
        step = example.make_step(mesh_of(stages, fsdp, AxisType.Explicit), 4)
        losses, grads = step(weights, inputs, targets)
        plain = jax.jit(jax.value_and_grad(example.whole_loss))
        expected = [plain(weights, x, target) for x, target in zip(inputs, targets, strict=True)]
        tree_allclose(losses, [loss for loss, _ in expected])
        # Sums over devices and microbatches in another order; float32 to 1e-5 of the largest entry.
        tree_allclose(grads, jax.tree.map(lambda *of: sum(of), *[grad for _, grad in expected]))

    def test_weights_are_gathered_once_and_gradients_are_summed_once(self, example: SimpleNamespace):
        weights, inputs, targets = self._inputs(example, 2, 4)
        lowered = example.make_step(mesh_of(2, 2, AxisType.Explicit), 4).lower(weights, inputs, targets)
        found: dict[str, dict[str, int]] = {"all-gather": {}, "(?:all-reduce|reduce-scatter)": {}}
        for name, executable in lowered.compile().tasks.items():
            for kind, counts in found.items():
                made = re.findall(rf"= (.*) {kind}\(", executable.as_text())
                matrices = len(re.findall(r"f32\[\d+,\d+\]", " ".join(made)))  # no scalars: each loss is a sum, too
                counts.update({name: matrices} if matrices else {})
        gathered, summed = found.values()
        each = 2 * example.LAYERS
        assert gathered == {"gather on rank 0": each, "gather on rank 1": each}
        assert summed == {"last_backward on rank 0": each, "last on rank 1": each}

    def test_what_a_forward_saves_waits_in_host_memory(self, example: SimpleNamespace):
        arguments = self._inputs(example, 2, 4)
        lowered = example.make_step(mesh_of(2, 2, AxisType.Explicit), 4).lower(*arguments)
        kinds = [
            [str(atom.aval.memory_space) for atom in task.graph.outputs].count("MemorySpace.Host")
            for task in lowered.program.tasks
            if task.name.startswith("forward")
        ]
        assert kinds == [0, 0, example.LAYERS, 0]  # its backward task is not one of the next two


def test_a_chain_over_two_ranks_bitwise():
    mesh = mesh_of(2)
    on = places(mesh)
    first, second = (lambda x: jnp.sin(x) * 3), (lambda x, *, y: jnp.cos(x) + y)

    @tasks.mpmd(mesh, in_shardings=(on[0], on[1]))
    def f(x: Any, y: Any) -> Any:
        x = tasks.task(first, out_shardings=on[0], name="first")(x)
        x = tasks.transfer(x, out_shardings=on[1]).done()
        return {"z": tasks.task(second, out_shardings=on[1])(x, y=y), "x": x}

    found = f(X, X)
    tree_allclose(found, {"z": jax.jit(second)(jax.jit(first)(X), y=X), "x": jax.jit(first)(X)}, rtol=0, atol=0)
    assert found["z"].sharding == found["x"].sharding == on[1]


def test_equal_static_values_of_two_types_are_two_tasks():
    mesh = mesh_of(1)
    (here,) = places(mesh)

    def scaled(x: Any, by: Any) -> Any:
        return x * by

    @tasks.mpmd(mesh, in_shardings=here)
    def f(x: Any) -> Any:
        return [tasks.task(partial(scaled, by=by), out_shardings=here)(x) for by in (2, 2.0, 2)]

    whole = X.astype(np.int32)
    expected = [jax.jit(partial(scaled, by=by))(whole) for by in (2, 2.0, 2)]
    assert [y.dtype for y in f(whole)] == [y.dtype for y in expected] == [jnp.int32, jnp.float32, jnp.int32]


def test_a_transfer_that_nobody_wrote_is_inserted_once():
    mesh = mesh_of(2)
    on = places(mesh)

    @tasks.mpmd(mesh, in_shardings=on[0])
    def f(x: Any) -> Any:
        return [tasks.task(jnp.add, out_shardings=on[1], name="add")(x, k) for k in (1.0, 2.0)]

    text = f.lower(X).as_text()
    assert text.splitlines()[0] == "rank 0 -> rank 1: send v0 receive v1"
    assert text.count("->") == 1
    tree_allclose(f(X), [X + 1, X + 2], rtol=0, atol=0)


def test_captured_arrays_unread_arguments_and_results_without_a_task():
    mesh = mesh_of(2)
    on = places(mesh)
    table = jnp.arange(2.0)

    @tasks.mpmd(mesh, in_shardings=(on[1], on[0], on[0]))
    def f(x: Any, unread: Any, returned: Any) -> Any:
        other = tasks.task(lambda: jnp.ones(2), out_shardings=P(), mesh=mesh.unstack[1], name="ones")()
        y = tasks.task(lambda x: x + table + other, out_shardings=P())(x)
        return y, returned, 3, np.ones(2, np.float32)

    y, returned, number, array = f(X, X, X)
    tree_allclose(y, X + np.arange(2.0, dtype=np.float32) + 1, rtol=0, atol=0)
    assert y.sharding == on[1]
    assert returned.sharding == on[0]
    assert (number, array.tolist()) == (3, [1, 1])
    assert f.lower(X, X, X).used_inputs == (True, False, True)


def test_a_function_that_runs_for_each_microbatch_is_traced_and_compiled_once():
    mesh = mesh_of(2)
    on = places(mesh)
    traced: list[int] = []

    def body(x: Any) -> Any:
        traced.append(1)
        return x * 2

    @tasks.mpmd(mesh, in_shardings=on[0])
    def f(xs: Any) -> Any:
        return [tasks.task(partial(body), out_shardings=on[0], name="my body")(x) for x in xs]

    compiled = f.lower([X, X, X]).compile()
    assert len(traced) == 1
    assert list(compiled.tasks) == ["my_body on rank 0", "my_body.1 on rank 0", "my_body.2 on rank 0"]
    assert len(set(map(id, compiled.tasks.values()))) == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shardings_and_memory_kinds_survive(kind: AxisType):
    mesh = mesh_of(2, 2, kind)
    cut, host = places(mesh, "fsdp"), places(mesh, "fsdp", memory_kind="pinned_host")

    @tasks.mpmd(mesh, in_shardings=host[0])
    def f(x: Any) -> Any:
        here = tasks.task(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2, out_shardings=cut[0])(x)
        kept = tasks.task(lambda x: x, out_shardings=host[0], name="keep")(here)
        there = tasks.transfer(here, out_shardings=cut[1]).done()
        return here, kept, tasks.task(lambda x: x + 1, out_shardings=P("fsdp"))(there)

    here, kept, there = f(jax.device_put(X, host[0]))
    tree_allclose((here, kept, there), (2 * X, 2 * X, 2 * X + 1), rtol=0, atol=0)
    assert [a.sharding.is_equivalent_to(b, 2) for a, b in ((here, cut[0]), (kept, host[0]), (there, cut[1]))] == [
        True
    ] * 3
    assert kept.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("infer", [False, True])
def test_donations(infer: bool):
    mesh = mesh_of(2)
    on = places(mesh)

    @tasks.mpmd(mesh, in_shardings=(on[0], on[0]), donate_argnums=0, infer_donation=infer)
    def f(total: Any, x: Any) -> Any:
        y = tasks.task(lambda x: x * 2, out_shardings=on[0], name="double")(x)
        return tasks.task(lambda t, y: t + y, out_shardings=on[0], name="add", donate_argnums=() if infer else 1)(
            total, y
        )

    donating = [line for line in f.lower(X, X).as_text().splitlines() if "donating" in line]
    assert len(donating) == 1
    assert re.fullmatch(r"rank 0: v\d+ = add\((v\d+), (v\d+)\) donating (v\d+)", donating[0])
    groups = re.findall(r"v\d+", donating[0])
    assert groups[3] == groups[1 if infer else 2]
    total = jax.device_put(X, on[0])
    tree_allclose(f(total, X), 3 * X, rtol=0, atol=0)
    assert total.is_deleted()
    with pytest.raises(RuntimeError, match=r"argument\[0\] of f has been deleted"):
        f(total, X)


def test_the_program_of_a_rank_and_the_types_of_the_results():
    mesh = mesh_of(2)
    on = places(mesh)

    @tasks.mpmd(mesh, in_shardings=on[0])
    def f(x: Any) -> Any:
        return tasks.task(jnp.sum, out_shardings=on[1], name="sum")(tasks.task(jnp.sin, out_shardings=on[0])(x))

    lowered = f.lower(jax.ShapeDtypeStruct((4, 2), jnp.float32))
    assert lowered.as_text(0).splitlines() == [
        "rank 0: v1 = sin(v0)", "rank 0 -> rank 1: send v1 receive v2", "rank 0: free v1",
    ]  # fmt: skip
    assert lowered.as_text(1).splitlines()[1] == "rank 1: v3 = sum(v2)"
    assert (lowered.in_shardings, lowered.out_shardings) == ((on[0],), on[1])
    assert lowered.out_shape == jax.ShapeDtypeStruct((), jnp.float32, sharding=on[1])
    with pytest.raises(ValueError, match="rank 2 is not in"):
        lowered.as_text(2)
    tree_allclose(lowered(X), jnp.sum(jnp.sin(X)))
    assert "mpmd_task" in str(jax.make_jaxpr(f)(jax.ShapeDtypeStruct((4, 2), jnp.float32)))


def test_another_type_of_argument_compiles_again_and_a_compiled_one_refuses_it():
    mesh = mesh_of(1)
    (on,) = places(mesh)
    f = tasks.mpmd(mesh, in_shardings=on)(lambda x: tasks.task(jnp.sin, out_shardings=on)(x))
    compiled = f.lower(X).compile()
    tree_allclose((f(X), f(X[0])), (jnp.sin(X), jnp.sin(X[0])))
    with pytest.raises(TypeError, match=r"argument\[0\]: got float32\[2\], made for float32\[4, 2\]"):
        compiled(X[0])


def test_programs_for_several_structures_share_what_is_compiled():
    mesh = mesh_of(1)
    (here,) = places(mesh)

    @tasks.mpmd(mesh, in_shardings=here)
    def doubled(x: Any) -> Any:
        return tasks.task(jnp.add, out_shardings=here)(*[*jax.tree.leaves(x)] * 2)

    lowered = [doubled.lower(of) for of in (X, {"x": X})]
    for each in lowered:
        each.compile()
    assert lowered[0].compiler is lowered[1].compiler
    assert lowered[0].compiler.compilations == 1
