"""Shardings and types of the whole mesh become the submesh's, at any depth."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.passes.submesh_constraints import on_submesh, onto_mesh
from jaxpp_flax.engine.tracing.ir import Constant, Graph, from_jaxpr
from tests.engine.toys import mesh_of

X = np.arange(16, dtype=np.float32).reshape(4, 4)


def meshes(node: Any) -> set[AbstractMesh]:
    """Every mesh that a graph or jaxpr names: in types, contexts and parameters."""
    found: set[AbstractMesh] = set()

    def note(mesh: Any) -> None:
        if mesh is not None and not mesh.empty:
            found.add(getattr(mesh, "abstract_mesh", mesh))

    def visit(node: Any) -> None:
        if isinstance(node, Graph):
            atoms = [*node.inputs, *node.outputs]
            equations = [(e.inputs, e.outputs, e.params, e.context) for e in node.equations]
        else:
            inner = getattr(node, "jaxpr", node)
            atoms = [*inner.invars, *inner.outvars, *inner.constvars]
            equations = [(e.invars, e.outvars, e.params, e.ctx) for e in inner.eqns]
        for inputs, outputs, params, context in equations:
            atoms += [*inputs, *outputs]
            note(context.cur_abstract_mesh)
            for value in params.values():
                note(getattr(value, "mesh", None))
            for jaxpr in jex_core.jaxprs_in_params(dict(params)):
                visit(jaxpr)
        for atom in atoms:
            note(atom.aval.sharding.mesh)
            value = atom.value if isinstance(atom, Constant) else getattr(atom, "val", None)
            if hasattr(value, "dtype"):
                note(jax.typeof(value).sharding.mesh)

    visit(node)
    return found


def constrained(spec: Any) -> Any:
    """A constraint at the top, in a jit, in a rematerialised region, in a scan and in a condition."""

    def fun(x: jax.Array) -> jax.Array:
        constrain = lambda x: jax.lax.with_sharding_constraint(jnp.sin(x), spec)  # noqa: E731
        x = constrain(x)
        x = jax.jit(constrain)(x)
        x = jax.checkpoint(constrain)(x)
        x, _ = jax.lax.scan(lambda x, _: (constrain(x) + np.float32(1), None), x, None, length=2)
        return jax.lax.cond(x[0, 0] > 0, constrain, lambda x: x, x)

    return fun


@pytest.mark.parametrize("way", ["spec", "whole_mesh"])
def test_nothing_of_the_whole_mesh_is_left(way: str):
    mesh = mesh_of(2, data=2)
    spec = P(("stage", "data")) if way == "whole_mesh" else P("data")
    fun = constrained(NamedSharding(mesh.jax_mesh, spec) if way == "whole_mesh" else spec)
    with jax.sharding.use_abstract_mesh(mesh.jax_mesh.abstract_mesh):
        graph, _ = from_jaxpr(jax.make_jaxpr(fun)(X))
    assert meshes(graph) == {mesh.jax_mesh.abstract_mesh}
    moved = on_submesh(graph, mesh)
    moved.verify()
    assert meshes(moved) == {mesh.abstract_submesh}
    specs = {str(e.params["sharding"].spec) for e in moved.equations if e.name == "sharding_constraint"}
    assert all("stage" not in text and "data" in text for text in specs)
    with jax.sharding.use_abstract_mesh(mesh.abstract_submesh):
        traced = jax.make_jaxpr(lambda x: moved.run(x))(X)  # the types fit each other
    assert traced.out_avals[0].shape == X.shape


def test_explicit_types_move_too():
    mesh = mesh_of(2, AxisType.Explicit, data=2)
    whole = mesh.jax_mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(whole):
        x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(whole, P("data")))
        graph, _ = from_jaxpr(jax.make_jaxpr(lambda x: jax.lax.scan(lambda x, _: (x * 2, None), x, None, 2)[0])(x))
    moved = on_submesh(graph, mesh)
    assert meshes(moved) == {mesh.abstract_submesh}
    (value,) = moved.inputs
    assert value.aval.sharding.spec == P("data", None)


def test_a_graph_without_meshes_is_the_same_object():
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x: jnp.sin(x) @ x)(X))
    assert on_submesh(graph, mesh_of(2, data=2)) is graph


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_shard_map_moves_with_its_manual_axes(kind: AxisType):
    """From the mesh of one rank to that of another, which has fewer devices along an axis that is not manual."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    one, other = (Mesh(of, ("data", "tensor"), axis_types=(kind,) * 2) for of in (devices, devices[:, :1]))
    fun = jax.shard_map(
        lambda x: jnp.sin(x) * 2, mesh=one, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )  # fmt: skip

    def struct(mesh: Mesh) -> jax.ShapeDtypeStruct:
        typed = NamedSharding(mesh.abstract_mesh, P("data")) if kind is AxisType.Explicit else None
        return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=typed)

    with jax.sharding.use_abstract_mesh(one.abstract_mesh):
        graph, _ = from_jaxpr(jax.make_jaxpr(jax.grad(lambda x: fun(x).sum()))(struct(one)))
    manual = other.abstract_mesh.update_axis_types({"data": AxisType.Manual})
    moved = onto_mesh([one], other.abstract_mesh)(graph)
    moved.verify()
    assert meshes(moved) == {other.abstract_mesh, manual}
    with jax.sharding.use_abstract_mesh(other.abstract_mesh):
        assert jax.make_jaxpr(lambda x: moved.run(x))(struct(other)).out_avals[0].shape == X.shape
