"""Run a task that contains another one as that task and a rest, so that XLA compiles the common work once.

The first stage's forward is an embedding and then the layers of any other stage; the last stage's backward begins with
the head. XLA would compile such layers again for each of these tasks. Here the program runs the middle stages' task in
all of them, before or after a small task for the rest. A last stage whose forward and backward are one task holds both
layers' forward and their backward: it becomes three tasks, which saves a quarter of the time to compile. Its residuals
are then arrays between tasks, where XLA kept them in its workspace. So it stays whole under a plan for residuals, which
counts them. Where small values are packed it does not contain the other tasks, and makes fewer calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

from jaxpp_flax.engine.analyses.contained_graphs import Net, divide
from jaxpp_flax.engine.program.program import Instruction, Program, ProgramTask, Run
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Graph, Value, values

__all__ = ["share_tasks"]

# One more run costs about 10 µs; XLA takes 5 to 10 ms for an equation. A loop's task runs for every microbatch.
_FEWEST_EQUATIONS = 30
_FEWEST_IN_LOOPS = 100


def share_tasks(program: Program, keys: Fingerprinter, *, fused: bool = True) -> Program:
    """Return the program with tasks divided where they contain another task of it; `fused`: fused tasks too."""
    parts = _Parts(keys, fused)
    divided = {number: parts.of(task) for number, task in _by_size(program)}
    if all(len(of) == 1 for of in divided.values()):
        return program
    tasks, numbers = list[ProgramTask](), dict[int, list[int]]()
    for number, task in enumerate(program.tasks):
        numbers[number] = [len(tasks) + i for i in range(len(divided[number]))]
        tasks += [task] if len(divided[number]) == 1 else _tasks_of(task, divided[number])
    instructions, count = list[Instruction](), program.num_slots
    for instruction in program.instructions:
        if not isinstance(instruction, Run):
            instructions.append(instruction)
            continue
        runs, count = _runs(instruction, program.tasks[instruction.task], tasks, numbers[instruction.task], count)
        instructions += runs
    return replace(program, instructions=tuple(instructions), tasks=tuple(tasks), num_slots=count)


def _by_size(program: Program) -> Iterator[tuple[int, ProgramTask]]:
    yield from sorted(enumerate(program.tasks), key=lambda numbered: len(numbered[1].graph.equations))


@dataclass(frozen=True)
class _Parts:
    """Divides tasks, smaller ones first; `wholes` are the graphs so far that stay in one piece."""

    keys: Fingerprinter
    fused: bool
    wholes: dict[int, Net] = field(default_factory=dict[int, Net])

    def of(self, task: ProgramTask) -> tuple[Graph, ...]:
        fewest = _FEWEST_EQUATIONS if task.stage is None else _FEWEST_IN_LOOPS
        results, small = task.graph.outputs, len(task.graph.equations) < fewest
        stays = task.fused and not self.fused
        if small or stays or task.out_specs or len({*values(results)}) < len(results):
            return (task.graph,)
        key = self.keys.graph(task.graph)
        if key in self.wholes:
            return (task.graph,)
        whole = Net.of(task.graph)
        parts = self._of(whole, fewest)
        if len(parts) == 1:
            self.wholes[key] = whole
        return parts

    def _of(self, whole: Net, fewest: int) -> tuple[Graph, ...]:
        graph, size = whole.graph, len(whole.graph.equations)
        if size < fewest or self.keys.graph(graph) in self.wholes:
            return (graph,)
        for part in reversed(self.wholes.values()):
            if fewest <= len(part.kind) < size and (found := divide(whole, part, self.keys)) is not None:
                divided = [(each,) if each is found.core else self._of(Net.of(each), fewest) for each in found.parts]
                return tuple(chain.from_iterable(divided))
        return (graph,)


def _tasks_of(task: ProgramTask, graphs: tuple[Graph, ...]) -> Iterator[ProgramTask]:
    pins = {task.graph.outputs[output]: task.graph.inputs[source] for output, source in task.pins}
    position = {value: i for i, value in enumerate(task.graph.outputs)}
    for number, graph in enumerate(graphs):
        inputs = {value: i for i, value in enumerate(graph.inputs)}
        outputs = [position.get(value) for value in graph.outputs]
        yield replace(
            task,
            graph=graph,
            part=number,
            pins=tuple((i, inputs[pins[v]]) for i, v in enumerate(graph.outputs) if pins.get(v) in inputs),
            batch_dims=tuple(None if i is None else task.batch_dims[i] for i in outputs) if task.batch_dims else (),
            like=tuple(None if i is None else task.like[i] for i in outputs) if task.like else (),
        )


def _runs(
    run: Run, task: ProgramTask, tasks: list[ProgramTask], numbers: list[int], count: int
) -> tuple[list[Run], int]:
    """Return the runs of a task's parts, and the number of slots then: what parts hand on to others gets new ones."""
    if len(numbers) == 1:
        return [replace(run, task=numbers[0])], count
    slots: dict[Value, int] = dict(zip(task.graph.inputs, run.inputs, strict=True))
    slots.update(zip(values(task.graph.outputs), run.outputs, strict=True))
    runs = list[Run]()
    for number in numbers:
        graph = tasks[number].graph
        for value in values(graph.outputs):
            if value not in slots:
                slots[value], count = count, count + 1
        inputs, outputs = (tuple(slots[v] for v in values(atoms)) for atoms in (graph.inputs, graph.outputs))
        runs.append(Run(number, run.microbatch, run.rank, inputs, outputs))
    return runs, count
