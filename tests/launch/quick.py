"""The launcher, in forks of an interpreter that has imported all: `start_program(["-m", "tests.launch.quick", ...])`.

It is `python -m jaxpp_flax.launch`, except that its processes and the coordination service are forks too. Importing
JAX, Flax and Orbax for each of them takes several times longer than a small run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.processes.prepared import Server, Started, fork_server


class Forked(Started):
    """What the launcher uses of `subprocess.Popen`."""

    stdin: IO[bytes] | None = None
    stdout: IO[str] | None = None
    stderr: IO[str] | None = None


def popen(server: Server, command: Sequence[str], **options: Any) -> Any:
    """`subprocess.Popen` for `python -m module ...`; anything else is started as ever."""
    if list(command[:2]) != [sys.executable, "-m"]:
        return subprocess.Popen(command, **options)
    environment: Mapping[str, str] = options["env"]
    assert server.fits(environment), "this environment needs an interpreter of its own"
    ours: dict[str, int] = {}
    descriptors = {number: number for number in options.get("pass_fds", ())}
    opened: list[int] = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if options[name] == subprocess.DEVNULL:
            theirs = os.open(os.devnull, os.O_RDWR)
        else:
            reading, writing = os.pipe()
            theirs, ours[name] = (reading, writing) if name == "stdin" else (writing, reading)
        opened.append(theirs)
        descriptors[number] = theirs
    started = server.start(
        command[1:], environment, Path.cwd(), descriptors, group=True, cores=sorted(os.sched_getaffinity(0))
    )
    for descriptor in opened:
        os.close(descriptor)
    forked = Forked(started._server, started.pid)
    for name, descriptor in ours.items():
        if name == "stdin":
            forked.stdin = os.fdopen(descriptor, "wb", buffering=0)
        else:
            setattr(forked, name, os.fdopen(descriptor, errors="replace"))
    return forked


class Processes:
    """The module `subprocess`, as the launcher sees it."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self, server: Server) -> None:
        self._server = server

    def Popen(self, command: Sequence[str], **options: Any) -> Any:  # noqa: N802 its name there
        return popen(self._server, command, **options)


def main() -> int:
    processes: Any = Processes(fork_server())  # before this process has threads
    from jaxpp_flax.launch import cli, coordinator, local

    local.subprocess = coordinator.subprocess = processes
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
