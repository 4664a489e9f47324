"""The intermediate representation: straight-line graphs of JAX primitives.

A jaxpr is converted to a `Graph` at one boundary (`from_jaxpr`), so no pass ever tests the class of a jaxpr: these
classes differ between JAX versions. `Graph.run` runs a `Graph` anywhere, under `jax.jit` or eagerly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util

from jaxpp_flax._compat_hijax import without_high_calls
from jaxpp_flax._compat_texts.traces import in_context, is_recomputed, transpositions
from jaxpp_flax.engine.tracing.memory import in_memory, memory_kind_of, typed_sharding
from jaxpp_flax.error_codes import documented

__all__ = [
    "Atom", "Constant", "Equation", "Graph", "Value", "VerificationError", "applied", "bodies", "emit",
    "everywhere", "from_jaxpr", "graph_of", "inside", "memory_kind_of", "opened", "plain_literal",
    "producers", "prune", "struct_of", "values", "verify_order", "with_outputs", "without_high_calls",
]  # fmt: skip


@documented("JPF603")
class VerificationError(AssertionError):
    """A structure between two passes breaks its own rules: a defect of the engine, never of the user's program."""


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One array-valued edge of a graph; compared by identity. `aval` carries shape, dtype and sharding."""

    aval: Any

    @property
    def nbytes(self) -> int:
        """Size in bytes; 0 for dtypes without a known size, such as PRNG keys."""
        return int(self.aval.size) * int(getattr(self.aval.dtype, "itemsize", 0))


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A literal operand: a scalar that is written into the program."""

    value: Any
    aval: Any

    @property
    def nbytes(self) -> int:
        """0: literals are part of the program, so they cost no transfer."""
        return 0


Atom = Value | Constant


def values(atoms: Iterable[Atom]) -> list[Value]:
    """Return the atoms that are not literals, in order."""
    return [atom for atom in atoms if isinstance(atom, Value)]


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """One application of a primitive.

    `transposed` marks backward work (found in JAX's name stack). `late` marks recomputation, of a rematerialised region
    or of a stage, which belongs to the task that uses it. `region` is the `Region` (see `regions.py`) of an opened
    `jax.checkpoint` in which it stands. `where` is the user's `file:line (function)`.
    """

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[Value, ...]
    effects: frozenset[Any] = frozenset()
    context: Any = None
    source: Any = field(default=None, repr=False)
    transposed: bool = False
    late: bool = False
    region: Any = None

    @property
    def name(self) -> str:
        return self.primitive.name

    @property
    def where(self) -> str:
        """`file:line (function)` of the user's code that made this equation, or `"unknown"`."""
        return (source_info_util.summarize(self.source) if self.source is not None else "") or "unknown"

    def reading(self, inputs: tuple[Atom, ...]) -> Equation:
        """Return the equation over other operands; itself if they are the same."""
        if inputs == self.inputs:  # atoms are compared by identity
            return self
        # `dataclasses.replace` takes three times as long, and this runs several times for each equation of a step.
        return Equation(
            self.primitive, self.params, inputs, self.outputs, self.effects, self.context, self.source,
            self.transposed, self.late, self.region,
        )  # fmt: skip

    def named_within(self, outer: Any) -> AbstractContextManager[Any]:
        """Return a context in which an operation gets this equation's scopes inside `outer`, and its line."""
        if self.source is None:
            return nullcontext()
        stack = outer + self.source.name_stack
        return source_info_util.user_context(self.source.traceback, name_stack=stack)

    def bind(self, *operands: Any) -> Sequence[Any]:
        """Apply the primitive; always return a sequence of results."""
        params = self.primitive.get_bind_params(dict(self.params))
        with in_context(self.context):
            results = self.primitive.bind(*operands, **params)
        return results if self.primitive.multiple_results else [results]

    def verify(self) -> None:
        """Check what the equation holds besides its operands: a loop has a body."""

    def details(self) -> str:
        """Return what the equation holds besides its operands as text."""
        return ""


@dataclass(frozen=True, eq=False)
class Graph:
    """A function in straight-line form: `equations`, in executable order, compute `outputs` from `inputs`."""

    inputs: tuple[Value, ...]
    outputs: tuple[Atom, ...]
    equations: tuple[Equation, ...]

    @cached_property
    def producer(self) -> dict[Value, Equation]:
        """The equation that makes each value."""
        return producers(self.equations)

    @cached_property
    def reads(self) -> Counter[Value]:
        """The number of reads of each value, by equations and as an output."""
        return Counter(values(chain(*(equation.inputs for equation in self.equations), self.outputs)))

    def run(self, *operands: Any) -> list[Any]:
        """Evaluate on arrays or tracers; one operand for each of `inputs`."""
        environment: dict[Value, Any] = dict(zip(self.inputs, operands, strict=True))

        def read(atom: Atom) -> Any:
            return atom.value if isinstance(atom, Constant) else environment[atom]

        outer = source_info_util.current_name_stack()
        for equation in self.equations:
            with equation.named_within(outer):  # compiled code and profiles show the user's scopes
                results = equation.bind(*map(read, equation.inputs))
            environment.update(zip(equation.outputs, results, strict=True))
        return [read(atom) for atom in self.outputs]

    def verify(self) -> None:
        """Check that every value is defined once, before its first use; and what the equations hold."""
        if len({*self.inputs}) != len(self.inputs):
            raise VerificationError("a graph lists one input twice")
        steps = ((f"equation {k} ({e.name})", values(e.inputs), e.outputs) for k, e in enumerate(self.equations))
        verify_order(self.inputs, steps, self.outputs)
        for equation in self.equations:
            equation.verify()

    def as_text(self, notes: Mapping[Equation, Any] | None = None) -> str:
        """Return the details of equations, and a line for each one; values are numbered in order of definition.

        `notes` may put a word in front of an equation.
        """
        names: dict[Value, str] = {}

        def name(atom: Atom) -> str:
            if isinstance(atom, Constant):
                return str(atom.value)
            return names.setdefault(atom, f"%{len(names)}")

        lines = [details for equation in self.equations if (details := equation.details())]
        lines.append("inputs  " + ", ".join(f"{name(v)}:{v.aval.str_short()}" for v in self.inputs))
        for equation in self.equations:
            operands = ", ".join(map(name, equation.inputs))
            results = ", ".join(f"{name(v)}:{v.aval.str_short()}" for v in equation.outputs)
            label = f" [{equation.params['name']}]" if isinstance(equation.params.get("name"), str) else ""
            note = f"{notes[equation]!s:>4}" if notes is not None else ""
            lines.append(f"{note}  {results} = {equation.name}{label}({operands})")
        lines.append("outputs " + ", ".join(map(name, self.outputs)))
        return "\n".join(lines)


def verify_order(
    inputs: Iterable[Value], steps: Iterable[tuple[str, Iterable[Value], Iterable[Value]]], outputs: Iterable[Atom]
) -> None:
    """Check that steps, each with a name, what it reads and what it makes, make every value once, before it is read.

    Raises:
      VerificationError: naming the step at fault.
    """
    defined = set(inputs)
    for name, reads, makes in steps:
        if not defined.issuperset(reads):
            raise VerificationError(f"{name} reads what no earlier step makes")
        if not defined.isdisjoint(makes):
            raise VerificationError(f"{name} defines a value again")
        defined.update(makes)
    if not defined.issuperset(values(outputs)):
        raise VerificationError("an output is undefined")


def plain_literal(value: Any, aval: Any) -> Any:
    """Return a literal as a Python number or a NumPy array: JAX's own arrays hold the mesh of their trace."""
    plain = type(value) is np.ndarray or isinstance(value, (np.generic, int, float, complex))
    if plain or not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.item() if aval.weak_type and array.ndim == 0 else array


def from_jaxpr(
    jaxpr: Any,
    operands: Sequence[Atom] | None = None,
    *,
    transposed: bool = False,
    late: bool = False,
    within: Any = None,
) -> tuple[Graph, list[Any]]:
    """Convert a (closed) jaxpr; its captured constants become leading inputs, and are returned with the graph.

    If `operands` are given (constants' atoms first), they replace the jaxpr's variables: this is inlining.
    `transposed` and `late` label every equation, in addition to the labels from the equations' own name stacks: what
    JAX names as recomputed is `late`, and not `transposed`. The scopes of `within`, the source of a call, go around
    those of its equations.
    """
    jaxpr = without_high_calls(jaxpr)
    consts = list(getattr(jaxpr, "consts", ()))
    inner = opened(jaxpr)
    variables = [*inner.constvars, *inner.invars]
    inputs = tuple(operands) if operands is not None else tuple(Value(v.aval) for v in variables)
    environment: dict[Any, Atom] = dict(zip(variables, inputs, strict=True))

    def read(atom: Any) -> Atom:
        if isinstance(atom, jex_core.Literal):
            return Constant(plain_literal(atom.val, atom.aval), atom.aval)
        return environment[atom]

    equations: list[Equation] = []
    scopes_of = cache(str)  # few stacks, and their text takes time
    scopes = getattr(within, "name_stack", None)
    for eqn in inner.eqns:
        stack = scopes_of(eqn.source_info.name_stack)
        recomputed = is_recomputed(stack)
        equation = Equation(
            primitive=eqn.primitive,
            params=eqn.params,
            inputs=tuple(map(read, eqn.invars)),
            outputs=tuple(Value(v.aval) for v in eqn.outvars),
            effects=frozenset(eqn.effects),
            context=eqn.ctx,
            source=eqn.source_info
            if scopes is None
            else eqn.source_info.replace(name_stack=scopes + eqn.source_info.name_stack),
            transposed=(transposed or transpositions(stack) > 0) and not recomputed,
            late=late or recomputed,
        )
        equations.append(equation)
        environment.update(zip(eqn.outvars, equation.outputs, strict=True))
    return Graph(tuple(values(inputs)), tuple(map(read, inner.outvars)), tuple(equations)), consts


def applied(
    jaxpr: Any, operands: Sequence[Atom], *, transposed: bool = False, late: bool = False, within: Any = None
) -> Graph:
    """Apply a (closed) jaxpr to atoms; its captured arrays become literals. Labels are as in `from_jaxpr`."""
    captured = zip(getattr(jaxpr, "consts", ()), opened(jaxpr).constvars, strict=True)
    literals = [Constant(value, variable.aval) for value, variable in captured]
    return from_jaxpr(jaxpr, [*literals, *operands], transposed=transposed, late=late, within=within)[0]


def emit(
    function: Callable[..., Any],
    inputs: Sequence[Atom],
    outputs: Sequence[Value | None] | None = None,
    *,
    like: Equation | None = None,
) -> tuple[list[Equation], list[Atom]]:
    """Apply a function of arrays to `inputs`; return its equations and the atoms of its results.

    Args:
      function: a function of as many arrays as there are inputs.
      inputs: its operands.
      outputs: the values of the results, None for a new value; by default all are new.
      like: an equation: the function is traced in its context, and the new equations get its source and labels.
    """
    with in_context(None if like is None else like.context):
        jaxpr = jax.make_jaxpr(function)(*(struct_of(atom.aval) for atom in inputs))
    graph = applied(jaxpr, inputs)
    equations, results = list(graph.equations), list(graph.outputs)
    if outputs is not None:
        named = [output or Value(atom.aval) for output, atom in zip(outputs, results, strict=True)]
        equations, results = with_outputs(graph, named), list[Atom](named)
    if like is not None:
        labels = {"transposed": like.transposed, "late": like.late, "region": like.region}
        equations = [replace(e, source=like.source, **labels) for e in equations]
    return equations, results


def opened(jaxpr: Any) -> Any:
    """Return a jaxpr without its captured arrays: versions of JAX store these in different ways."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def bodies(params: Mapping[str, Any]) -> list[Any]:
    """Return the jaxprs in an equation's parameters, each `opened`."""
    return [opened(jaxpr) for jaxpr in jex_core.jaxprs_in_params(dict(params))]


def everywhere(graph: Graph) -> Iterator[Any]:
    """Yield every equation of a graph, and every equation of JAX in the jaxprs inside its equations, at any depth."""
    for equation in graph.equations:
        yield equation
        yield from inside(equation.params)


def inside(params: Mapping[str, Any]) -> Iterator[Any]:
    """Yield every equation of JAX in the jaxprs in an equation's parameters, at any depth."""
    for jaxpr in bodies(params):
        for equation in jaxpr.eqns:
            yield equation
            yield from inside(equation.params)


def producers(equations: Iterable[Equation]) -> dict[Value, Equation]:
    """Return the equation that makes each value."""
    return {value: equation for equation in equations for value in equation.outputs}


def graph_of(equations: Sequence[Equation], read: set[Value]) -> Graph:
    """Return the graph of some equations; `read` holds the values that the outside reads."""
    defined = {value for equation in equations for value in equation.outputs}
    inputs = dict.fromkeys(v for e in equations for v in values(e.inputs) if v not in defined)
    outputs = tuple(v for e in equations for v in e.outputs if v in read)
    return Graph(tuple(inputs), outputs, tuple(equations))


def prune(
    graph: Graph, narrowed: Callable[[Equation, set[Value]], Equation] = lambda equation, needed: equation
) -> Graph:
    """Drop equations without effect on the outputs; equations with side effects (debug prints) stay.

    `narrowed` may replace an equation that stays by one that makes only the values needed.
    """
    needed = set(values(graph.outputs))
    kept: list[Equation] = []
    for equation in reversed(graph.equations):
        if equation.effects or not needed.isdisjoint(equation.outputs):
            kept.append(narrowed(equation, needed))
            needed.update(values(kept[-1].inputs))
    return replace(graph, equations=tuple(reversed(kept)))


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the type for tracing: with its memory, and with its sharding on an Explicit mesh."""
    sharding = in_memory(typed_sharding(aval), memory_kind_of(aval))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def with_outputs(graph: Graph, outputs: Sequence[Value]) -> list[Equation]:
    """Return the graph's equations, changed so that they define `outputs`; unchanged inputs are copied."""
    computed = {v for e in graph.equations for v in e.outputs}
    renamed: dict[Atom, Value] = {}
    copies: list[Equation] = []
    for atom, output in zip(graph.outputs, outputs, strict=True):
        if atom in computed and atom not in renamed:
            renamed[atom] = output
            continue
        copies += emit(jax.lax.copy_p.bind, [renamed.get(atom, atom)], [output])[0]
    equations = [
        replace(
            e, inputs=tuple(renamed.get(a, a) for a in e.inputs), outputs=tuple(renamed.get(v, v) for v in e.outputs)
        )
        for e in graph.equations
    ]
    return [*equations, *copies]
