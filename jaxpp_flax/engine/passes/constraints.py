"""Rewrite sharding constraints that name the whole mesh: a stage sees its own submesh alone.

`with_sharding_constraint(x, NamedSharding(mesh, P("data")))` is written for the mesh with its stage axis; inside a
stage the same partition is one over the submesh. Constraints are found at any depth: in jits, remats, scans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine._compat import context_on_mesh
from jaxpp_flax.engine.ir import Atom, Equation, Graph, plain_literal
from jaxpp_flax.engine.mesh import MpmdMesh

__all__ = ["on_submesh", "onto_mesh"]


_REWRITTEN = ("params", "context", "inputs", "outputs")


def on_submesh(graph: Graph, mesh: MpmdMesh) -> Graph:
    """The same graph, every sharding of the whole mesh in its parameters replaced by one of the submesh."""
    rewrite = _Rewriter([mesh.jax_mesh], mesh.abstract_submesh, mesh.mpmd_axis_name)
    return rewrite.graph(graph)


def onto_mesh(meshes: Iterable[Mesh], target: AbstractMesh) -> Callable[[Graph], Graph]:
    """A function that replaces every sharding of any of `meshes` in a graph's parameters by one of `target`."""
    return _Rewriter(meshes, target).graph


class _Rewriter:
    def __init__(self, meshes: Iterable[Mesh], submesh: AbstractMesh, stage_axis: str | None = None) -> None:
        found: dict[Mesh | AbstractMesh, None] = {}
        for mesh in meshes:
            found.update({mesh: None, mesh.abstract_mesh: None})
        self.whole = tuple(mesh for mesh in found if mesh != submesh)
        self.submesh = submesh
        self.axes = {None, *(name for name in submesh.axis_names if name != stage_axis)}
        self.memo: dict[int, tuple[Any, Any]] = {}  # keeps the original alive, so that its id stays its own

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
        return self._once(context, lambda c: context_on_mesh(c, self.whole, self.submesh))

    def _params(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        changed = {k: new for k, v in params.items() if (new := self._value(v)) is not v}
        return {**params, **changed} if changed else params

    def _value(self, value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return self._sharding(value)
        if isinstance(value, (AbstractMesh, Mesh)):
            return self.submesh if value in self.whole else value
        if isinstance(value, Graph):
            return self._once(value, self.graph)
        if hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
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
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        renamed: dict[Any, Any] = {}  # variables are typed by the mesh, too: a loop's results have its body's types

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
        if not isinstance(sharding, NamedSharding) or sharding.mesh not in self.whole:
            return aval
        return aval.update(sharding=self._sharding(sharding))

    def _sharding(self, sharding: NamedSharding) -> NamedSharding:
        if sharding.mesh not in self.whole:
            return sharding
        entries: list[Any] = []
        for entry in sharding.spec.partitions:  # a spec with `reduced` or `unreduced` cannot be iterated
            names = entry if isinstance(entry, tuple) else (entry,)
            kept = tuple(name for name in names if name in self.axes)
            entries.append(entry if len(kept) == len(names) else kept or None)
        spec = PartitionSpec(*entries, unreduced=sharding.spec.unreduced, reduced=sharding.spec.reduced)
        return NamedSharding(self.submesh, spec, memory_kind=sharding.memory_kind)
