"""Carries: choose the task that writes each leaf of the carry for the next microbatch."""

from __future__ import annotations

from jaxpp_flax.engine.passes.loop.loop_tasks import UNNUMBERED, Carry
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.ir import Graph, Value, values
from jaxpp_flax.error_codes import documented

__all__ = ["CarryError", "write_carries"]


@documented("JPF602")
class CarryError(ValueError):
    """A leaf of the carry flows against the pipeline."""


def write_carries(drafts: TaskDrafts) -> list[Carry]:
    """Let a task write each leaf of the carry; every stage that reads a counter keeps its own copy."""
    body, counters = drafts.labels.body, drafts.labels.counters
    found: list[Carry] = []

    def write(leaf: int, key: Key) -> None:
        result = drafts.add(key, Graph((), (body.next_carry[leaf],), ()))
        found.append(Carry(leaf, UNNUMBERED, body.carry[leaf], result))

    for leaf, atom in enumerate(body.next_carry):
        if leaf not in counters:
            write(leaf, drafts.home(atom))
    readers = _readers(drafts)
    for carry in found:
        _check_carry(drafts, carry.leaf, drafts.returns[carry.result], readers[carry.leaf])
    for leaf in sorted(counters):
        first = {drafts.stage_of(key): key for key in sorted(readers[leaf], reverse=True)}
        for key in first.values():
            write(leaf, key)
    return found


def _readers(drafts: TaskDrafts) -> list[set[Key]]:
    """Return the tasks that read each leaf of the carry, themselves or to compute the next value of a counter."""
    body, counters = drafts.labels.body, drafts.labels.counters
    behind: dict[Value, set[int]] = {state: {leaf} for leaf, state in enumerate(body.carry)}
    for equation in body.equations:
        if equation in drafts.labels.free:
            read = set[int]().union(*(behind.get(v, ()) for v in values(equation.inputs)))
            behind.update(dict.fromkeys(equation.outputs, read))
    readers: list[set[Key]] = [set() for _ in body.carry]
    for key, equations in drafts.by_task().items():
        for value in {v for e in equations for v in values(e.inputs)}:
            for leaf in behind.get(value, ()):
                readers[leaf].add(key)

    def spread() -> None:
        """Let the tasks of a counter read what its next value depends on: other counters, and what these depend on."""
        for _ in counters:
            for leaf in counters:
                for other in behind.get(body.next_carry[leaf], ()):  # type: ignore[arg-type]
                    readers[other] |= readers[leaf]

    spread()
    for leaf in counters:
        readers[leaf] = readers[leaf] or {(0, 0)}
    spread()
    return readers


def _check_carry(drafts: TaskDrafts, leaf: int, writer: Key, readers: set[Key]) -> None:
    early = sorted(key for key in readers if key < writer)
    if not early:
        return
    body = drafts.labels.body
    where = next((e.where for e in body.equations if body.carry[leaf] in e.inputs), "an unknown line")
    aval = body.carry[leaf].aval
    remedy = "Read and write a mutable variable in one stage and one direction."
    if writer[0] < drafts.stages:
        remedy += " Modules that several stages share (a BatchNorm, say) need variables of their own in each."
    raise CarryError(
        f"the loop's carry{body.carry_names[leaf]} ({aval.str_short()}, first read at {where}) is read in "
        f"{_describe(drafts, early[0])} and written later, in {_describe(drafts, writer)}: the next microbatch would "
        f"have to wait for the whole pipeline. {remedy}"
    )


def _describe(drafts: TaskDrafts, key: Key) -> str:
    return f"the {'forward' if key[0] < drafts.stages else 'backward'} of stage {drafts.stage_of(key)}"
