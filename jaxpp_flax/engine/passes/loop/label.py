"""Label every equation of the loop's body with the phase that runs it.

With S stages there are 2 S phases, in order of data flow: phase s is the forward work of stage s, phase 2 S - 1 - s its
backward work. The label of an equation never precedes the label of its operands. Within this rule, the labels decide
only the place of the work, never its results.

- A forward equation belongs to the first cutting marker that depends on it. So stage s holds all work that marker s
  needs.
- A forward equation that no marker needs (loss, residuals, auxiliary losses) follows its operands.
- Transposed equations follow their cotangents. In an auxiliary loss, the cotangent is a bare scalar from another
  stage; there, transposed equations follow the residual that they read.
- Recomputed equations run as late as their users allow, so that recomputation happens in the backward task. So does
  backward work of parameters and cotangents that are scalars (the gradient of a penalty on the weights): it happens
  where the parameter's other gradient is made, and the scalar travels.
- Cheap equations that depend on the loop's inputs alone (microbatch slices, casts of weights, masks, positions, keys)
  are *free*: every task that needs them computes them itself, and nothing is transferred or stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_flax.engine.analyses.data_flow import ancestors
from jaxpp_flax.engine.passes.loop.loop import LabelledLoop, Labels, Loop, Shapes, advanced, each_loop, loops_of
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, bodies, producers, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.markers import FORWARD, marker_p
from jaxpp_flax.engine.tracing.primitives import Cost, facts_of

__all__ = ["label", "label_loops"]

_UNANCHORED = -1

# What every task may compute for itself; and with a tiny result, so that even a kernel costs less than a transfer.
_REPEATED = (Cost.VIEW, Cost.LIGHT)
_REPEATED_IF_TINY = (*_REPEATED, Cost.KERNEL, Cost.READING)
_TINY = 64  # elements


def _match_backward(body: LoopBody, cut_of: Mapping[Equation, int]) -> dict[Equation, int]:
    """Find the cut of each backward marker: by identifier, and by order if a cached jit repeats an identifier."""
    remaining: dict[int, list[Equation]] = {}
    for marker in body.forward_markers:
        remaining.setdefault(marker.params["identifier"], []).append(marker)
    matched: dict[Equation, int] = {}
    for equation in body.equations:
        if equation.primitive is marker_p and equation.params["direction"] != FORWARD:
            originals = remaining.get(equation.params["identifier"], [])
            original = originals.pop() if len(originals) > 1 else (originals[0] if originals else None)
            if original is not None and original in cut_of:
                matched[equation] = cut_of[original]
    return matched


def _is_cheap(equation: Equation) -> bool:
    tiny = all(v.aval.size <= _TINY for v in equation.outputs)
    return not equation.effects and _costs_at_most(equation, _REPEATED_IF_TINY if tiny else _REPEATED)


def _costs_at_most(equation: Any, costs: Sequence[Cost]) -> bool:
    """Return whether an equation, and each one that it holds at any depth, has one of the costs and no effect."""
    return facts_of(equation.primitive).cost in costs and all(
        not jaxpr.effects and all(_costs_at_most(inner, costs) for inner in jaxpr.eqns)
        for jaxpr in bodies(equation.params)
    )


def _find_free(body: LoopBody) -> tuple[frozenset[Equation], frozenset[int]]:
    """Find the equations that each task may compute for itself, and the carry leaves that are mere counters.

    A counter is a leaf of the carry whose next value is free: every stage keeps its own copy, without a transfer.
    """
    cheap = {e for e in body.equations if e.primitive is not marker_p and _is_cheap(e)}
    counters = set(range(len(body.carry)))
    while True:
        available: set[Value] = {*body.constants, body.index, *(body.carry[j] for j in counters)}
        free: set[Equation] = set()
        for equation in body.equations:
            if equation in cheap and available.issuperset(values(equation.inputs)):
                free.add(equation)
                available.update(equation.outputs)
            elif equation.primitive is marker_p:  # it changes no value, and disappears
                passed = zip(equation.inputs, equation.outputs, strict=True)
                available.update(out for value, out in passed if value in available)
        kept = {j for j in counters if not isinstance(body.next_carry[j], Value) or body.next_carry[j] in available}
        if kept == counters:
            return frozenset(free), frozenset(counters)
        counters = kept


def label_loops(step: Graph, choose_cuts: Callable[[Loop], Sequence[int]]) -> Graph:
    """Ask a cut policy for the marks that cut each loop, and label the body.

    The last loop of a step is asked for first: it is the one that trains, and earlier ones compute what it trains on. A
    policy that gives all loops the same stages then decides by the work of training. Loops for several shapes of
    microbatches get the cuts of the last of these shapes.

    Raises:
      ValueError: if the chosen marks do not make as many stages as the schedule has.
    """
    cuts, of_shapes = dict[Loop, tuple[int, ...]](), dict[Shapes, tuple[int, ...]]()
    for loop in reversed(loops_of(step, Loop)):
        of_others = None if loop.shapes is None else of_shapes.get(loop.shapes)
        cuts[loop] = _checked(loop, choose_cuts(loop) if of_others is None else of_others)
        if loop.shapes is not None:
            of_shapes[loop.shapes] = cuts[loop]
    return each_loop(step, Loop, lambda loop: advanced(LabelledLoop, loop, labels=label(loop.body, cuts[loop])))


def _checked(loop: Loop, chosen: Sequence[int]) -> tuple[int, ...]:
    cuts, stages, marks = tuple(chosen), loop.schedule.num_stages, len(loop.body.marks)
    legal = len(cuts) == stages - 1 and list(cuts) == sorted({*cuts})
    if not legal or any(not 0 <= c < marks for c in cuts):
        raise ValueError(
            f"the cut policy chose the marks {list(cuts)} of {marks} for {stages} stages: it must "
            f"return {stages - 1} different indices in ascending order."
        )
    return cuts


def label(body: LoopBody, cutting: Sequence[int]) -> Labels:
    """Assign a phase to every equation of an inlined body; `cutting` holds the indices of the marks that cut."""
    cut_of = {marker: k for k, index in enumerate(cutting) for marker in body.cut_groups[index]}
    free, counters = _find_free(body)
    labeller = _Labeller(body, len(cutting) + 1, cut_of, _match_backward(body, cut_of), free)
    labeller.own_by_marker()
    labeller.follow_operands()
    labeller.run_late()
    passed: dict[Atom, Atom] = {}  # what a marker returns, and what it reads
    plain: dict[Equation, Equation] = {}
    for equation in body.equations:
        operands = tuple(passed.get(atom, atom) for atom in equation.inputs)
        if equation.primitive is marker_p:
            passed.update(zip(equation.outputs, operands, strict=True))
        else:
            plain[equation] = equation.reading(operands)
    outputs = tuple(passed.get(atom, atom) for atom in body.outputs)
    return Labels(
        body=replace(body, outputs=outputs, equations=tuple(plain.values())),
        cuts=tuple(cutting),
        phase={plain[equation]: phase for equation, phase in labeller.phase.items()},
        counters=counters,
        marked=frozenset(values(passed[out] for marker in body.forward_markers for out in marker.outputs)),
        has_second_order=bool(labeller.belated),
    )


@dataclass(frozen=True, eq=False)
class _Labeller:
    """The three sweeps over a body; `cut_of` and `backward` give the cut of each forward and backward marker."""

    body: LoopBody
    stages: int
    cut_of: dict[Equation, int]
    backward: dict[Equation, int]
    free: frozenset[Equation]
    phase: dict[Equation, int] = field(default_factory=dict)
    belated: set[Equation] = field(default_factory=set)  # backward markers behind the backward of their stage
    movable: set[Equation] = field(default_factory=set)  # backward work of parameters and scalars alone

    def own_by_marker(self) -> None:
        """Give each equation to the first cutting marker that needs it."""
        # At an earlier cut the search ends: the work before it is labelled already.
        unlabelled = producers(e for e in self.body.equations if e not in self.free and e not in self.cut_of)
        for marker, k in self.cut_of.items():
            for value in [v for v in ancestors(marker.inputs, unlabelled) if v in unlabelled]:
                equation = unlabelled.pop(value)
                if equation.primitive is not marker_p:
                    self.phase.setdefault(equation, k)

    def follow_operands(self) -> None:
        """Let the other equations follow their operands, in program order."""
        stages, phase = self.stages, self.phase
        phases: dict[Value, int] = {}
        scaled: set[Value] = set()  # arrays made of parameters and of scalars
        for equation in self.body.equations:
            operands = values(equation.inputs)
            base = max((phases.get(v, _UNANCHORED) for v in operands), default=_UNANCHORED)
            if equation.primitive is marker_p:
                if equation in self.cut_of:
                    base = max(base, self.cut_of[equation] + 1)
                elif equation in self.backward:
                    entered = 2 * stages - 1 - self.backward[equation]
                    if base >= entered:
                        self.belated.add(equation)
                    base = max(base, entered)
            elif equation in phase:
                base = phase[equation]
            elif equation in self.free:
                base = _UNANCHORED
            else:
                if equation.transposed and base != _UNANCHORED:
                    if all(
                        v in scaled or self._is_number(v) or phases.get(v, _UNANCHORED) == _UNANCHORED for v in operands
                    ):
                        scaled.update(equation.outputs)
                        self.movable.add(equation)
                    base = self._backward_phase(equation, phases, base)
                phase[equation] = base
            phases.update(dict.fromkeys(equation.outputs, base))

    def _is_number(self, value: Value) -> bool:
        """Return whether a value is a single number, which travels at no cost; it may be held in parts."""
        return value.aval.size == 1 or value in self.body.numbers

    def _backward_phase(self, equation: Equation, phases: dict[Value, int], base: int) -> int:
        """Return the backward phase of a transposed equation whose operands are known from phase `base` on."""
        stages, operands = self.stages, values(equation.inputs)
        if base < stages:  # it reads only residuals: the seed of the loss, or of an auxiliary loss of a middle stage
            return 2 * stages - 1 - base
        residuals = [phases[v] for v in operands if 0 <= phases.get(v, _UNANCHORED) < stages and not self._is_number(v)]
        cotangents = [v for v in operands if phases.get(v, _UNANCHORED) >= stages]
        if residuals and all(map(self._is_number, cotangents)):
            return max(base, 2 * stages - 1 - max(residuals))
        return base

    def run_late(self) -> None:
        """Run recomputed and unanchored equations in the phase that first needs them, in reverse program order."""
        phase, producer = self.phase, self.body.producer
        # The latest phase that may make each value.
        results = [v for v in values(self.body.results) if v in producer]
        needed = {v: self.stages if producer[v].transposed else self.stages - 1 for v in results}
        for equation in reversed(self.body.equations):
            users = [needed[v] for v in equation.outputs if v in needed]
            if equation.primitive is marker_p:
                self._bound_marked(equation, needed)
                continue
            if equation in self.free:
                continue
            if equation.late or equation in self.movable or phase[equation] == _UNANCHORED:
                phase[equation] = max(phase[equation], min(users, default=max(phase[equation], 0)))
            for value in values(equation.inputs):
                needed[value] = min(needed.get(value, phase[equation]), phase[equation])

    def _bound_marked(self, marker: Equation, needed: dict[Value, int]) -> None:
        """Bound the phase of a marker's operands: they are needed at the latest one phase before its users."""
        for out, operand in zip(marker.outputs, marker.inputs, strict=True):
            bound = needed.get(out, 2 * self.stages - 1)
            if marker in self.backward:
                bound = min(bound, 2 * self.stages - 2 - self.backward[marker])
            elif marker in self.cut_of:
                bound = min(bound, self.cut_of[marker])
            if isinstance(operand, Value):
                needed[operand] = min(needed.get(operand, bound), bound)
