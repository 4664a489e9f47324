"""Kills the processes that a launcher leaves behind when it is killed. Run as a file: imports nothing of this package.

Lines on the standard input add a process group, "+ID", or remove it, "-ID". At the end of the input the launcher has
died, and the guard kills the groups that are left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def surviving_groups(lines: Iterable[str]) -> set[int]:
    """The process groups that were added and not removed.

    >>> surviving_groups(["+12", "+15", "-12"])
    {15}
    """
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def main() -> None:
    """Wait for the end of the launcher, and kill the groups that it left."""
    for group in surviving_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
