"""The bytes of each rank while a compiled step runs: our walk of its program, with the compiler's bytes of tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.engine.runtime.executables import Executables
from jaxpp_flax.engine.summary import walk_memory
from jaxpp_flax.planning.compilers.tasks import TaskText
from jaxpp_flax.schedules.task import RUN_FORWARD, TaskKind

__all__ = ["RankBytes", "rank_bytes"]

BATCH = "batch"
ACCUMULATORS, RESIDUALS, GRADIENTS = "accumulators", "residuals", "gradients between stages"
OUTSIDE, WORKSPACE, CODE = "between tasks", "workspace", "programs"
# The attributes of a training state; those of another object keep their names.
_ARGUMENTS = {
    "params": "parameters", "opt_state": "optimizer state", "model_state": "model state", "ema": "moving average",
    "step": OUTSIDE, "loss_scale": OUTSIDE,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The bytes on each device of a rank at the moment at which it holds most.

    Attributes:
      rank: the rank.
      task: the task that runs then.
      kinds: the bytes by what they are for: "parameters", "optimizer state", "residuals", "accumulators",
        "workspace" (of that task, by the compiler), "programs", ...
      host: the most bytes in the host's memory for each device.
    """

    rank: int
    task: str
    kinds: Mapping[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(self.kinds.values())


def rank_bytes(
    executables: Executables,
    texts: Sequence[TaskText | None],
    inside: Sequence[float],
    code: Sequence[int],
    arguments: Sequence[str],
    results: Sequence[str],
) -> tuple[RankBytes, ...]:
    """Walk a program with the bytes that the compiler says.

    Args:
      executables: the program.
      texts: what the compiler says of each of its tasks; None for one of another process.
      inside: what a run of each task adds to the bytes that are live.
      code: the bytes of the programs of each rank.
      arguments, results: the path of each, which names its kind.
    """
    program = executables.program
    kinds, sizes = value_kinds(program, arguments, results), value_sizes(program, texts)
    memory, held = walk_memory(executables, inside, kinds, sizes)
    found = list[RankBytes]()
    for rank in range(program.num_ranks):
        moment, total = memory.fullest[rank], dict[str, int](held[rank])
        for kind, nbytes in moment.kinds.items():
            total[kind] = total.get(kind, 0) + int(nbytes)
        total[WORKSPACE], total[CODE] = int(moment.inside), code[rank]
        name = "" if moment.task is None else program.tasks[moment.task].name
        kept = {kind: nbytes for kind, nbytes in total.items() if nbytes}
        found.append(RankBytes(rank=rank, task=name, kinds=kept, host=int(memory.hosts[rank].peak)))
    return tuple(found)


def value_sizes(program: Program, texts: Sequence[TaskText | None]) -> dict[int, int]:
    """Return the bytes of values as the compiler lays them out, where a task reads or makes them."""
    found: dict[int, int] = {}
    for instruction in program.instructions:
        if isinstance(instruction, Transfer):
            for sent, received in zip(instruction.sent, instruction.received, strict=True):
                if sent in found:
                    found.setdefault(received, found[sent])
        if not isinstance(instruction, Run) or (read := texts[instruction.task]) is None:
            continue
        text = read.text
        for values, sizes in ((instruction.inputs, text.argument_bytes), (instruction.outputs, text.result_bytes)):
            if len(values) == len(sizes):
                for value, size in zip(values, sizes, strict=True):
                    found.setdefault(value, size)
    return found


def value_kinds(program: Program, arguments: Sequence[str], results: Sequence[str]) -> dict[int, str]:
    """Return what each value of a program is for; `arguments` and `results` have the paths of the step's own."""
    found: dict[int, str] = {}
    for path, ranks in zip(arguments, program.arguments, strict=True):
        found.update(dict.fromkeys(ranks.values(), kind_of(path, BATCH)))
    for path, ranks in zip(results, program.results, strict=True):
        if isinstance(ranks, dict):
            for value in ranks.values():
                found.setdefault(value, kind_of(path, OUTSIDE))
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            task = program.tasks[instruction.task]
            for output, source in task.pins:
                found.setdefault(instruction.inputs[source], ACCUMULATORS)
                found.setdefault(instruction.outputs[output], ACCUMULATORS)
            for value in instruction.outputs:
                found.setdefault(value, _made_by(task.kind))
        elif isinstance(instruction, Transfer):
            for sent, received in zip(instruction.sent, instruction.received, strict=True):
                found.setdefault(received, found.get(sent, OUTSIDE))
    return _with_first_accumulators(program, found)


def _with_first_accumulators(program: Program, kinds: dict[int, str]) -> dict[int, str]:
    """Name the zeros that sums begin with: a task outside the loop makes them."""
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            for _, source in program.tasks[instruction.task].pins:
                if kinds.get(instruction.inputs[source]) == OUTSIDE:
                    kinds[instruction.inputs[source]] = ACCUMULATORS
    return kinds


def _made_by(kind: TaskKind | None) -> str:
    if kind is None:
        return OUTSIDE
    return RESIDUALS if kind in RUN_FORWARD else GRADIENTS


def kind_of(path: str, otherwise: str) -> str:
    """Return the kind of an argument or a result by the first attribute in its path, as messages write it.

    Example:
      >>> kind_of("[0].params['layers'][0]", BATCH), kind_of("[1]['x']", BATCH)
      ('parameters', 'batch')
    """
    found = re.search(r"\.(\w+)", path)
    return otherwise if found is None else _ARGUMENTS.get(found[1], found[1])
