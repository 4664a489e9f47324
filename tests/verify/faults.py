"""Bugs to inject into the runtime of a compiled step: in what tasks return, in accumulators, and in transfers.

A fault wraps some of the steps of the instruction loop, of the trainer's own program and of the watched one alike. It
knows the block that is the first to be wrong, and a word of its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.program.program import Program, Run, Transfer
from jaxpp_flax.schedules.task import TaskKind

Step = Callable[[list[Any]], None]
Wrap = Callable[[Program, Any, Step], Step]


@dataclass(frozen=True)
class Fault:
    """A bug: what it does to the steps of a program, and what a report must say of it."""

    name: str
    wrap: Wrap
    blocks: tuple[str, ...]
    words: tuple[str, ...]


@contextmanager
def injected(fault: Fault, *compiled: Any) -> Iterator[None]:
    """Inject a fault into compiled steps."""
    runtimes = [of.runtime for of in compiled]
    before = [runtime._steps for runtime in runtimes]
    for runtime in runtimes:
        pairs = zip(runtime.program.instructions, runtime._steps, strict=True)
        runtime._steps = [step and fault.wrap(runtime.program, i, step) for i, step in pairs]
    try:
        yield
    finally:
        for runtime, steps in zip(runtimes, before, strict=True):
            runtime._steps = steps


def edge(source: int, target: int, change: Callable[[Any, list[Any]], Any], only: int | None = None) -> Wrap:
    """A fault of the transfers inside the loop from one stage to another, each stage on the rank of its number.

    `change(array, earlier)` returns the wrong array; `earlier` are those that the transfers before have brought.
    """
    earlier: dict[int, list[list[Any]]] = {}

    def wrap(program: Program, instruction: Any, step: Step) -> Step:
        if not isinstance(instruction, Transfer) or (instruction.source, instruction.target) != (source, target):
            return step
        maker, _ = program.origin(instruction.sent[0])
        if maker is None or maker.microbatch < 0 or only not in (None, maker.microbatch):
            return step

        def wrong(environment: list[Any]) -> None:
            step(environment)
            seen = earlier.setdefault(id(program), [])
            arrays = [environment[value] for value in instruction.received]
            for i, (value, array) in enumerate(zip(instruction.received, arrays, strict=True)):
                if jnp.issubdtype(array.dtype, jnp.floating) and array.ndim:
                    changed = change(array, [of[i] for of in seen if len(of) > i])
                    environment[value] = jax.device_put(jnp.asarray(changed, array.dtype), array.sharding)
            seen.append([np.array(array) for array in arrays])

        return wrong

    return wrap


def sums(stage: int, change: Callable[[Any, Any, int], Any], only: Callable[[Any], bool] = lambda array: True) -> Wrap:
    """A fault of the accumulators of a stage: `change(before, after, microbatch)` returns the wrong sum."""

    def wrap(program: Program, instruction: Any, step: Step) -> Step:
        if not isinstance(instruction, Run) or instruction.microbatch < 0:
            return step
        task = program.tasks[instruction.task]
        if task.stage != stage or not task.pins:
            return step

        def wrong(environment: list[Any]) -> None:
            before = [environment[instruction.inputs[i]].copy() for _, i in task.pins]
            step(environment)
            for (o, _), old in zip(task.pins, before, strict=True):
                value = instruction.outputs[o]
                new = environment[value]
                is_loss = new.size <= len(new.sharding.device_set)  # a number, or one for each shard of the batch
                if is_loss or new.shape[0] == MICROBATCHES or not only(new):
                    continue  # the loss, and what is stacked to be watched
                changed = change(old, new, instruction.microbatch)
                environment[value] = jax.device_put(jnp.asarray(changed, new.dtype), new.sharding)

        return wrong

    return wrap


def stale(stage: int, microbatch: int) -> Wrap:
    """The backward of one microbatch reads what the forward of the one before has kept."""
    kept: dict[tuple[int, int], Any] = {}

    def wrap(program: Program, instruction: Any, step: Step) -> Step:
        if not isinstance(instruction, Run) or program.tasks[instruction.task].stage != stage:
            return step
        if program.tasks[instruction.task].kind is TaskKind.FORWARD:

            def keep(environment: list[Any]) -> None:
                step(environment)
                for i, value in enumerate(instruction.outputs):
                    if instruction.microbatch == microbatch - 1:
                        kept[id(program), i] = np.array(environment[value])

            return keep
        if instruction.microbatch != microbatch:
            return step

        def read(environment: list[Any]) -> None:
            for value in instruction.inputs:
                maker, i = program.origin(value)
                own = maker is not None and maker.rank == instruction.rank and maker.microbatch == microbatch
                if own and jnp.issubdtype(environment[value].dtype, jnp.floating):
                    environment[value] = jax.device_put(kept[id(program), i], environment[value].sharding)
            step(environment)

        return read

    return wrap


def wrong_index(stage: int, kinds: tuple[TaskKind, ...]) -> Wrap:
    """Tasks of a stage take the index of another microbatch: another key, or other examples."""

    def wrap(program: Program, instruction: Any, step: Step) -> Step:
        if not isinstance(instruction, Run) or program.tasks[instruction.task].stage != stage:
            return step
        if program.tasks[instruction.task].kind not in kinds:
            return step
        indices = {value: microbatch for (_, microbatch), value in program.indices.items()}

        def wrong(environment: list[Any]) -> None:
            places = [value for value in instruction.inputs if value in indices]
            right = {value: environment[value] for value in places}
            for value in places:
                other = (indices[value] + 1) % MICROBATCHES
                environment[value] = jax.device_put(jnp.int32(other), right[value].sharding)
            step(environment)
            for value, index in right.items():
                environment[value] = index

        return wrong

    return wrap


def updates(rank: int, change: Callable[[Any, Any], Any]) -> Wrap:
    """A fault of what tasks behind the loop return for a parameter: `change(before, after)`."""

    def wrap(program: Program, instruction: Any, step: Step) -> Step:
        if not isinstance(instruction, Run) or instruction.microbatch >= 0 or instruction.rank != rank:
            return step

        def wrong(environment: list[Any]) -> None:
            there = [np.array(environment[v]) for v in instruction.inputs if v in program.preset]
            step(environment)
            for value in instruction.outputs:
                new = environment[value]
                old = [x for x in there if x.shape == new.shape and x.dtype == new.dtype]
                if value in program.returned and new.ndim and old:
                    changed = change(min(old, key=lambda x: float(np.abs(x - new).max())), np.array(new))
                    environment[value] = jax.device_put(jnp.asarray(changed, new.dtype), new.sharding)

        return wrong

    return wrap


MICROBATCHES, STAGES = 4, 3
_EDGES: dict[str, tuple[Callable[[Any, list[Any]], Any], tuple[str, ...]]] = {
    "cast to bfloat16": (lambda x, _: x.astype(jnp.bfloat16), ("cast",)),
    "cast to float16": (lambda x, _: x.astype(jnp.float16), ("cast",)),
    "scaled by microbatches": (lambda x, _: x * MICROBATCHES, ("scale by the number",)),
    "doubled": (lambda x, _: x * 2, ("doubled",)),
    "zeros": (lambda x, _: x * 0, ("zeros",)),
    "the array before": (lambda x, earlier: earlier[-1] if earlier else x, ("swapped", "stale")),
    "rows at other places": (lambda x, _: x[::-1], ("shards swapped",)),
}
_SUMS: dict[str, tuple[Callable[[Any, Any, int], Any], str]] = {
    "drops the first microbatch": (lambda old, new, m: old if m == 0 else new, "dropped"),
    "drops the last microbatch": (lambda old, new, m: old if m == MICROBATCHES - 1 else new, "dropped"),
    "keeps the last microbatch alone": (lambda old, new, m: new - old, "dropped"),
    "counts one microbatch twice": (lambda old, new, m: 2 * new - old if m == 1 else new, "doubled microbatch"),
    "counts all twice": (lambda old, new, m: 2 * new - old, "doubled"),
    "scales by the microbatches": (
        lambda old, new, m: old + MICROBATCHES * (new - old), "scale by the number"),
    "divides by the microbatches": (
        lambda old, new, m: old + (new - old) / MICROBATCHES, "scale by 1"),
    "sums in bfloat16": (lambda old, new, m: new.astype(jnp.bfloat16), "cast"),
    "loses the sign": (lambda old, new, m: old - (new - old), "wrong sign"),
}  # fmt: skip
_UPDATES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "is forgotten": (lambda old, new: old, "missing update"),
    "is done twice": (lambda old, new: new + (new - old), "doubled"),
    "is scaled by the microbatches": (lambda old, new: old + MICROBATCHES * (new - old), "scale by the number"),
    "is divided by the microbatches": (lambda old, new: old + (new - old) / MICROBATCHES, "scale by 1"),
    "is cast to bfloat16": (lambda old, new: new.astype(jnp.bfloat16), "cast"),
}


def of_stage(stage: int) -> tuple[str, ...]:
    """The blocks of a stage; the head stands behind the last one."""
    return (f"block_{stage}", *(("after_block_2",) if stage == STAGES - 1 else ()))


def all_faults() -> list[Fault]:
    """All faults, for a model of three blocks on three stages, each on its rank."""
    found: list[Fault] = []
    for source, target in ((0, 1), (1, 2), (2, 1), (1, 0)):
        for name, (change, words) in _EDGES.items():
            blocks = of_stage(target)
            found.append(Fault(f"{source} sends {target} {name}", edge(source, target, change), blocks, words))
    for stage in range(STAGES):
        for name, (of_sum, word) in _SUMS.items():
            found.append(Fault(f"stage {stage} {name}", sums(stage, of_sum), of_stage(stage), (word,)))
        for name, (of_update, word) in _UPDATES.items():
            found.append(Fault(f"update of {stage} {name}", updates(stage, of_update), of_stage(stage), (word,)))
    for stage in (0, 1):
        for microbatch in (1, MICROBATCHES - 1):
            name = f"stage {stage} has a stale residual for microbatch {microbatch}"
            found.append(Fault(name, stale(stage, microbatch), of_stage(stage), ("stale", "swapped")))
    found.append(Fault("stage 0 takes other examples", wrong_index(0, (TaskKind.FORWARD,)), of_stage(0), ("swapped",)))
    for source, target in ((0, 1), (1, 2)):
        wrap = edge(source, target, lambda x, _: x * 0, only=2)
        found.append(Fault(f"{source} loses microbatch 2 to {target}", wrap, of_stage(target), ("stale", "zeros")))
    return found
