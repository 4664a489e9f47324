"""Inline the calls that hide a marker, until every marker stands at the top of the graph.

A call without a marker stays one opaque equation. In the recomputation of a rematerialised region, the outputs of the
*original* forward marker replace the recomputed marker, so that no stage ever recomputes an earlier one. The region's
equations are labelled `late`, so that they run in the backward task that needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from jax.extend.core import primitives

from jaxpp_flax.engine.tracing.hints import place_with_p
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, applied, bodies, inside, opened, prune
from jaxpp_flax.engine.tracing.markers import FORWARD, TANGENT, marker_p
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.error_codes import documented

__all__ = ["MarkerPlacementError", "body_of", "count_marks", "inline", "is_recomputation"]

_REMEDIES = {
    "scan": "Give each stage a scan over its own layers, with the marks between the scans; jaxpp_flax.linen.scan and "
    "jaxpp_flax.layers.split_layers (NNX) do that, and `split_scanned` carries checkpoints over.",
    "cond": "Move the mark in front of or behind the condition.",
    "while": "Move the mark out of the loop.",
}


# JAX's name for the recomputed part of a rematerialised region; the rest of the region is its backward pass.
_RECOMPUTED = "rematted_computation"


@documented("JPF601")
class MarkerPlacementError(ValueError):
    """A stage marker stands at a place where no pipeline can be cut."""


def is_recomputation(equation: Any) -> bool:
    """Return whether an equation, of ours or of JAX, is a rematerialised region inside a backward pass."""
    return facts_of(equation.primitive).recomputes and bool(equation.params.get("differentiated"))


def _is_recomputed(equation: Equation) -> bool:
    return equation.late or _RECOMPUTED in str(getattr(equation.source, "name_stack", ""))


def _contains_marker(jaxpr: Any, memo: dict[int, bool]) -> bool:
    if id(jaxpr) not in memo:
        memo[id(jaxpr)] = any(
            eqn.primitive in (marker_p, treduce_p) or any(_contains_marker(sub, memo) for sub in bodies(eqn.params))
            for eqn in jaxpr.eqns
        )
    return memo[id(jaxpr)]


def count_marks(graph: Graph) -> int:
    """Return the number of forward markers at any depth, with those that no result depends on."""
    return len([*_forward_markers(graph.equations)])


def _forward_markers(equations: Iterable[Any]) -> Iterator[int]:
    """Yield the identifiers of the forward markers at any depth, without those that nested regions recompute."""
    for eqn in equations:
        if eqn.primitive is marker_p:
            if eqn.params["direction"] == FORWARD:
                yield eqn.params["identifier"]
        elif not is_recomputation(eqn):
            for sub in bodies(eqn.params):
                yield from _forward_markers(sub.eqns)


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


class _Inliner:
    def __init__(self, flatten: Callable[[Equation], bool], remat: Callable[[Equation], bool], hints: bool) -> None:
        self.flatten, self.remat, self.hints = flatten, remat, hints
        self.equations: list[Equation] = []
        self.substitution: dict[Value, Atom] = {}
        self.backward: set[Value] = set()
        self.memo: dict[int, bool] = {}

    def resolve(self, atom: Atom) -> Atom:
        while isinstance(atom, Value) and atom in self.substitution:
            atom = self.substitution[atom]
        return atom

    def walk(self, equations: Sequence[Equation], scope: _Originals, recomputed: _Originals | None) -> None:
        """Append `equations`, inlining as needed.

        `recomputed` holds the original markers of the recomputed region around the equations. What is not named as
        recomputed there is backward work.
        """
        for equation in equations:
            inputs = tuple(self.resolve(atom) for atom in equation.inputs)
            transposed = equation.transposed or any(atom in self.backward for atom in inputs)
            if recomputed is not None:
                transposed = transposed or not _is_recomputed(equation)
                equation = replace(equation, late=not transposed, transposed=transposed)
            equation = equation.reading(inputs)
            hides = any(_contains_marker(sub, self.memo) for sub in bodies(equation.params))
            if equation.primitive is marker_p:
                self._marker(equation, scope, recomputed)
            elif equation.primitive is place_with_p and not self.hints:
                self.substitution[equation.outputs[0]] = equation.inputs[0]
            elif hides or self._opens(equation):
                self._call(equation, scope, recomputed)
            else:
                self._append(equation)

    def _opens(self, equation: Equation) -> bool:
        """Return whether a call is inlined even if it hides no marker."""
        facts = facts_of(equation.primitive)
        # The differentiation rules of a custom call are useless by now. As opaque objects, they would hide that two
        # stages are alike.
        always = equation.primitive in (primitives.custom_jvp_call_p, primitives.custom_vjp_call_p)
        return facts.body is not None and (always or (self.remat if facts.recomputes else self.flatten)(equation))

    def _append(self, equation: Equation) -> None:
        if equation.transposed:
            self.backward.update(equation.outputs)
        self.equations.append(equation)

    def _marker(self, equation: Equation, scope: _Originals, recomputed: _Originals | None) -> None:
        direction = equation.params["direction"]
        if direction == TANGENT:
            raise MarkerPlacementError(
                f"a stage marker is differentiated in forward mode at {equation.where}. Pipelines support reverse mode "
                "(jax.grad, jax.vjp); take the marked part out of jax.jvp / jax.jacfwd."
            )
        if direction != FORWARD:
            self._append(replace(equation, transposed=True, late=False))
        elif recomputed is None:
            scope.setdefault(equation.params["identifier"], []).append(equation)
            self._append(equation)
        else:
            original = recomputed[equation.params["identifier"]].pop(0)
            scope.setdefault(equation.params["identifier"], []).append(original)
            for mine, theirs in zip(equation.outputs, original.outputs, strict=True):
                self.substitution[mine] = theirs

    def _call(self, equation: Equation, scope: _Originals, recomputed: _Originals | None) -> None:
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
        if recomputation:
            counts = Counter(_forward_markers(opened(body).eqns))
            self.walk(graph.equations, {}, _claim(scope, counts, equation.where))
        else:
            self.walk(graph.equations, scope, recomputed)
        for outer, inner in zip(equation.outputs, graph.outputs, strict=True):
            self.substitution[outer] = self.resolve(inner)


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
