"""Carries: choose the task that writes each leaf of the carry for the next microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jaxpp_flax.engine.passes.loop.loop_tasks import Carry
from jaxpp_flax.engine.passes.loop.task_drafts import Key, TaskDrafts
from jaxpp_flax.engine.tracing.ir import Atom, values
from jaxpp_flax.error_codes import documented

__all__ = ["CarryError", "write_carries"]


@documented("JPF602")
class CarryError(ValueError):
    """A leaf of the carry flows against the pipeline."""


def write_carries(drafts: TaskDrafts) -> list[tuple[Key, Callable[..., Carry]]]:
    """Choose the task that writes each leaf of the carry; every stage that reads a counter keeps its own copy.

    Return each task with a function that makes its `Carry`, once the task has a number.
    """
    body, counters = drafts.body, sorted(drafts.labels.counters)
    following = [drafts.labels.resolve(atom) for atom in body.next_carry]
    readers: list[set[Key]] = [set() for _ in body.carry]
    found: list[tuple[Key, Callable[..., Carry]]] = []

    def note(key: Key, wanted: Sequence[Atom]) -> None:
        read = drafts.free_closure(values(wanted))[1]
        for leaf, state in enumerate(body.carry):
            if state in read:
                readers[leaf].add(key)

    def write(leaf: int, key: Key) -> None:
        result = drafts.return_copy(key, following[leaf])
        found.append((key, partial(Carry, leaf=leaf, state=body.carry[leaf], result=result)))

    for key, wanted in list(drafts.wanted.items()):
        note(key, wanted)
    for leaf, atom in enumerate(following):
        if leaf not in drafts.labels.counters:
            key = drafts.home(atom)
            _check_carry(drafts, leaf, key, readers[leaf])
            write(leaf, key)
            note(key, [atom])
    # A counter may depend on another one: repeat until no stage needs a further copy.
    owners: dict[int, dict[int, Key]] = {leaf: {} for leaf in drafts.labels.counters}
    changed = True
    while changed:
        changed = False
        for leaf in counters:
            for key in sorted(readers[leaf]) or ([] if owners[leaf] else [(0, 0)]):
                stage = drafts.stage_of(key)
                if stage not in owners[leaf]:
                    owners[leaf][stage] = key
                    note(key, [following[leaf]])
                    changed = True
    for leaf, stages in owners.items():
        for key in stages.values():
            write(leaf, key)
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
