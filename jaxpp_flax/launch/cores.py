"""A share of this machine's cores for each process that it runs.

XLA's CPU client starts as many threads as it may use cores. If every process may use all cores, the threads of several
processes compete: measured on two cores, two processes lost an eighth of their speed by that alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence

__all__ = ["running_on", "share_of_cores", "usable_cores"]


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use, in order; empty where the system does not say (macOS).

    >>> len(usable_cores()) <= os.cpu_count()
    True
    """
    get = getattr(os, "sched_getaffinity", None)
    return () if get is None else tuple(sorted(get(0)))


def share_of_cores(cores: Sequence[int], process: int, num_processes: int) -> tuple[int, ...]:
    """The cores of one process: neighbours, which usually share a cache and memory.

    Args:
      cores: all of them, in order.
      process: its index.
      num_processes: how many share the cores.

    Returns:
      Its cores; all of them where there are fewer than processes.

    >>> [share_of_cores(range(5), process, 2) for process in (0, 1)]
    [(0, 1), (2, 3, 4)]
    >>> share_of_cores(range(2), 0, 3)
    (0, 1)
    """
    if len(cores) < num_processes:
        return tuple(cores)
    first, last = (len(cores) * i // num_processes for i in (process, process + 1))
    return tuple(cores[first:last])


@contextlib.contextmanager
def running_on(cores: Sequence[int]) -> Generator[None]:
    """Bind this thread, and the processes that it starts inside, to some cores; if `cores` is empty, do nothing."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
