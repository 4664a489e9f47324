"""Find the values that a transfer need not copy where both ranks are the same devices.

Several stages on one device is how a pipeline is tried out on one GPU, and how a step is compared there with plain
`jax.jit`. A copy within a device costs memory and time for nothing, but to hand over the array itself is right only if
nobody gives its buffer away while somebody else still reads it.
"""

from __future__ import annotations

from jaxpp_flax.engine.program.program import Free, Program, Run, Transfer

__all__ = ["handed_over"]


def handed_over(program: Program) -> dict[int, frozenset[int]]:
    """The positions of each transfer whose array the target may take as it is, by the number of the instruction.

    Either the source forgets the value at once, so that it simply moves; or the source keeps it (it never donates what
    it has sent) and the target neither donates nor returns it. The caller's arguments never move, and those that are
    donated are not shared either, since they are deleted at their last use on the source.

    Args:
      program: from `allocate`.
    """
    results = {slot for result in program.results if isinstance(result, dict) for slot in result.values()}
    deleted = {slot for i in program.instructions if isinstance(i, Free) for slot in i.delete}
    borrowed = set(program.preset())  # slots that hold the caller's arrays, or the runtime's
    given_away = _given_away(program, results)
    found: dict[int, frozenset[int]] = {}
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        borrowed.difference_update(instruction.writes())
        if isinstance(instruction, Run):
            borrowed.update(_passed_on(program, instruction, borrowed))
            continue
        following = program.instructions[number + 1] if number + 1 < len(program.instructions) else None
        dropped = following.slots if isinstance(following, Free) and following.rank == instruction.source else ()
        fit: set[int] = set()
        for position, (slot, received) in enumerate(zip(instruction.sent, instruction.received, strict=True)):
            moves = slot in dropped and slot not in borrowed and instruction.sent.count(slot) == 1
            shares = (number, received) not in given_away and not (slot in borrowed and slot in deleted)
            if moves or shares:
                fit.add(position)
            if shares and not moves:
                borrowed.add(received)
            borrowed.add(slot)  # two readers from here on, or one in another process
        found[number] = frozenset(fit)
    return found


def _given_away(program: Program, results: set[int]) -> set[tuple[int, int]]:
    """(number of the transfer, slot) of what the target donates to a task, or returns."""
    arrived: dict[int, int] = {}
    gone: set[tuple[int, int]] = set()
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            for position in program.tasks[instruction.task].donate:
                slot = instruction.inputs[position]
                if slot in arrived:
                    gone.add((arrived[slot], slot))
        for slot in instruction.writes():
            arrived.pop(slot, None)
            if isinstance(instruction, Transfer):
                arrived[slot] = number
    return gone | {(number, slot) for slot, number in arrived.items() if slot in results}


def _passed_on(program: Program, run: Run, borrowed: set[int]) -> set[int]:
    """Slots of results that are arguments of the task as they came: jit may return the very array."""
    graph = program.tasks[run.task].graph
    position = {value: p for p, value in enumerate(graph.inputs)}
    return {
        slot
        for slot, atom in zip(run.outputs, graph.outputs, strict=True)
        if (p := position.get(atom)) is not None and run.inputs[p] in borrowed  # type: ignore[call-overload]
    }
