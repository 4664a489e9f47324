"""Find the values that a transfer need not copy if both ranks are the same devices.

Users put several stages on one device to try out a pipeline on one GPU, or to compare a step with plain `jax.jit`. A
copy inside a device wastes memory and time. The transfer passes on the array itself if the source has no further use
for it; so no reader gives a buffer away while another one still reads it.
"""

from __future__ import annotations

from jaxpp_flax.engine.program.program import Program, Run, Transfer

__all__ = ["handed_over"]


def handed_over(program: Program, number: int) -> frozenset[int]:
    """Return the positions of the values that a transfer may hand over uncopied; `number` is the transfer's.

    A value is handed over at its last use, unless the array may be another value's as well: one of the caller or of the
    runtime, one that the same transfer sends twice, or an input that a task returns unchanged.
    """
    transfer = program.instructions[number]
    if not isinstance(transfer, Transfer) or transfer.memory is not None:
        return frozenset()
    return frozenset(
        position
        for position, value in enumerate(transfer.sent)
        if program.readers[value][-1] == number
        and transfer.sent.count(value) == 1
        and value not in program.returned
        and _has_own_array(program, value)
    )


def _has_own_array(program: Program, value: int) -> bool:
    """Return whether a task makes the array of a value, and of no other value that may be there."""
    maker, position = program.maker(value)
    if not isinstance(maker, Run):
        return maker is not None  # a copy, or an array that its source has handed over
    graph = program.tasks[maker.task].graph
    return graph.outputs[position] not in graph.inputs and graph.outputs.count(graph.outputs[position]) == 1
