"""Find the values that a transfer need not copy if both ranks are the same devices.

Users put several stages on one device to try out a pipeline on one GPU, or to compare a step with plain `jax.jit`. A
copy inside a device wastes memory and time. But a transfer may pass on the array itself only if no reader gives its
buffer away while another one still reads it.
"""

from __future__ import annotations

from jaxpp_flax.engine.program.program import Free, Program, Run, Transfer

__all__ = ["handed_over"]


def handed_over(program: Program) -> dict[int, frozenset[int]]:
    """Return the positions of each transfer whose array the target may take uncopied, by number of the instruction.

    There are two cases. Either the source forgets the value at once: the value moves. Or the source keeps the value (it
    never donates a value that it has sent), and the target neither donates nor returns it. The caller's arguments never
    move. Donated arguments are not shared either, because they are deleted at their last use on the source. A copy
    between the memories of one rank is always made.
    """
    deleted = {value for i in program.instructions if isinstance(i, Free) for value in i.delete}
    borrowed = set(program.preset)  # values in the caller's arrays, in the runtime's, or in arrays with other readers
    found: dict[int, frozenset[int]] = {}
    for number, instruction in enumerate(program.instructions):
        if isinstance(instruction, Run):
            borrowed.update(_passed_on(program, instruction, borrowed))
        if not isinstance(instruction, Transfer):
            continue
        fit: set[int] = set()
        moved = instruction.sent if instruction.memory is None else ()
        for position, value in enumerate(moved):
            received = instruction.received[position]
            is_last = program.readers[value][-1] == number and value not in program.returned
            moves = is_last and value not in borrowed and instruction.sent.count(value) == 1
            given_away = received in program.donated or received in program.returned
            shares = not given_away and not (value in borrowed and value in deleted)
            if moves or shares:
                fit.add(position)
            if shares and not moves:
                borrowed.add(received)
            borrowed.add(value)  # two readers from here on, or one in another process
        found[number] = frozenset(fit)
    return found


def _passed_on(program: Program, run: Run, borrowed: set[int]) -> set[int]:
    """Return the values that are unchanged arguments of the task: jit may return the same array."""
    graph = program.tasks[run.task].graph
    position = {edge: p for p, edge in enumerate(graph.inputs)}
    return {
        value
        for value, atom in zip(run.outputs, graph.outputs, strict=True)
        if (p := position.get(atom)) is not None and run.inputs[p] in borrowed  # type: ignore[call-overload]
    }
