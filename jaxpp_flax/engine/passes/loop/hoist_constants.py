"""Move work of a loop's constants in front of the loop, where it is done once in a step.

What a body computes of its constants alone is the same in every microbatch. Two kinds of such work are moved:

- *Small results of large constants*: a penalty on the weights, a norm as a metric. In the loop, the task that reads
  such a number would compute it, and its rank would get all the weights. Before the loop, each term is computed where
  its weight lies (see `place`), and numbers travel.
- *Casts to a narrower type*, as mixed precision by hand makes them. The rank holds the narrow copy through the loop.
  Casts to a wider type stay: their results would take more memory than the weights. Calls and regions of
  `jax.checkpoint` that hide such a cast are opened; a region keeps its barrier (see `tracing/regions.py`).

The backward work of a penalty stays in the loop, in the backward of its weight's stage (see `label`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.data_flow import ancestors, makers_of
from jaxpp_flax.engine.analyses.equation_facts import is_small_of_large, numbers_of_large
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.passes.loop.loop import Loop
from jaxpp_flax.engine.passes.loop.open_loops import OnePass
from jaxpp_flax.engine.program.specs import followed_spec
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, applied, emit, prune, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.regions import is_barrier

__all__ = ["equation_key", "hoist_constants"]


def hoist_constants(step: Graph, specs: Sequence[PartitionSpec]) -> Graph:
    """Move such work out of every loop.

    Args:
      step: with opened loops.
      specs: the partition of each input of the step inside a submesh.
    """
    spec_of: dict[Atom, PartitionSpec] = dict(zip(step.inputs, specs, strict=True))
    equations: list[Equation] = []
    for equation in step.equations:
        if isinstance(equation, Loop):
            equations += _hoisted(equation, spec_of)
            continue
        if (spec := followed_spec(equation, spec_of)) is not None:
            spec_of[equation.outputs[0]] = spec
        equations.append(equation)
    return replace(step, equations=tuple(equations))


def _hoisted(loop: Loop, spec_of: Mapping[Atom, PartitionSpec]) -> list[Equation]:
    """Return the equations in front of a loop, and the loop that reads their results."""
    outer = dict(zip(loop.body.constants, loop.constants, strict=True))
    specs = {value: spec_of.get(atom, PartitionSpec()) for value, atom in outer.items()}
    once = isinstance(loop.schedule, OnePass)  # a function without a loop: the work of its stages is work of constants
    body = _with_open_calls(loop.body, {} if once else specs)
    kept = set[Value]()
    if once:
        kept.update(ancestors((atom for marker in body.forward_markers for atom in marker.inputs), body.producer))
    kept.difference_update(body.constants)
    moved = _moved(body, specs, kept)
    if not moved:
        return [loop]
    staying = [e for e in body.equations if moved.isdisjoint(e.outputs)]
    read = {*values(body.outputs), *(v for e in staying for v in values(e.inputs))}
    wanted = [v for e in body.equations for v in e.outputs if v in moved and v in read]
    before = _copied(makers_of(body.equations, wanted), outer)
    first: dict[Atom, Value] = {}  # of the results: two that are one value are read as one
    for value in wanted:
        first.setdefault(outer[value], value)
    twins: dict[Atom, Atom] = {value: first[outer[value]] for value in wanted}

    def reading(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
        return tuple(twins.get(atom, atom) for atom in atoms)

    inputs = (*body.constants, *first.values(), body.index, *body.carry)
    graph = prune(Graph(inputs, reading(body.outputs), tuple(e.reading(reading(e.inputs)) for e in staying)))
    count = len(body.constants) + len(first)
    operands = (*loop.constants, *first, *loop.carry_init)
    return [*before, replace(loop, inputs=operands, body=replace(body.rewritten(graph), num_consts=count))]


def _moved(body: LoopBody, specs: Mapping[Value, PartitionSpec], kept: Collection[Value]) -> set[Value]:
    """Return the results of the work that is moved.

    `specs` are those of the body's constants; what is computed of the `kept` values stays with them.
    """
    constant, of_large, results = set(body.constants), set(body.constants), set[Value]()
    # What is a constant but for its form, and can be placed like it.
    views = dict(specs)
    for equation in body.equations:
        operands = values(equation.inputs)
        if equation.primitive is marker_p or equation.effects or not constant.issuperset(operands):
            continue
        if not equation.outputs or equation.outputs[0] in kept:
            continue
        constant.update(equation.outputs)
        if of_large.isdisjoint(operands):
            continue
        is_scalar_work = any(v in results and v.aval.size <= 1 for v in operands) and all(
            v.aval.size == 1 for v in equation.outputs
        )
        if is_small_of_large(equation) or is_scalar_work or _narrows(equation, views):
            results.update(equation.outputs)
        elif (spec := _spec_of_view(equation, views)) is not None:
            views[equation.outputs[0]] = spec
        of_large.update(equation.outputs)
    return results


def _narrows(equation: Equation, views: Mapping[Value, PartitionSpec]) -> bool:
    """Return whether an equation casts a constant, or a view of one, to a narrower type."""
    if equation.name != "convert_element_type" or equation.inputs[0] not in views:
        return False
    (source,), (result,) = values(equation.inputs), equation.outputs
    return source.aval.size > 1 and result.nbytes < source.nbytes


def _spec_of_view(equation: Equation, views: Mapping[Value, PartitionSpec]) -> PartitionSpec | None:
    """Return the partition of a view of a constant; None for other work, and where XLA would choose the partition."""
    linear = facts_of(equation.primitive).linear
    if len(equation.inputs) != 1 or linear is None or not linear.moves:
        return None
    (source,) = equation.inputs
    if not isinstance(source, Value) or source not in views:
        return None
    if equation.name == "convert_element_type":
        return None
    if not axes_in(views[source]):
        return PartitionSpec()
    return followed_spec(equation, views)  # type: ignore[arg-type]


def _copied(equations: Sequence[Equation], outer: dict[Value, Atom]) -> list[Equation]:
    """Return equations of a body as equations of the step; `outer` has the step's atom of each value.

    Of two that compute the same, one is left.
    """
    copies, copy_of = list[Equation](), dict[Hashable, Equation]()
    for equation in equations:
        inputs = tuple(outer[a] if isinstance(a, Value) else a for a in equation.inputs)
        key = equation_key(equation, inputs)
        if (copied := copy_of.get(key)) is None:
            outputs = tuple(Value(v.aval) for v in equation.outputs)
            copied = replace(equation, inputs=inputs, outputs=outputs, late=False, transposed=False)
            copies.append(copied)
            if key is not None:
                copy_of[key] = copied
        outer.update(zip(equation.outputs, copied.outputs, strict=True))
    return copies


def equation_key(equation: Equation, inputs: tuple[Atom, ...]) -> Hashable:
    """Return what is equal for two equations of one result; None if their parameters cannot be compared."""
    try:
        key = (equation.primitive, inputs, tuple(sorted(equation.params.items())))
        hash(key)
    except TypeError:
        return None
    return key


def _with_open_calls(body: LoopBody, specs: Mapping[Value, PartitionSpec]) -> LoopBody:
    """Open calls and regions of `jax.checkpoint` that hide work which is moved, or keep it from its stage.

    Those are calls of several constants alone, calls that give a number with what its gradient reads (the number is
    moved, the rest stays), and calls with a cast that narrows a constant; `specs` are those of the constants.
    """
    while calls := {*_mixing_calls(body), *_casting_calls(body, specs)}:
        opens = lambda equation, calls=calls: not calls.isdisjoint(equation.outputs)  # noqa: E731
        body = body.rewritten(inline(body, flatten=opens, remat=opens))
    return _with_numbers_apart(body)


def _mixing_calls(body: LoopBody) -> Iterator[Value]:
    """Yield the results of calls that mix constants; arrays that are made of constants and numbers count as such."""
    constants = set(body.constants)
    for equation in body.equations:
        operands = values(equation.inputs)
        arrays = {v for v in operands if v.aval.size > 1}
        if equation.primitive is marker_p or not constants.issuperset(arrays):
            continue
        constants.update(equation.outputs)
        sizes = {v.aval.size > 1 for v in equation.outputs}
        called = facts_of(equation.primitive).body_in(equation.params)
        if called is not None and (len(arrays) > 1 or (arrays and len(sizes) > 1)):
            yield from equation.outputs


def _casting_calls(body: LoopBody, specs: Mapping[Value, PartitionSpec]) -> Iterator[Value]:
    """Yield the results of calls that cast constants to a narrower type."""
    views = dict(specs)
    for equation in body.equations:
        if _casts_inside(equation, views):
            yield from equation.outputs
        elif (spec := _spec_of_view(equation, views)) is not None:
            views[equation.outputs[0]] = spec


def _casts_inside(equation: Equation, views: Mapping[Value, PartitionSpec]) -> bool:
    """Return whether a call casts a constant, or a view of one, to a narrower type, at any depth."""
    called = facts_of(equation.primitive).body_in(equation.params)
    if called is None or views.keys().isdisjoint(equation.inputs):
        return False
    within = dict(views)
    for inner in applied(called, equation.inputs).equations:
        if _narrows(inner, within) or _casts_inside(inner, within):
            return True
        if is_barrier(inner):  # with `JAX_REMAT3=1`, in front of what is recomputed
            pairs = zip(inner.inputs, inner.outputs, strict=True)
            within.update((out, within[v]) for v, out in pairs if v in within)  # type: ignore[index]
        elif (spec := _spec_of_view(inner, within)) is not None:
            within[inner.outputs[0]] = spec
    return False


def _with_numbers_apart(body: LoopBody) -> LoopBody:
    """Let a call that cannot be opened make its numbers, and what their gradient reads, in two calls.

    Such are scans over the rows of a constant: the number is moved, the rest stays. XLA drops from each call what
    nobody reads.
    """
    constants, equations = set(body.constants), list[Equation]()
    for equation in body.equations:
        apart = facts_of(equation.primitive).body is None and equation.primitive is not marker_p
        if equation.effects or not constants.issuperset(values(equation.inputs)) or not apart:
            equations.append(equation)
            continue
        constants.update(equation.outputs)
        numbers = numbers_of_large(equation)
        if 0 < len(numbers) < len(equation.outputs):
            equations += _call_for(numbers, equation)
            equation = replace(equation, outputs=tuple(Value(v.aval) if v in numbers else v for v in equation.outputs))
        equations.append(equation)
    return replace(body, equations=tuple(equations))


def _call_for(numbers: Sequence[Value], equation: Equation) -> list[Equation]:
    """Return a call that makes some results of an equation, and no others."""
    inputs, places = values(equation.inputs), [equation.outputs.index(v) for v in numbers]

    @jax.jit
    def only_numbers(*xs: Any) -> list[Any]:
        held: dict[Atom, Any] = dict(zip(inputs, xs, strict=True))
        results = equation.bind(*(a.value if isinstance(a, Constant) else held[a] for a in equation.inputs))
        return [results[place] for place in places]

    return emit(only_numbers, inputs, numbers, like=equation)[0]
