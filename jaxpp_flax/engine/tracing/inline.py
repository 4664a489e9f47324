"""Inline the calls that hide a marker, until every marker stands at the top of the graph.

A call without a marker stays one opaque equation. In the recomputation of a rematerialised region, the outputs of the
*original* forward marker replace the recomputed marker, so that no stage ever recomputes an earlier one. The region's
equations are labelled `late`, so that they run in the backward task that needs them.

JAX has two forms of a differentiated region. By default it is one call, `checkpoint`, of the recomputation and the
backward. With `JAX_REMAT3=1` it is open: a barrier, then what is recomputed (as equations, or as a call), then the
backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, TypeAlias

from jax.extend.core import primitives

from jaxpp_flax._compat_texts.traces import is_recomputed, scopes_of
from jaxpp_flax.engine.tracing.hints import place_with_p
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, applied, bodies, inside, opened, prune, values
from jaxpp_flax.engine.tracing.markers import FORWARD, TANGENT, marker_p
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.regions import Region, is_barrier
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.error_codes import documented

__all__ = ["MarkerPlacementError", "body_of", "count_marks", "inline", "is_recomputation"]

_REMEDIES = {
    "scan": "Give each stage a scan over its own layers, with the marks between the scans; jaxpp_flax.linen.scan and "
    "jaxpp_flax.layers.split_layers (NNX) do that, and `split_scanned` carries checkpoints over.",
    "cond": "Move the mark in front of or behind the condition.",
    "while": "Move the mark out of the loop.",
}


@documented("JPF601")
class MarkerPlacementError(ValueError):
    """A stage marker stands at a place where no pipeline can be cut."""


def is_recomputation(equation: Any) -> bool:
    """Return whether an equation, of ours or of JAX, is a rematerialised region inside a backward pass."""
    return facts_of(equation.primitive).recomputes and bool(equation.params.get("differentiated"))


def _is_recomputed(equation: Any) -> bool:
    """Return whether an equation, of ours or of JAX, stands in the recomputed part of a region, not in its backward."""
    source = equation.source if isinstance(equation, Equation) else equation.source_info
    return getattr(equation, "late", False) or is_recomputed(scopes_of(source))


def _contains_marker(jaxpr: Any, memo: dict[int, bool]) -> bool:
    if id(jaxpr) not in memo:
        memo[id(jaxpr)] = any(
            eqn.primitive in (marker_p, treduce_p) or any(_contains_marker(sub, memo) for sub in bodies(eqn.params))
            for eqn in jaxpr.eqns
        )
    return memo[id(jaxpr)]


def count_marks(graph: Graph) -> int:
    """Return the number of forward markers at any depth, with those that no result depends on."""
    return len([*_forward_markers(graph.equations, lambda eqn: is_recomputation(eqn) or _is_recomputed(eqn))])


def _forward_markers(equations: Iterable[Any], skipped: Callable[[Any], bool] = is_recomputation) -> Iterator[int]:
    """Yield the identifiers of the forward markers at any depth; by default without those of nested recomputations."""
    for eqn in equations:
        if skipped(eqn):
            continue
        if eqn.primitive is marker_p and eqn.params["direction"] == FORWARD:
            yield eqn.params["identifier"]
        for sub in bodies(eqn.params):
            yield from _forward_markers(sub.eqns, skipped)


# The forward markers that may replace recomputed ones, by identifier and in program order: of the whole body, or of one
# recomputed region.
_Originals: TypeAlias = dict[int, list[Equation]]


def _claim(originals: _Originals, counts: Counter[int], where: str) -> _Originals:
    """Take the last originals: regions are recomputed in reverse order of the forward pass."""
    claimed: _Originals = {}
    for identifier, count in counts.items():
        left = originals.get(identifier, [])
        if count > len(left):
            raise MarkerPlacementError(
                f"a rematerialised region at {where} recomputes a stage marker that the forward pass does not "
                "hold. Put the marker outside of jax.checkpoint / remat, around whole stages."
            )
        claimed[identifier] = left[-count:]
        del left[-count:]
    return claimed


@dataclass(frozen=True)
class _Recomputation:
    """A recomputed region while it is walked.

    `originals` are its markers' originals that are not used yet; `ends` are the places of its markers in the graph.
    """

    region: Region
    originals: _Originals
    ends: list[int] = field(default_factory=list[int])


class _Inliner:
    def __init__(self, flatten: Callable[[Equation], bool], remat: Callable[[Equation], bool], hints: bool) -> None:
        self.flatten, self.remat, self.hints = flatten, remat, hints
        self.equations: list[Equation] = []
        self.substitution: dict[Value, Atom] = {}
        self.backward: set[Value] = set()
        self.computed: set[Value] = set()
        self.memo: dict[int, bool] = {}
        # Of regions that JAX has opened: their barriers, the region of a value, and the originals of a region.
        self.barriers: dict[Value, Equation] = {}
        self.region_of: dict[Value, Region] = {}
        self.scopes: dict[Region, _Originals] = {}

    def resolve(self, atom: Atom) -> Atom:
        while isinstance(atom, Value) and atom in self.substitution:
            atom = self.substitution[atom]
        return atom

    def walk(self, equations: Sequence[Equation], scope: _Originals, again: _Recomputation | None) -> None:
        """Append `equations`, inlining as needed; `again` is the recomputed region around them."""
        # An equation with a region was inlined before; a stage's own recomputation holds no marker.
        opened_by_jax = lambda e: again is None and e.late and e.region is None  # noqa: E731
        for is_region, run in groupby(equations, opened_by_jax):
            if is_region:
                self._recompute([*run], scope)
            else:
                for equation in run:
                    self._equation(equation, scope, again)

    def _equation(self, equation: Equation, scope: _Originals, again: _Recomputation | None) -> None:
        """Append an equation. What is not named as recomputed in a recomputed region is backward work."""
        if equation.transposed and is_barrier(equation):
            self.barriers.update(dict.fromkeys(equation.outputs, equation))
        inputs = tuple(self.resolve(atom) for atom in equation.inputs)
        transposed = equation.transposed or any(atom in self.backward for atom in inputs)
        within = [self.region_of[v] for v in (*values(equation.inputs), *values(inputs)) if v in self.region_of]
        if transposed and within and equation.region is None:
            equation = replace(equation, region=within[0])
        if again is not None:
            transposed = transposed or not _is_recomputed(equation)
            equation = replace(equation, late=not transposed, transposed=transposed, region=again.region)
        equation = equation.reading(inputs)
        hides = any(_contains_marker(sub, self.memo) for sub in bodies(equation.params))
        if equation.primitive is marker_p:
            self._marker(equation, scope, again)
        elif equation.primitive is place_with_p and not self.hints:
            self.substitution[equation.outputs[0]] = equation.inputs[0]
        elif hides or self._opens(equation):
            self._call(equation, scope, again)
        else:
            self._append(equation)

    def _opens(self, equation: Equation) -> bool:
        """Return whether a call is inlined even if it hides no marker."""
        facts = facts_of(equation.primitive)
        # The differentiation rules of a custom call are useless by now. As opaque objects, they would hide that two
        # stages are alike.
        always = equation.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p)
        body = facts.body_in(equation.params)
        return body is not None and (always or (self.remat if facts.recomputes else self.flatten)(equation))

    def _append(self, equation: Equation) -> None:
        if equation.transposed and is_barrier(equation):  # each result is its own operand
            pairs = zip(equation.inputs, equation.outputs, strict=True)
            self.backward.update(out for atom, out in pairs if atom in self.backward)
        elif equation.transposed:
            self.backward.update(equation.outputs)
        self.computed.update(equation.outputs)
        self.equations.append(equation)

    def _marker(self, equation: Equation, scope: _Originals, again: _Recomputation | None) -> None:
        direction = equation.params["direction"]
        if direction == TANGENT:
            raise MarkerPlacementError(
                f"a stage marker is differentiated in forward mode at {equation.where}. Pipelines support reverse mode "
                "(jax.grad, jax.vjp); take the marked part out of jax.jvp / jax.jacfwd."
            )
        if direction != FORWARD:
            self._append(replace(equation, transposed=True, late=False))
        elif again is None:
            scope.setdefault(equation.params["identifier"], []).append(equation)
            self._append(equation)
        else:
            again.ends.append(len(self.equations))
            original = again.originals[equation.params["identifier"]].pop(0)
            scope.setdefault(equation.params["identifier"], []).append(original)
            for mine, theirs in zip(equation.outputs, original.outputs, strict=True):
                self.substitution[mine] = theirs

    def _call(self, equation: Equation, scope: _Originals, again: _Recomputation | None) -> None:
        body = facts_of(equation.primitive).body_in(equation.params)
        if body is None:
            marks = [e for e in inside(equation.params) if e.primitive is marker_p and e.params["name"]]
            which = f"the stage marker {marks[0].params['name']!r}" if marks else "a stage marker (or a treduce)"
            raise MarkerPlacementError(
                f"{which} stands inside `{equation.name}` at {equation.where}, where a pipeline "
                "cannot be cut. " + _REMEDIES.get(equation.name, "Move the mark out of it.")
            )
        recomputation = is_recomputation(equation)
        transposed = equation.transposed and not recomputation
        graph = applied(body, equation.inputs, transposed=transposed, late=equation.late, within=equation.source)
        inner = graph.equations
        if recomputation:
            counts = Counter(_forward_markers(opened(body).eqns))
            region = _region_of(equation)
            self._region(inner, {}, _Recomputation(region, _claim(scope, counts, equation.where)))
        else:
            within = equation.region
            self.walk(inner if within is None else [replace(e, region=within) for e in inner], scope, again)
        for outer, inner in zip(equation.outputs, graph.outputs, strict=True):
            self.substitution[outer] = self.resolve(inner)

    def _recompute(self, run: Sequence[Equation], scope: _Originals) -> None:
        """Append the recomputed part of a region that JAX has opened, without JAX's barrier.

        That barrier is over the values of all stages of the region; each task gets one of its own (see `shielded`).
        """
        inputs = dict.fromkeys(v for equation in run for v in values(equation.inputs))
        barriers = dict.fromkeys(self.barriers[v] for v in inputs if v in self.barriers)
        read = [*inputs, *(v for barrier in barriers for v in values(barrier.inputs))]
        outer = [self.region_of[v] for v in (*read, *map(self.resolve, read)) if v in self.region_of]
        called = [_region_of(e).saves for e in run if facts_of(e.primitive).recomputes]
        # JAX 0.10 leaves what a policy saves beside its barrier.
        beside = [
            v for v in inputs if v not in self.barriers and v not in self.region_of and self.resolve(v) in self.computed
        ]
        region = Region(saves=any(called) or bool(barriers and beside), prevents_cse=bool(barriers))
        for barrier in barriers:
            self.region_of.update(dict.fromkeys(barrier.outputs, region))
            pairs = zip(barrier.outputs, barrier.inputs, strict=True)
            self.substitution.update((out, self.resolve(atom)) for out, atom in pairs)
        counts = Counter(_forward_markers(run))
        scopes = [*(self.scopes[scope_of] for scope_of in outer), scope, *reversed(self.scopes.values())]
        enough = [
            scope_of
            for scope_of in scopes
            if all(len(scope_of.get(name, ())) >= count for name, count in counts.items())
        ]
        claimed = _claim((enough or scopes)[0], counts, run[0].where)
        self._region(run, self.scopes.setdefault(region, {}), _Recomputation(region, claimed))

    def _region(self, equations: Sequence[Equation], scope: _Originals, again: _Recomputation) -> None:
        """Append the equations of a region, and divide what is recomputed at its markers."""
        start = len(self.equations)
        self.walk(equations, scope, again)
        late = [i for i in range(start, len(self.equations)) if self._is_late_in(again.region, i)]
        self.region_of.update((v, again.region) for i in late for v in self.equations[i].outputs)
        parts = [again.region, *(replace(again.region) for _ in again.ends)]
        needed: dict[Value, int] = {}  # the last part that reads a value: its backward is the first to need it
        for i in reversed(late):
            equation = self.equations[i]
            part = max([bisect_right(again.ends, i), *(needed.get(v, 0) for v in equation.outputs)])
            self.equations[i] = replace(equation, region=parts[part])
            needed.update((v, max(part, needed.get(v, 0))) for v in values(equation.inputs))

    def _is_late_in(self, region: Region, place: int) -> bool:
        return self.equations[place].late and self.equations[place].region is region


def _region_of(call: Equation) -> Region:
    """Return the region of a call of `jax.checkpoint`."""
    return Region(saves=call.params["policy"] is not None, prevents_cse=call.params["prevent_cse"] is not False)


def inline(
    graph: Graph,
    *,
    flatten: bool | Callable[[Equation], bool] = False,
    remat: bool | Callable[[Equation], bool] = False,
    hints: bool = True,
) -> Graph:
    """Return the same function with every marker (and `treduce`) at the top level.

    An inlined equation stands in the scopes of the calls that held it.

    Args:
      graph: the graph to inline.
      flatten: inline plain calls too, even without a marker, so that each equation can be placed: all or those for
        which it returns True.
      remat: inline rematerialised regions too, all or those for which it returns True; recomputed equations are
        labelled `late` and stay recomputed.
      hints: keep every `place_with`; else its value takes its place.

    Raises:
      MarkerPlacementError: if a marker stands at a place where it cannot cut (`cond`, `while`, `scan`, forward-mode
        differentiation), naming the construct and the user's line.
    """
    inliner = _Inliner(_chooser(flatten), _chooser(remat), hints)
    inliner.walk(graph.equations, {}, None)
    outputs = tuple(inliner.resolve(atom) for atom in graph.outputs)
    return prune(Graph(graph.inputs, outputs, tuple(inliner.equations)))


def _chooser(which: bool | Callable[[Equation], bool]) -> Callable[[Equation], bool]:
    return which if callable(which) else lambda _: which


def body_of(equation: Equation, *, remat: bool = False) -> Graph:
    """Return the body of a `shard_map` or `scan` equation, with calls inlined and the equation's inputs."""
    jaxpr = equation.params["jaxpr"]
    inputs = tuple(Value(v.aval) for v in opened(jaxpr).invars)
    return inline(replace(applied(jaxpr, inputs), inputs=inputs), flatten=True, remat=remat)
