"""Replace the whole mesh, and each rank's submesh, in a graph: a stage only sees its own submesh, without devices.

`with_sharding_constraint(x, NamedSharding(mesh, P("data")))` is written for the mesh with its stage axis; inside a
stage, the same partition is over the submesh. `jax.shard_map` over a mesh runs over the submesh; its manual axes stay
manual. Meshes are found at any depth: in jits, remats, scans, in the bodies of shard_maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat import context_on_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, bodies, opened, plain_literal

__all__ = ["on_submesh", "onto_mesh"]


_REWRITTEN = ("params", "context", "inputs", "outputs")


def on_submesh(graph: Graph, mesh: MpmdMesh) -> Graph:
    """Return the same graph, with the abstract submesh in place of the whole mesh and of every rank's submesh.

    Raises:
      ValueError: if a `shard_map` over the whole mesh uses the ranks' axis.
    """
    return _Rewriter([mesh.jax_mesh, *mesh.unstack], mesh.abstract_submesh, mesh.mpmd_axis_name).graph(graph)


def onto_mesh(meshes: Iterable[Mesh], target: AbstractMesh) -> Callable[[Graph], Graph]:
    """Return a function that replaces any of `meshes` in a graph by `target`."""
    return _Rewriter(meshes, target).graph


class _Rewriter:
    def __init__(self, meshes: Iterable[Mesh], submesh: AbstractMesh, stage_axis: str | None = None) -> None:
        self.known = {key for mesh in meshes for key in (_identity(mesh), _identity(mesh.abstract_mesh))}
        self.submesh = submesh
        self.stage_axis = stage_axis
        self.axes = {None, *(name for name in submesh.axis_names if name != stage_axis)}
        self.memo: dict[int, tuple[Any, Any]] = {}  # keeps the original alive, so that no other object gets its id

    def mesh(self, mesh: Any) -> Any:
        """Return the mesh that replaces `mesh` in a stage: the submesh, with the same manual axes as `mesh`."""
        if mesh is self.submesh or mesh.empty or _identity(mesh) not in self.known:
            return mesh
        manual = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Manual]
        if any(self.submesh.shape.get(n) != mesh.shape[n] for n in manual if n != self.stage_axis):
            return mesh  # the shards would have other shapes
        moved = self.submesh.update_axis_types(dict.fromkeys(manual, AxisType.Manual)) if manual else self.submesh
        return mesh if moved == mesh else moved

    def graph(self, graph: Graph) -> Graph:
        renamed: dict[Atom, Atom] = {}

        def atoms(old: Sequence[Any]) -> Any:
            for atom in old:
                if atom not in renamed:
                    aval = self._aval(atom.aval)
                    renamed[atom] = atom if aval is atom.aval else replace(atom, aval=aval)
            new = tuple(renamed[atom] for atom in old)
            return old if all(a is b for a, b in zip(new, old, strict=True)) else new

        inputs = atoms(graph.inputs)
        equations = tuple(self._equation(e, atoms) for e in graph.equations)
        outputs = atoms(graph.outputs)
        unchanged = all(a is b for a, b in zip(equations, graph.equations, strict=True))
        if unchanged and inputs is graph.inputs and outputs is graph.outputs:
            return graph
        return Graph(inputs, outputs, equations)

    def _equation(self, equation: Equation, atoms: Callable[[Sequence[Any]], Any]) -> Equation:
        self._check_shard_map(equation.name, equation.params, equation.source)
        new = replace(
            equation,
            params=self._params(equation.params),
            context=self._context(equation.context),
            inputs=atoms(equation.inputs),
            outputs=atoms(equation.outputs),
        )
        changed = any(getattr(new, name) is not getattr(equation, name) for name in _REWRITTEN)
        return new if changed else equation

    def _context(self, context: Any) -> Any:
        mesh = getattr(context, "cur_abstract_mesh", None)
        moved = mesh if mesh is None else self.mesh(mesh)
        return context if moved is mesh else self._once(context, lambda c: context_on_mesh(c, moved))

    def _params(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = {k: new for k, v in params.items() if (new := self._value(v)) is not v}
        return {**params, **changed} if changed else params

    def _value(self, value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return self._sharding(value)
        if isinstance(value, (AbstractMesh, Mesh)):
            return self.mesh(value)
        if isinstance(value, Graph):
            return self._once(value, self.graph)
        if hasattr(opened(value), "eqns"):
            return self._once(value, self._jaxpr)
        if type(value) in (tuple, list):
            parts = [self._value(v) for v in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
        return value

    def _once(self, value: Any, rewrite: Callable[[Any], Any]) -> Any:
        if id(value) not in self.memo:
            self.memo[id(value)] = (value, rewrite(value))
        return self.memo[id(value)][1]

    def _jaxpr(self, jaxpr: Any) -> Any:
        inner = opened(jaxpr)
        renamed: dict[Any, Any] = {}  # the types of variables hold the mesh too: a loop's results have its body's types

        def atom(old: Any) -> Any:
            aval, kind = self._aval(old.aval), type(old)
            if isinstance(old, jex_core.Literal):
                return old if aval is old.aval else kind(plain_literal(old.val, aval), aval)
            if old not in renamed:
                renamed[old] = old if aval is old.aval else kind(aval)
            return renamed[old]

        def atoms(old: Sequence[Any]) -> Any:
            new, container = list(map(atom, old)), type(old)
            return old if all(a is b for a, b in zip(new, old, strict=True)) else container(new)  # pyright: ignore

        constvars, invars = atoms(inner.constvars), atoms(inner.invars)
        equations: list[Any] = []
        for equation in inner.eqns:
            self._check_shard_map(equation.primitive.name, equation.params, equation.source_info)
            changes = {
                "params": self._params(equation.params),
                "ctx": self._context(equation.ctx),
                "invars": atoms(equation.invars),
                "outvars": atoms(equation.outvars),
            }
            changes = {name: new for name, new in changes.items() if new is not getattr(equation, name)}
            equations.append(equation.replace(**changes) if changes else equation)
        outvars = atoms(inner.outvars)
        same = all(a is b for a, b in zip(equations, inner.eqns, strict=True))
        if same and (constvars, invars, outvars) == (inner.constvars, inner.invars, inner.outvars):
            return jaxpr
        new = inner.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)
        return new if inner is jaxpr else jaxpr.replace(jaxpr=new)

    def _aval(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return aval
        moved = self._sharding(sharding)
        return aval if moved is sharding else aval.update(sharding=moved)

    def _sharding(self, sharding: NamedSharding) -> NamedSharding:
        mesh = self.mesh(sharding.mesh)
        if mesh is sharding.mesh:
            return sharding
        entries: list[Any] = []
        for entry in sharding.spec.partitions:  # a spec with `reduced` or `unreduced` cannot be iterated
            names = entry if isinstance(entry, tuple) else (entry,)
            kept = tuple(name for name in names if name in self.axes)
            entries.append(entry if len(kept) == len(names) else kept or None)
        spec = PartitionSpec(*entries, unreduced=sharding.spec.unreduced, reduced=sharding.spec.reduced)
        return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)

    def _check_shard_map(self, name: str, params: Mapping[str, Any], source: Any) -> None:
        """Refuse a `shard_map` whose ranks differ: on a submesh its results would be different."""
        axis = self.stage_axis
        if name != "shard_map" or axis is None:
            return
        if self.mesh(params["mesh"]).shape.get(axis) == params["mesh"].shape.get(axis):
            return
        specs = [*params["in_specs"], *params["out_specs"]]
        if any(axis in _names(spec) for spec in specs) or _uses_axis(params["jaxpr"], axis):
            where = source_info_util.summarize(source) if source is not None else "unknown"
            raise ValueError(
                f"the shard_map at {where} is over the whole mesh, {dict(params['mesh'].shape)}, and uses its axis "
                f"{axis!r}, in its specs, in a collective, or (with check_vma=False) in its gradient. A stage runs on "
                f"one rank of that axis, where these numbers would be others. Leave `mesh=` out, or pass the stage's "
                f"mesh, `mpmd_mesh.lowering_mesh()`, and name other axes of it."
            )


def _identity(mesh: Mesh | AbstractMesh) -> Any:
    """Return a key that ignores the types of the axes, because `shard_map` makes some axes Manual."""
    if isinstance(mesh, Mesh):
        return mesh.axis_names, mesh.devices.shape, tuple(mesh.devices.flat)
    return mesh.axis_names, mesh.axis_sizes


def _names(entries: Any) -> set[Any]:
    """Return the mesh axes in a spec, or in a parameter of a collective."""
    if isinstance(entries, PartitionSpec):
        entries = entries.partitions
    if isinstance(entries, (tuple, list, set, frozenset)):
        return {name for entry in entries for name in _names(entry)}
    return {entries}


def _uses_axis(jaxpr: Any, axis: str) -> bool:
    """Return whether an equation at any depth communicates over a mesh axis, or asks for its index on the axis."""
    return any(
        axis in _names(equation.params.get("axes", ())) | _names(equation.params.get("axis_name", ()))
        or any(_uses_axis(inner, axis) for inner in bodies(equation.params))
        for equation in opened(jaxpr).eqns
    )
