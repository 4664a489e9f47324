"""Kills what a launcher leaves behind if it dies without cleaning up. Run as a file: imports nothing of ours.

Lines on the standard input, "+ID" and "-ID", say which process groups there are. At its end the launcher is gone, and
so are, then, all groups that are left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def surviving_groups(lines: Iterable[str]) -> set[int]:
    """The process groups that were begun and not ended.

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
    """Wait for the end of the launcher, and kill what it left."""
    for group in surviving_groups(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
