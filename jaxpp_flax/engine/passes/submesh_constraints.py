"""Replace the whole mesh, and each rank's submesh, in a graph: a stage only sees its own submesh, without devices.

`with_sharding_constraint(x, NamedSharding(mesh, P("data")))` is written for the mesh with its stage axis; inside a
stage, the same partition is over the submesh. `jax.shard_map` over the mesh of a rank runs over that of each; its
manual axes stay manual. Meshes are found at any depth: in jits, remats, scans, in the bodies of shard_maps. What names
none stays the same object.

JAX's types of sums (`jax.P(reduced=, unreduced=)`) leave a step here. They change no value: `reduced` tells
differentiation, which is done, to keep a gradient as one part for each device, and `unreduced` is the type of such a
gradient. `defer_reductions` keeps these parts apart by itself, also from task to task, where JAX's types cannot go.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxpp_flax._compat_texts.traces import context_on_mesh
from jaxpp_flax.engine.analyses.equation_facts import place_of
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, with_sums
from jaxpp_flax.engine.tracing.ir import Equation, Graph, opened, plain_literal

__all__ = ["on_submesh", "onto_mesh"]


def on_submesh(graph: Graph, mesh: MpmdMesh) -> Graph:
    """Return the same graph, with the abstract submesh in place of the whole mesh and of every rank's submesh.

    The types of sums are dropped.

    Raises:
      ValueError: if a `shard_map` is over the whole mesh.
      NotImplementedError: if a `shard_map` takes or returns a value with a type of sums.
    """
    meshes = [mesh.jax_mesh, *mesh.unstack]
    return _Rewriter(meshes, mesh.abstract_submesh, mesh.mpmd_axis_name, keeps_sums=False).graph(graph)


def onto_mesh(meshes: Iterable[Mesh], target: AbstractMesh) -> Callable[[Graph], Graph]:
    """Return a function that replaces any of `meshes` in a graph by `target`, and keeps the types of sums."""
    return _Rewriter(meshes, target).graph


class _Rewriter:
    def __init__(
        self, meshes: Iterable[Mesh], submesh: AbstractMesh, stage_axis: str | None = None, *, keeps_sums: bool = True
    ) -> None:
        self.known = {key for mesh in meshes for key in (_identity(mesh), _identity(mesh.abstract_mesh))}
        self.submesh = submesh
        self.stage_axis, self.keeps_sums = stage_axis, keeps_sums
        self.axes = {None, *(name for name in submesh.axis_names if name != stage_axis)}
        self.memo: dict[int, tuple[Any, Any]] = {}  # keeps the old object alive, so that no other one gets its id

    def mesh(self, mesh: Any) -> Any:
        """Return the mesh that replaces `mesh` in a stage: the submesh, with the same manual axes as `mesh`."""
        if mesh is self.submesh or mesh.empty or _identity(mesh) not in self.known:
            return mesh
        manual = _manual_axes(mesh)
        if any(self.submesh.shape.get(n) != mesh.shape[n] for n in manual):
            return mesh  # the shards would have other shapes
        moved = self.submesh.update_axis_types(dict.fromkeys(manual, AxisType.Manual)) if manual else self.submesh
        return mesh if moved == mesh else moved

    def graph(self, graph: Graph) -> Graph:
        atoms = self._atoms(lambda old, aval: replace(old, aval=aval))
        inputs, outputs = atoms(graph.inputs), atoms(graph.outputs)
        equations = tuple(self._equation(e, atoms) for e in graph.equations)
        same = _is_same((inputs, outputs, *equations), (graph.inputs, graph.outputs, *graph.equations))
        return graph if same else Graph(inputs, outputs, equations)

    def _jaxpr(self, closed: Any) -> Any:
        # The types of variables hold the mesh too: a loop's results have its body's types.
        jaxpr, atoms = opened(closed), self._atoms(_with_type)
        old = (jaxpr.constvars, jaxpr.invars, jaxpr.outvars)
        constvars, invars, outvars = map(atoms, old)
        equations = [self._equation(e, atoms) for e in jaxpr.eqns]
        if _is_same((constvars, invars, outvars, *equations), (*old, *jaxpr.eqns)):
            return closed
        new = jaxpr.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=equations)
        return new if jaxpr is closed else closed.replace(jaxpr=new)

    def _atoms(self, with_type: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
        """Return a function that moves the types of atoms; a sequence without changes stays the same object."""
        moved: dict[int, Any] = {}  # by the atom's id: the graph keeps the atom alive

        def move(atom: Any) -> Any:
            if id(atom) not in moved:
                aval = self._aval(atom.aval)
                moved[id(atom)] = atom if aval is atom.aval else with_type(atom, aval)
            return moved[id(atom)]

        def atoms(old: Any) -> Any:
            new = list(map(move, old))
            return old if _is_same(new, old) else type(old)(new)

        return atoms

    def _equation(self, equation: Any, atoms: Callable[[Any], Any]) -> Any:
        """Move an equation of ours or of JAX."""
        self._check_shard_map(equation)
        self._check_sums_of_shard_map(equation)
        of_ours = isinstance(equation, Equation)
        names = ("inputs", "outputs", "context") if of_ours else ("invars", "outvars", "ctx")
        inputs, outputs, context = (getattr(equation, name) for name in names)
        new = (atoms(inputs), atoms(outputs), self._context(context), self._params(equation.params))
        if _is_same(new, (inputs, outputs, context, equation.params)):
            return equation
        parts = dict(zip((*names, "params"), new, strict=True))
        return replace(equation, **parts) if of_ours else equation.replace(**parts)

    def _params(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        new = [self._value(value) for value in params.values()]
        return params if _is_same(new, [*params.values()]) else dict(zip(params, new, strict=True))

    def _value(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, str)):  # most parameters
            return value
        if isinstance(value, (tuple, list)):
            parts = [self._value(part) for part in value]
            # A named tuple is made by its own function.
            return value if _is_same(parts, value) else getattr(value, "_make", type(value))(parts)
        if isinstance(value, NamedSharding):
            return self._sharding(value)
        if isinstance(value, (AbstractMesh, Mesh)):
            return self.mesh(value)
        if hasattr(opened(value), "eqns"):
            return self._once(value, self._jaxpr)
        return self._once(value, self.graph) if isinstance(value, Graph) else value

    def _once(self, value: Any, rewrite: Callable[[Any], Any]) -> Any:
        """Move an object that several equations share."""
        if id(value) not in self.memo:
            self.memo[id(value)] = (value, rewrite(value))
        return self.memo[id(value)][1]

    def _context(self, context: Any) -> Any:
        mesh = getattr(context, "cur_abstract_mesh", None)
        moved = mesh if mesh is None else self.mesh(mesh)
        return context if moved is mesh else self._once(context, lambda c: context_on_mesh(c, moved))

    def _aval(self, aval: Any) -> Any:
        sharding = getattr(aval, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
            return aval
        moved = self._sharding(sharding)
        return aval if moved is sharding else aval.update(sharding=moved)

    def _sharding(self, sharding: NamedSharding) -> NamedSharding:
        mesh, unreduced, reduced = self.mesh(sharding.mesh), sharding.spec.unreduced, sharding.spec.reduced
        if not self.keeps_sums:  # inside of a shard_map, types of sums over its manual axes stay
            unreduced, reduced = (axes & _manual_axes(mesh) for axes in (unreduced, reduced))
        if mesh is sharding.mesh and (unreduced, reduced) == (sharding.spec.unreduced, sharding.spec.reduced):
            return sharding
        entries: list[Any] = []
        for entry in sharding.spec.partitions:  # a spec with `reduced` or `unreduced` cannot be iterated
            names = entry if isinstance(entry, tuple) else (entry,)
            kept = tuple(name for name in names if name in self.axes)
            entries.append(entry if len(kept) == len(names) else kept or None)
        spec = with_sums(entries, unreduced, reduced, sharding.spec)
        return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)

    def _check_shard_map(self, equation: Any) -> None:
        """Refuse a `shard_map` over the ranks' axis: on a submesh its results would be others, without a word."""
        if equation.primitive.name != "shard_map":
            return
        axis, mesh = self.stage_axis, equation.params["mesh"]
        if self.mesh(mesh).shape.get(axis) != mesh.shape.get(axis):
            raise ValueError(
                f"the shard_map at {place_of(equation)} is over the whole mesh, {dict(mesh.shape)}, but a stage runs "
                f"on one rank of its axis {axis!r}. Leave `mesh=` out, or pass the stage's mesh, "
                "`mpmd_mesh.lowering_mesh()`."
            )

    def _check_sums_of_shard_map(self, equation: Any) -> None:
        """Refuse a `shard_map` with types of sums in its specs: its body works with them, device by device."""
        if self.keeps_sums or equation.primitive.name != "shard_map":
            return
        for spec in (*equation.params["in_specs"], *equation.params["out_specs"]):
            if spec.unreduced or spec.reduced:
                raise NotImplementedError(
                    f"the shard_map at {place_of(equation)} has the spec {spec} (in the backward, JAX makes "
                    "`unreduced=` of a forward's `reduced=`). In a pipelined step, types of sums (`reduced=`, "
                    "`unreduced=`) may not enter or leave a shard_map. Give it plain specs, and `jax.sharding.reshard` "
                    "its operands to plain types: the sums of its gradients over a data axis wait for the end of the "
                    "loop all the same."
                )


def _manual_axes(mesh: Mesh | AbstractMesh) -> frozenset[str]:
    return frozenset(n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Manual)


def _with_type(atom: Any, aval: Any) -> Any:
    literal = isinstance(atom, jex_core.Literal)
    return type(atom)(plain_literal(atom.val, aval), aval) if literal else type(atom)(aval)


def _identity(mesh: Mesh | AbstractMesh) -> Any:
    """Return a key that ignores the types of the axes, because `shard_map` makes some axes Manual."""
    if isinstance(mesh, Mesh):
        return mesh.axis_names, mesh.devices.shape, tuple(mesh.devices.flat)
    return mesh.axis_names, mesh.axis_sizes


def _is_same(new: Sequence[Any], old: Sequence[Any]) -> bool:
    """Return whether two sequences hold the same objects."""
    return len(new) == len(old) and all(map(operator.is_, new, old))
