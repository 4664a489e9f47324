"""`compiler_report`: does a compiled step fit, what does each of its tasks do, and how long would a step take."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.engine.runtime.executables import Executables
from jaxpp_flax.engine.runtime.profile import arranged
from jaxpp_flax.messages import amount
from jaxpp_flax.planning.compilers.memory import RankBytes, rank_bytes
from jaxpp_flax.planning.compilers.tasks import CompiledTask, TaskText, compiled_task, read_task
from jaxpp_flax.planning.compilers.text import answer, rank_table, task_table
from jaxpp_flax.planning.quoting.curves import Curves
from jaxpp_flax.planning.quoting.devices import Device, device_of_kind

__all__ = ["CompilerReport", "compiler_report"]


@dataclass(frozen=True, kw_only=True)
class CompilerReport:
    """What the compiler says of a step; printed, it is two tables and the answer.

    Attributes:
      device: the name of the devices, `device.device_kind`.
      layout: the axes of the mesh with their sizes, the axis of the ranks first.
      memory: the bytes of a device's memory; None if they are not known.
      ranks: the bytes of each rank at the moment at which it holds most.
      tasks: each distinct program.
      seconds: the simulated time of a step, from the seconds of the compiler's cost model; None without a model.
      idle: the share of this time in which ranks wait, on average.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage, PipelineTrainer
      >>> layers = [PipelineStage(nnx.Linear(8, 8, rngs=nnx.Rngs(i))) for i in range(2)]
      >>> loss = lambda model, x: jnp.mean(model(x) ** 2)
      >>> trainer = PipelineTrainer(nnx.Sequential(*layers), optax.adam(0.1), loss, num_stages=2, num_microbatches=4,
      ...                           mesh={}, logging=False)
      >>> report = compiler_report(trainer.compile(jax.ShapeDtypeStruct((8, 8), jnp.float32)), memory=1e6)
      >>> report.fits, [rank.kinds["parameters"] for rank in report.ranks]
      (True, [288, 288])
    """

    device: str
    layout: Mapping[str, int]
    memory: float | None
    ranks: tuple[RankBytes, ...]
    tasks: tuple[CompiledTask, ...]
    seconds: float | None = None
    idle: float | None = None

    @property
    def fullest(self) -> RankBytes:
        """The rank that holds most."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def excess(self) -> float | None:
        """The bytes by which the fullest rank exceeds a device's memory; at most 0 if it fits, None if not known."""
        return None if self.memory is None else self.fullest.total - self.memory

    @property
    def fits(self) -> bool | None:
        """Whether every rank fits into its devices; None if their memory is not known."""
        return None if self.excess is None else self.excess <= 0

    @property
    def compile_seconds(self) -> float:
        """How long XLA took for all distinct tasks, one after the other."""
        return sum(task.compile_seconds or 0.0 for task in self.tasks)

    def __str__(self) -> str:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.layout.items() if size > 1)
        step = ""
        if self.seconds is not None and self.idle is not None:
            taken = amount(self.seconds, "s")
            step = f"A step takes {taken} by the compiler's seconds; ranks wait {self.idle:.0%} of it. "
        tail = f"{step}Compiled in {amount(self.compile_seconds, 's')}: {len(self.tasks)} distinct programs."
        return "\n".join([
            f"{math.prod(self.layout.values())} x {self.device}: {axes}", "", *rank_table(self.ranks), "",
            *task_table(self.tasks), "", tail, answer(self.ranks, self.memory, self.device),
        ])  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as JSON, with its answers; return the path."""
        target = Path(path)
        answers = {"fits": self.fits, "excess": self.excess, "compile_seconds": self.compile_seconds}
        target.write_text(json.dumps({**answers, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        return target


def compiler_report(
    compiled: CompiledPipeline,
    *,
    memory: float | None = None,
    device: Device | None = None,
    curves: Curves | None = None,
) -> CompilerReport:
    """Report what the compiler says of a step, for devices that are attached or only described.

    Args:
      compiled: what `trainer.compile(batch)` returns, or `mpmd_jit_with_loop(...).compile(...)`.
      memory: the bytes of a device's memory. None: those of `device`.
      device: a row of the table of devices. None: the one whose name JAX gives the mesh's devices, if there is one.
      curves: the share of a link's speed that transfers between ranks reach.

    Raises:
      TypeError: for a step without ranks: one stage on one device runs under `jax.jit`.
    """
    if not isinstance(compiled, CompiledPipeline):
        raise TypeError(
            f"compiler_report needs the compiled step of a pipeline, got {type(compiled).__name__}. One stage on one "
            "device is compiled by `jax.jit`: call `memory_analysis()` of what it returns, or give a mesh."
        )
    mesh, program = compiled.mpmd_mesh, compiled.program
    kind = mesh.rank_devices(0)[0].device_kind
    row = device_of_kind(kind) if device is None else device
    texts, groups = _texts(compiled)
    inside = dict.fromkeys(range(len(program.tasks)), 0.0)
    code, tasks = [0] * program.num_ranks, list[CompiledTask]()
    runs = defaultdict[int, int](int)
    for run in program.instructions:
        if isinstance(run, Run):
            runs[run.task] += 1
    for numbers, compile_seconds in groups:
        of = compiled_task(
            texts[numbers[0]], [program.tasks[n] for n in numbers], sum(runs[n] for n in numbers),
            mesh.unstack[0].shape, compile_seconds,
        )  # fmt: skip
        tasks.append(of)
        inside.update(dict.fromkeys(numbers, float(of.running_bytes)))
        for rank in of.ranks:
            code[rank] += of.code_bytes
    every = [texts.get(number) for number in range(len(program.tasks))]
    ranks = rank_bytes(
        compiled.executables, every, list(inside.values()), code, compiled.argument_paths, compiled.result_paths
    )
    seconds, idle = _simulated(compiled.executables, every, row, curves or Curves())
    return CompilerReport(
        device=kind,
        layout=dict(mesh.jax_mesh.shape),
        memory=memory if memory is not None or row is None else row.memory,
        ranks=ranks,
        tasks=tuple(tasks),
        seconds=seconds,
        idle=idle,
    )


def _texts(compiled: CompiledPipeline) -> tuple[dict[int, TaskText], list[tuple[list[int], float | None]]]:
    """Read each distinct executable once; return it by task, and the tasks that share one with its seconds."""
    originals = dict[int, Any]()
    groups = defaultdict[int, list[int]](list)
    for number, executable in enumerate(compiled.executables.tasks):
        if executable is not None:
            original = compiled.compiler.original_of(executable)
            key = id(executable if original is None else original)
            originals[key] = original, executable
            groups[key].append(number)
    read = {key: read_task(executable) for key, (_, executable) in originals.items()}
    texts = {number: read[key] for key, numbers in groups.items() for number in numbers}
    seconds = {key: None if original is None else original.seconds for key, (original, _) in originals.items()}
    return texts, [(numbers, seconds[key]) for key, numbers in groups.items()]


def _simulated(
    executables: Executables, texts: list[TaskText | None], device: Device | None, curves: Curves
) -> tuple[float | None, float | None]:
    """Return the time of a step and the share of it in which ranks wait, by the seconds of its tasks."""
    program = executables.program
    known = [None if of is None else of.seconds for of in texts]
    if any(seconds is None for seconds in known):
        return None, None
    seconds = dict[int, float]()
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            seconds[number] = known[instruction.task] or 0.0
        elif isinstance(instruction, Transfer) and device is not None:
            seconds[number] = _transfer_seconds(executables, instruction, device, curves)
    times = arranged(program, seconds)
    whole = max((end for _, end in times.values()), default=0.0)
    return whole, _idle(program, seconds, whole)


def _transfer_seconds(executables: Executables, transfer: Transfer, device: Device, curves: Curves) -> float:
    nbytes = sum(executables.nbytes[value] for value in transfer.received)
    if transfer.memory is not None:
        return nbytes / device.host_bandwidth
    return curves.hop + nbytes / (curves.inside * device.inside)


def _idle(program: Program, seconds: Mapping[int, float], whole: float) -> float:
    busy = sum(seconds[n] for n, instruction in enumerate(program.instructions) if isinstance(instruction, Run))
    return 1.0 - busy / (whole * program.num_ranks) if whole else 0.0
