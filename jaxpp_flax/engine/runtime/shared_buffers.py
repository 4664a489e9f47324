"""Find the values that a transfer need not copy if both ranks are the same devices.

Users put several stages on one device to try out a pipeline on one GPU, or to compare a step with plain `jax.jit`. A
copy inside a device wastes memory and time. But a transfer may pass on the array itself only if no reader gives its
buffer away while another one still reads it.
"""

from __future__ import annotations

from jaxpp_flax.engine.program.program import Free, Program, Run, Transfer, Wait

__all__ = ["handed_over"]


def handed_over(program: Program) -> dict[int, frozenset[int]]:
    """Return the positions of each transfer whose array the target may take uncopied, by number of the instruction.

    There are two cases. Either the source forgets the value at once: the value moves. Or the source keeps the value (it
    never donates a value that it has sent), and the target neither donates nor returns it. The caller's arguments never
    move. Donated arguments are not shared either, because they are deleted at their last use on the source. A copy
    between the memories of one rank is always made.
    """
    results = {slot for result in program.results if isinstance(result, dict) for slot in result.values()}
    deleted = {slot for i in program.instructions if isinstance(i, Free) for slot in i.delete}
    borrowed = set(program.preset())  # slots that hold the caller's arrays, or the runtime's
    given_away = _given_away(program, results)
    found: dict[int, frozenset[int]] = {}
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free | Wait):
            continue
        borrowed.difference_update(instruction.writes())
        if isinstance(instruction, Run):
            borrowed.update(_passed_on(program, instruction, borrowed))
            continue
        if instruction.memory is not None:
            found[number] = frozenset()
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
    """Return (number of the transfer, slot) for values that the target donates to a task, or returns."""
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
    """Return the slots of results that are unchanged arguments of the task: jit may return the same array."""
    graph = program.tasks[run.task].graph
    position = {value: p for p, value in enumerate(graph.inputs)}
    return {
        slot
        for slot, atom in zip(run.outputs, graph.outputs, strict=True)
        if (p := position.get(atom)) is not None and run.inputs[p] in borrowed  # type: ignore[call-overload]
    }
