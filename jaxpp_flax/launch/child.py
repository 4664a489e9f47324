"""Runs a user's program as one process of a run: ``python -m jaxpp_flax.launch.child script.py args...``."""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence

from jaxpp_flax._compat_processes import cache
from jaxpp_flax.launch.process.connection import ConnectionOptions, connect_program
from jaxpp_flax.launch.process.process_end import ProgramExitError
from jaxpp_flax.launch.process.variables import applied_at_first_import
from jaxpp_flax.launch.settings import LaunchError, compilation_cache
from jaxpp_flax.processes.failures import PREEMPTED_STATUS
from jaxpp_flax.processes.waits import print_error, print_notice

__all__ = ["main", "run_program"]


def main(
    arguments: Sequence[str] | None = None,
    *,
    bind_address: str | None = None,
    failure_timeout_s: float | None = None,
) -> None:
    """Connect to the other processes, and run the program: a file, or ``-m`` and a module, with its arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # lines come in time, and whole between other processes' lines
    if (directory := compilation_cache(os.environ)) is not None:
        try:
            cache.use_directory(directory)
        except OSError as error:  # the run does not need it
            print_notice(f"compilations are not kept for the next start: {error}")
    try:
        end = connect_program(ConnectionOptions(bind_address=bind_address, failure_timeout_s=failure_timeout_s))
    except LaunchError as error:
        raise SystemExit(f"error: {error}") from None
    try:
        with applied_at_first_import():
            run_program(sys.argv[1:] if arguments is None else list(arguments))
    except SystemExit as error:
        # After SIGTERM every process saves and exits: a good end, with a status of its own.
        if end is None or error.code in (None, 0, PREEMPTED_STATUS):
            if end is not None:
                end.program_is_over(error.code if isinstance(error.code, int) else 0)
            raise
        if not isinstance(error.code, int):
            print_error(str(error.code))
        # An uncaught error tells the other processes; a SystemExit would not.
        raise ProgramExitError(error.code) from None
    if end is not None:
        end.program_is_over()


def run_program(program: Sequence[str]) -> None:
    """Run a program as Python itself would, with the usual `sys.argv`, `sys.path` and `__name__`."""
    if program[0] == "-m":
        sys.argv = list(program[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(program)
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
