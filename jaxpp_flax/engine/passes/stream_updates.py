"""Divide work that fetches arrays from host memory, so that a rank never has all of them on its devices at once.

An optimizer whose state lies on the host moves each leaf to the devices, updates it and moves it back. One program for
all of that may fetch every leaf before the first one leaves. So `unroll` makes several programs of it, one after
another: each fetches the arrays of one leaf, or of several up to the window's bytes. XLA optimizes each alone, so a
last bit may differ from that of one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpp_flax.engine.analyses.data_flow import Groups, delayed
from jaxpp_flax.engine.tracing.ir import Equation, Value, memory_kind_of, values

__all__ = ["WINDOW_BYTES", "stream_updates"]

# Fetches stay in one program up to this number of bytes of whole arrays; a larger array is fetched alone.
WINDOW_BYTES = 64 << 20


def stream_updates(equations: Sequence[Equation]) -> list[list[Equation]]:
    """Divide the equations of a program into those of several programs that run in order."""
    fetches = {e: nbytes for e in equations if (nbytes := _fetched_bytes(e))}
    if sum(fetches.values()) <= WINDOW_BYTES:
        return [list(equations)]
    window = _windows(equations, fetches)
    times: dict[Equation, int] = {}
    time_of: dict[Value, int] = {}
    for equation in equations:
        times[equation] = max([window.get(equation, 0), *(time_of.get(v, 0) for v in values(equation.inputs))])
        time_of.update(dict.fromkeys(equation.outputs, times[equation]))
    return [program for _, program in delayed(times, fetches)]


def _fetched_bytes(equation: Equation) -> int:
    """Return the bytes that an equation moves from the host to the devices; 0 for other equations."""
    if equation.name != "device_put":
        return 0
    moves = zip(equation.inputs, equation.outputs, strict=True)
    return sum(v.nbytes for a, v in moves if memory_kind_of(a.aval) is not None and memory_kind_of(v.aval) is None)


def _windows(equations: Sequence[Equation], fetches: Mapping[Equation, int]) -> dict[Equation, int]:
    """Number the windows, and return that of each fetch.

    Arrays that meet in one array are fetched together: the moments of a leaf. A number, such as a norm over all leaves,
    holds nothing together.
    """
    groups = Groups(v for e in fetches for v in e.outputs)
    for equation in equations:
        if equation in fetches:
            groups.join(equation.outputs)
        elif any(value.aval.size > 1 for value in equation.outputs):
            groups.join_results(equation)
    members: dict[object, list[Equation]] = {}
    for equation in fetches:
        members.setdefault(groups.find(equation.outputs[0]), []).append(equation)
    window, total, window_of = 0, 0, dict[Equation, int]()
    for group in members.values():
        nbytes = sum(fetches[equation] for equation in group)
        if total and total + nbytes > WINDOW_BYTES:
            window, total = window + 1, 0
        total += nbytes
        window_of.update(dict.fromkeys(group, window))
    return window_of
