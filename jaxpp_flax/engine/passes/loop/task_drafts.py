"""The tasks of a loop while they are cut: the equations of each task, its results, and its additional work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax

from jaxpp_flax.engine.passes.loop.label import Labels
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Value, emit, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody

__all__ = ["Key", "TaskDrafts"]

# A task before it has a number: its phase, and 1 for the weight gradient of a split backward, else 0.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TaskDrafts:
    """The unfinished tasks; `partition` and its helpers fill the dicts.

    Attributes:
      labels: the labels of the loop's body.
      key_of: the task of each labelled equation.
      equations: the labelled equations of each task, in program order.
      extra: a task's additional equations: updates of accumulators, copies.
      returns: a task's additional results, besides the values that other tasks read.
      wanted: the values that a task reads.
      states: the accumulators that tasks read.
      fused: the last stage's task, if its forward and backward run as one.
    """

    labels: Labels
    key_of: dict[Equation, Key]
    equations: dict[Key, list[Equation]] = field(default_factory=dict)
    extra: dict[Key, list[Equation]] = field(default_factory=dict)
    returns: dict[Key, list[Value]] = field(default_factory=dict)
    wanted: dict[Key, list[Value]] = field(default_factory=dict)
    states: list[Value] = field(default_factory=list)
    fused: Key | None = None

    @property
    def body(self) -> LoopBody:
        return self.labels.body

    @property
    def stages(self) -> int:
        return self.labels.num_stages

    def stage_of(self, key: Key) -> int:
        """Return the stage that runs a task."""
        return key[0] if key[0] < self.stages else 2 * self.stages - 1 - key[0]

    def home(self, atom: Atom) -> Key:
        """Return the task that makes a result; the last stage's forward for a result that any task can compute."""
        equation = self.body.producer.get(atom) if isinstance(atom, Value) else None
        return self.key_of.get(equation, (self.stages - 1, 0)) if equation is not None else (self.stages - 1, 0)

    def return_copy(self, key: Key, atom: Atom) -> Value:
        """Let a task copy an atom to a new value, and return it."""
        (copy,), _ = emit(jax.lax.copy_p.bind, [atom])
        (result,) = copy.outputs
        self.extra.setdefault(key, []).append(copy)
        self.wanted.setdefault(key, []).extend(values([atom]))
        self.returns.setdefault(key, []).append(result)
        return result

    def free_closure(self, wanted: Sequence[Value]) -> tuple[set[Equation], set[Value]]:
        """Return the free equations that compute the wanted values, and the other values that are read then."""
        equations: set[Equation] = set()
        read: set[Value] = set()
        stack = list(wanted)
        while stack:
            resolved = self.labels.resolve(stack.pop())
            if not isinstance(resolved, Value):
                continue
            made = self.body.producer.get(resolved)
            if made is not None and made in self.labels.free:
                if made not in equations:
                    equations.add(made)
                    stack.extend(values(made.inputs))
            else:
                read.add(resolved)
        return equations, read
