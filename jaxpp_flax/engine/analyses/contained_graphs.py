"""Find a graph inside a larger one: the same equations over the same types, beside others.

A pair of equations that do the same is a beginning; from there, operands are paired with operands, and users with
users. The division is checked by the keys of both graphs, so a wrong pair loses a chance, and never changes a result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, graph_of, inside, producers, values

__all__ = ["Divided", "Net", "divide"]

# A part may have this many equations of the core again: the scale of a norm in another shape, for one.
_MOST_REPEATED = 4
# Operations that pass over their operands once.
_CHEAP = frozenset(
    {"abs", "acos", "acosh", "add", "add_any", "and", "argmax", "argmin", "asin", "asinh", "atan", "atan2", "atanh",
     "bitcast_convert_type", "broadcast_in_dim", "cbrt", "ceil", "clamp", "clz", "complex", "concatenate", "conj",
     "convert_element_type", "copy", "copy_p", "cos", "cosh", "cumlogsumexp", "cummax", "cummin", "cumprod",
     "cumsum", "div", "dynamic_slice", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims",
     "expm1", "floor", "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "le_to", "log", "log1p", "log2",
     "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not",
     "one_minus_square", "or", "pad", "polynomial", "population_count", "pow", "random_bits", "random_fold_in",
     "random_seed", "random_split", "random_unwrap", "random_wrap", "real", "reduce_and", "reduce_max", "reduce_min",
     "reduce_or", "reduce_precision", "reduce_prod", "reduce_sum", "rem", "reshape", "rev", "round", "rsqrt",
     "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "slice",
     "split", "sqrt", "square", "squeeze", "stack", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "tile",
     "transpose", "unstack", "xor"}
)  # fmt: skip
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"})
_CHEAP_INSIDE_A_CALL = _CHEAP | _CALLS


@dataclass(frozen=True)
class Divided:
    """A graph in parts that run in this order; a part without equations is None. `core` is the contained graph."""

    before: Graph | None
    core: Graph
    after: Graph | None

    @property
    def parts(self) -> tuple[Graph, ...]:
        return tuple(part for part in (self.before, self.core, self.after) if part is not None)


def divide(whole: Net, part: Net, keys: Fingerprinter) -> Divided | None:
    """Divide `whole` so that one piece of it is `part` over other values; None if it does not contain `part`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxpp_flax.engine.tracing.ir import from_jaxpr
      >>> def graph(function):
      ...     return Net.of(from_jaxpr(jax.make_jaxpr(function)(jnp.ones(3)))[0])
      >>> found = divide(graph(lambda x: jnp.tanh(jnp.sin(x)) + 1), graph(jnp.tanh), Fingerprinter())
      >>> [[equation.name for equation in each.equations] for each in found.parts]
      [['sin'], ['tanh'], ['add']]
    """
    pairs = _paired(whole, part)
    if pairs is None:
        return None
    values_of = _values_of(pairs)
    ends = part.graph.inputs, part.graph.outputs
    inputs, outputs = (tuple(values_of.get(v) for v in values(atoms)) for atoms in ends)
    if None in inputs or None in outputs or len(set(inputs)) < len(inputs):
        return None
    core = Graph(_known(inputs), _known(outputs), tuple(pairs[e] for e in part.graph.equations))
    if keys.graph(core) != keys.graph(part.graph):
        return None
    return _around(whole.graph, core)


def _around(whole: Graph, core: Graph) -> Divided | None:
    """Put the other equations before or after the core; None if the core does not return what they read of it."""
    of_core, late = set(core.equations), {v for e in core.equations for v in e.outputs}
    before, after = list[Equation](), list[Equation]()
    for equation in whole.equations:
        if equation in of_core:
            continue
        if late.isdisjoint(equation.inputs):
            before.append(equation)
        else:
            after.append(equation)
            late.update(equation.outputs)
    results, made_before = set(values(whole.outputs)), _made(before)
    if after and made_before.isdisjoint(core.inputs):  # one part for all
        before, after, made_before = [], [e for e in whole.equations if e not in of_core], set[Value]()
    if not set(core.inputs) <= {*whole.inputs, *made_before}:
        return None
    missing = _made(core.equations) - set(core.outputs)
    if not results.isdisjoint(missing):
        return None
    again = _repeated(whole, core, [v for e in after for v in values(e.inputs) if v in missing])
    if again is None:
        return None
    after = [*again.equations, *(again.reading(e) for e in after)]
    read_later = {v for e in after for v in values(e.inputs)}
    return Divided(
        graph_of(before, {*core.inputs, *read_later, *results}) if before else None,
        core,
        graph_of(after, results) if after else None,
    )


@dataclass(frozen=True)
class _Again:
    """Equations that compute values once more, and these values' new names."""

    equations: tuple[Equation, ...]
    names: dict[Atom, Value]

    def reading(self, equation: Equation) -> Equation:
        return equation.reading(tuple(self.names.get(atom, atom) for atom in equation.inputs))


def _repeated(whole: Graph, core: Graph, wanted: Sequence[Value]) -> _Again | None:
    """Compute values of the core from the inputs of the whole; None if one of them needs more than a few operations."""
    maker, needed = producers(core.equations), set[Equation]()
    for value in wanted:
        own, reading = set[Equation](), [value]
        while reading:
            equation = maker.get(reading[-1])
            if equation is None and reading[-1] not in whole.inputs:
                return None
            reading.pop()
            if equation is not None and equation not in own:
                own.add(equation)
                reading += values(equation.inputs)
        if len(own) > _MOST_REPEATED or not all(map(_is_cheap, own)):
            return None
        needed |= own
    again = _Again((), {v: Value(v.aval) for e in needed for v in e.outputs})
    ordered = [e for e in core.equations if e in needed]
    renamed = [replace(again.reading(e), outputs=tuple(again.names[v] for v in e.outputs)) for e in ordered]
    return replace(again, equations=tuple(renamed))


def _is_cheap(equation: Any) -> bool:
    """Return True if an equation passes over its operands once, as do those inside it."""
    if equation.effects:
        return False
    name = equation.primitive.name
    return name in _CHEAP or (
        name in _CALLS and all(e.primitive.name in _CHEAP_INSIDE_A_CALL for e in inside(equation.params))
    )


def _made(equations: Iterable[Equation]) -> set[Value]:
    return {v for e in equations for v in e.outputs}


def _known(found: Iterable[Value | None]) -> tuple[Value, ...]:
    return tuple(value for value in found if value is not None)


_Pairs: TypeAlias = "dict[Equation, Equation]"


def _values_of(pairs: _Pairs) -> dict[Atom, Value]:
    """Return the value of the larger graph for each value of the part."""
    found: dict[Atom, Value] = {}
    for mine, theirs in pairs.items():
        atoms = zip((*mine.inputs, *mine.outputs), (*theirs.inputs, *theirs.outputs), strict=True)
        found.update((a, b) for a, b in atoms if isinstance(b, Value))
    return found


@dataclass(frozen=True, eq=False)
class Net:
    """A graph for searches: its equations by what they make, by what they read, and by kind."""

    graph: Graph
    maker: dict[Value, Equation]
    kind: dict[Equation, Any] = field(default_factory=dict[Equation, Any])
    users: dict[Value, list[tuple[Equation, int]]] = field(default_factory=lambda: defaultdict(list))
    alike: dict[Any, list[Equation]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, graph: Graph) -> Net:
        net = cls(graph, producers(graph.equations))
        for equation in graph.equations:
            kind = net.kind[equation] = _kind(equation)
            net.alike[kind].append(equation)
            for position, atom in enumerate(equation.inputs):
                if isinstance(atom, Value):
                    net.users[atom].append((equation, position))
        return net


def _kind(equation: Equation) -> Any:
    """Return what two equations must have in common to be paired; effects are never paired."""
    types = [(isinstance(a, Value), a.aval.shape, a.aval.dtype) for a in (*equation.inputs, *equation.outputs)]
    return (equation.primitive, len(equation.inputs), *types, *((equation,) if equation.effects else ()))


def _paired(theirs: Net, mine: Net) -> _Pairs | None:
    """Pair each equation of the part, `mine`, with one of the larger graph; None if one finds no partner."""
    if any(len(equations) > len(theirs.alike.get(kind, ())) for kind, equations in mine.alike.items()):
        return None
    pairs: _Pairs = {}
    taken: set[Equation] = set()
    # An equation of a kind that is rare in the larger graph has few possible partners.
    for equation in sorted(mine.graph.equations, key=lambda e: len(theirs.alike[mine.kind[e]])):
        if equation in pairs:
            continue
        for partner in theirs.alike[mine.kind[equation]]:
            if partner in taken:
                continue
            found = _grown(mine, theirs, equation, partner, taken)
            if found is not None:
                pairs.update(found)
                taken.update(found.values())
                break
        else:
            return None
    return pairs


def _grown(mine: Net, theirs: Net, first: Equation, partner: Equation, taken: set[Equation]) -> _Pairs | None:
    """Pair two equations and everything in the part that is linked to the first one; None if that contradicts."""
    pairs: _Pairs = {}
    named: dict[Value, Value] = {}
    reverse: set[Equation] = set(taken)
    todo = [(first, partner)]
    while todo:
        equation, other = todo.pop()
        if equation in pairs:
            if pairs[equation] is not other:
                return None
            continue
        if other in reverse or mine.kind[equation] != theirs.kind[other]:
            return None
        pairs[equation] = other
        reverse.add(other)
        atoms = zip((*equation.inputs, *equation.outputs), (*other.inputs, *other.outputs), strict=True)
        for value, twin in ((a, b) for a, b in atoms if isinstance(a, Value) and isinstance(b, Value)):
            if value in named:
                if named[value] is not twin:
                    return None
                continue
            named[value] = twin
            if value in mine.maker:
                if twin not in theirs.maker:
                    return None
                todo.append((mine.maker[value], theirs.maker[twin]))
            users = _same_users(mine, theirs, value, twin)
            if users is None:
                return None
            todo += users
    return pairs


def _same_users(mine: Net, theirs: Net, value: Value, twin: Value) -> list[tuple[Equation, Equation]] | None:
    """Pair the users of a value with those of its twin, in order; the twin may have more."""
    found: list[tuple[Equation, Equation]] = []
    rest = list(theirs.users[twin])
    for user, position in mine.users[value]:
        kind = mine.kind[user]
        at = next((n for n, (o, p) in enumerate(rest) if p == position and theirs.kind[o] == kind), None)
        if at is None:
            return None
        found.append((user, rest.pop(at)[0]))
    return found
