"""The tasks of a loop while they are cut: each equation of the body has a task, and so has each one that is added."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jaxpp_flax.engine.analyses.data_flow import ancestors
from jaxpp_flax.engine.passes.loop.loop import Labels
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, producers, values, with_outputs

__all__ = ["Key", "TaskDrafts"]

# A task before it has a number: its phase, and 1 for the weight gradient of a split backward, else 0.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TaskDrafts:
    """The unfinished tasks. What a task reads, and what it makes for others, follows from its equations at any time.

    Attributes:
      labels: the labels of the loop's body.
      key_of: the task of each equation; free equations have none.
      equations: all equations in executable order, free ones included.
      returns: the task of each result that goes from microbatch to microbatch: accumulators and carries.
      fused: the last stage's task, if its forward and backward run as one.
    """

    labels: Labels
    key_of: dict[Equation, Key]
    equations: list[Equation]
    returns: dict[Value, Key] = field(default_factory=dict)
    fused: Key | None = None

    @property
    def stages(self) -> int:
        return self.labels.num_stages

    def stage_of(self, key: Key) -> int:
        """Return the stage that runs a task."""
        return key[0] if key[0] < self.stages else 2 * self.stages - 1 - key[0]

    def home(self, atom: Atom) -> Key:
        """Return the task that makes a result; the last stage's forward for a result that any task can compute."""
        made = self.labels.body.producer.get(atom) if isinstance(atom, Value) else None
        return (self.stages - 1, 0) if made is None else self.key_of.get(made, (self.stages - 1, 0))

    def add(self, key: Key, graph: Graph) -> Value:
        """Let a task run a graph of one output as well, and return the output in a value of its own."""
        result = Value(graph.outputs[0].aval)
        equations = with_outputs(graph, [result])
        self.equations.extend(equations)
        self.key_of.update(dict.fromkeys(equations, key))
        self.returns[result] = key
        return result

    def drop_unneeded(self, wanted: Iterable[Atom] = ()) -> None:
        """Drop equations that neither make the results nor other wanted values, and have no side effects."""
        needed = {*self.returns, *wanted}
        for equation in reversed(self.equations):
            if equation.effects or not needed.isdisjoint(equation.outputs):
                needed.update(equation.inputs)
            else:
                self.key_of.pop(equation, None)

    def by_task(self) -> dict[Key, list[Equation]]:
        """Return the equations of each task in executable order, without free ones; tasks in the order of phases."""
        found: dict[Key, list[Equation]] = {}
        for equation in self.equations:
            if equation in self.key_of:
                found.setdefault(self.key_of[equation], []).append(equation)
        return dict(sorted(found.items()))

    def graphs(self) -> dict[Key, Graph]:
        """Return each task as a graph: with the free equations that it needs, and with what others read of it."""
        free = producers(self.labels.free)
        place = {equation: number for number, equation in enumerate(self.equations)}
        # A stable order of a task's inputs: the loop's inputs, then as the body and its additions read and make them.
        known = (*self.labels.body.inputs, *(v for e in self.equations for v in (*values(e.inputs), *e.outputs)))
        number = {value: number for number, value in enumerate(dict.fromkeys(known))}
        inside: dict[Key, tuple[list[Equation], list[Value]]] = {}
        for key, own in self.by_task().items():
            needed = [*ancestors((a for e in own for a in e.inputs), free)]
            equations = sorted({*own, *(free[v] for v in needed if v in free)}, key=place.__getitem__)
            made = {v for e in equations for v in e.outputs}
            inside[key] = equations, sorted((v for v in needed if v not in made), key=number.__getitem__)
        read = {v for _, inputs in inside.values() for v in inputs}
        returned: dict[Key, list[Value]] = {}
        for value, key in self.returns.items():
            returned.setdefault(key, []).append(value)
        return {
            key: Graph(
                tuple(inputs),
                (*(v for e in equations if e in self.key_of for v in e.outputs if v in read), *returned.get(key, ())),
                tuple(equations),
            )
            for key, (equations, inputs) in inside.items()
        }
