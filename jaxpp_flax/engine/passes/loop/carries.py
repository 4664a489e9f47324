"""Carries: choose the task that writes each leaf of the carry for the next microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.ir import Value

__all__ = ["CarryError", "DraftCarry", "write_carries"]


class CarryError(ValueError):
    """A leaf of the carry flows against the pipeline."""


class DraftCarry(NamedTuple):
    """A `Carry` whose task has no number yet."""

    leaf: int
    key: Key
    state: Value
    result: Value


def write_carries(drafts: TaskDrafts) -> list[DraftCarry]:
    """Choose the task that writes each leaf of the carry; every stage that reads a counter keeps its own copy."""
    found: list[DraftCarry] = []
    pending = set(range(len(drafts.body.carry)))
    readers: dict[int, set[Key]] = {j: set() for j in pending}

    def note(key: Key, values: Sequence[Value]) -> None:
        read = drafts.free_closure(values)[1]
        for j in range(len(drafts.body.carry)):
            if drafts.body.carry[j] in read:
                readers[j].add(key)

    for key, wanted in list(drafts.wanted.items()):
        note(key, wanted)
    for j in sorted(pending):
        if j not in drafts.labels.counters:
            atom = drafts.labels.resolve(drafts.body.next_carry[j])
            key = drafts.home(atom)
            _check_carry(drafts, j, key, readers[j])
            result = drafts.copy(key, atom)
            drafts.returns.setdefault(key, []).append(result)
            note(key, [atom] if isinstance(atom, Value) else [])
            found.append(DraftCarry(j, key, drafts.body.carry[j], result))
    # A counter may depend on another one: repeat until no stage needs a further copy.
    owners: dict[int, dict[int, Key]] = {j: {} for j in drafts.labels.counters}
    changed = True
    while changed:
        changed = False
        for j in sorted(drafts.labels.counters):
            wanted_by = sorted(readers[j]) or ([(0, 0)] if not owners[j] else [])
            for key in wanted_by:
                stage = drafts.stage_of(key)
                if stage not in owners[j]:
                    owners[j][stage] = key
                    out = drafts.labels.resolve(drafts.body.next_carry[j])
                    note(key, [out] if isinstance(out, Value) else [])
                    changed = True
    for j, stages in owners.items():
        for key in stages.values():
            atom = drafts.labels.resolve(drafts.body.next_carry[j])
            result = drafts.copy(key, atom)
            drafts.returns.setdefault(key, []).append(result)
            found.append(DraftCarry(j, key, drafts.body.carry[j], result))
    return found


def _check_carry(drafts: TaskDrafts, leaf: int, writer: Key, readers: set[Key]) -> None:
    early = sorted(key for key in readers if key < writer)
    if not early:
        return
    where = next((e.where for e in drafts.body.equations if drafts.body.carry[leaf] in e.inputs), "an unknown line")
    aval = drafts.body.carry[leaf].aval
    remedy = "Read and write a mutable variable in one stage and one direction."
    if writer[0] < drafts.stages:
        remedy += " Modules that several stages share (a BatchNorm, say) need variables of their own in each."
    raise CarryError(
        f"the loop's carry{drafts.body.carry_names[leaf]} ({aval.str_short()}, first read at {where}) is read in "
        f"{_describe(drafts, early[0])} and written later, in {_describe(drafts, writer)}: the next microbatch would "
        f"have to wait for the whole pipeline. {remedy}"
    )


def _describe(drafts: TaskDrafts, key: Key) -> str:
    return f"the {'forward' if key[0] < drafts.stages else 'backward'} of stage {drafts.stage_of(key)}"
