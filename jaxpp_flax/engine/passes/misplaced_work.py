"""Warnings of work inside loops that stands on another stage than the parameters that it reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxpp_flax.engine.analyses.equation_facts import is_small_of_large, numbers_of_large
from jaxpp_flax.engine.analyses.work import products
from jaxpp_flax.engine.passes.loop.loop import CutLoop
from jaxpp_flax.engine.program.program import LoopTask
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Equation, Value, values
from jaxpp_flax.messages import listed, users_place

__all__ = ["misplaced_work"]

_LARGE_BYTES = 1024  # smaller parameters may be read anywhere


def misplaced_work(loop: CutLoop) -> Iterator[str]:
    """Yield what to say of a loop that is cut into tasks: of parameters brought together, and of second-order work.

    Backward work of a backward has no stages of its own: stage 0 does all of it.
    """
    readers = _Readers.of(loop)
    for equation, stages, nbytes in readers.brought():
        yield (
            f"`{equation.name}` at {_where(equation)}, inside the loop, brings parameters of other stages to the "
            f"stages {stages} ({nbytes:,} bytes), and their gradients back. Reduce each parameter to a scalar by "
            "itself (no examples, not all parameters in one vector) and add these up (`optax.tree.norm`)"
        )
    labels = loop.labels
    if labels.has_second_order:
        counts = {e: len([*products([e])]) for e in labels.body.equations}
        first = [e for e, count in counts.items() if count and labels.phase.get(e) == 2 * labels.num_stages - 1]
        where = f" at {_where(first[-1])}" if first else ""
        yield (
            f"a loop differentiates a gradient{where} (a gradient penalty, a force field): "
            f"{sum(counts[e] for e in first)} of the {sum(counts.values())} matrix products of a microbatch run in "
            "bwd_0, on the rank of stage 0, which reads the parameters of all stages for them, while other ranks wait. "
            "If that is slow, use fewer stages and a larger data axis"
        )


def _where(equation: Equation) -> str:
    """Return the line of the user's own code, rather than of the library's layer that it calls."""
    return users_place(getattr(equation.source, "traceback", None)) or equation.where


@dataclass(eq=False)
class _Readers:
    """Who reads the large parameters of a loop: stages with work of their own on them, and work that mixes them.

    `used` has the stages that compute with activations and with one parameter alone. `mixed` has the parameters behind
    an equation that joins several of them, or makes a number of one, and its stage.
    """

    used: defaultdict[Value, set[int]] = field(default_factory=lambda: defaultdict(set))
    mixed: list[tuple[Equation, int, frozenset[Value]]] = field(default_factory=list)

    @classmethod
    def of(cls, loop: CutLoop) -> _Readers:
        readers = cls()
        data = loop.partition.data
        large = {v for v in loop.partition.operands if v.nbytes > _LARGE_BYTES and v not in data}
        for task in loop.partition.tasks:
            readers._read(task, {v: frozenset({v}) for v in task.graph.inputs if v in large})
        return readers

    def _read(self, task: LoopTask, behind: dict[Value, frozenset[Value]]) -> None:
        """Walk a task; `behind` has the parameters of which a value is made, if it is made of nothing else."""
        for equation in inline(task.graph, flatten=True).equations:
            arrays = [v for v in values(equation.inputs) if v.aval.size > 1]
            parameters = frozenset[Value]().union(*(behind.get(v, ()) for v in arrays))
            if any(v not in behind for v in arrays):
                self._use(task.stage, arrays, behind)
                continue
            behind.update(dict.fromkeys(equation.outputs, parameters))
            before = max((len(behind[v]) for v in arrays), default=0)
            numbers = numbers_of_large(equation)
            if len(parameters) > max(before, 1) or (before == 1 and (numbers or is_small_of_large(equation))):
                self.mixed.append((equation, task.stage, parameters))
            if numbers:  # the other results are what the numbers' gradient reads
                behind.update(dict.fromkeys(equation.outputs, frozenset[Value]()))
        self._use(task.stage, values(task.graph.outputs), behind)

    def _use(self, stage: int, read: list[Value], behind: Mapping[Value, frozenset[Value]]) -> None:
        for value in read:
            parameters = behind.get(value, frozenset())
            if len(parameters) == 1 and value.aval.size > 1:
                self.used[next(iter(parameters))].add(stage)

    def brought(self) -> Iterator[tuple[Equation, str, int]]:
        """Yield the first equations that read parameters of other stages, with the stages that get them, and bytes."""
        by_place: dict[str, tuple[Equation, set[int], set[tuple[Value, int]]]] = {}
        for equation, stage, parameters in self.mixed:
            others = {(v, stage) for v in parameters if self.used[v] and stage not in self.used[v]}
            if others:
                _, stages, brought = by_place.setdefault(_where(equation), (equation, set(), set()))
                stages.add(stage)
                brought |= others
        for equation, stages, brought in by_place.values():
            yield equation, listed(sorted(stages)), sum(v.nbytes for v, _ in brought)
