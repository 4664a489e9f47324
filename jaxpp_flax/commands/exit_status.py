"""How the commands of this package end: one rule.

0: done, or yes. 1: the answer is no (two runs differ, nothing fits). 2: an argument, a file, or what a file's function
returns is wrong, or the user's code failed. A user's error is one line on stderr; an error inside the user's own file
is shown with its lines, from that file on. An error of this package that the file's code leads to, one with a code, is
shown with the line of that file.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType

from jaxpp_flax.error_codes import code_of

__all__ = ["NO", "WRONG", "exit_status", "run"]

NO, WRONG = 1, 2


def run(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, answer_no: tuple[type[Exception], ...] = ()
) -> int:
    """Parse the arguments and run their command; `exit_status` says how it ends."""
    options = parser.parse_args(arguments)
    script = str(getattr(options, "factory", "")).rpartition(":")[0] or None
    return exit_status(lambda: options.run(options), script=script, answer_no=answer_no)


def exit_status(
    command: Callable[[], int],
    *,
    script: str | None = None,
    answer_no: tuple[type[Exception], ...] = (),
    raised: type[Exception] | tuple[()] = (),
) -> int:
    """Run a command; print its error, if it fails, and return the exit status.

    Args:
      command: returns the status.
      script: the user's file whose code the command runs.
      answer_no: the errors that are the answer no.
      raised: the errors that the caller handles, such as those that end with a line about the command's usage.

    Example:
      >>> exit_status(lambda: 0)
      0
      >>> def command():
      ...     raise FileNotFoundError("no such file: train.py")
      >>> exit_status(command), exit_status(command, answer_no=(FileNotFoundError,))
      (2, 1)
    """
    try:
        return command()
    except raised:
        raise
    except answer_no as error:
        print(f"error: {error}", file=sys.stderr)
        return NO
    except SystemExit as end:
        if script is None or _from(script, end.__traceback__) is None:
            raise
        print(f"error: {script} ended by itself, with the exit status {end.code}.", file=sys.stderr)
    except Exception as error:
        _show(error, script)
    return WRONG


def _show(error: Exception, script: str | None) -> None:
    """Print an error: in one line; with it, the lines of the user's file that led to it."""
    if script is not None and code_of(type(error)) and (at := _last_line(script, error)):
        print(f"error: {error}", f"  at {at}", *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        return
    cause: BaseException | None = error
    while script is not None and cause is not None:
        if (lines := _from(script, cause.__traceback__)) is not None:
            shown = traceback.TracebackException(type(cause), cause, lines)
            print(*shown.format(chain=False), sep="", end="", file=sys.stderr)
            if cause is error:
                return
            break
        cause = cause.__cause__
    if isinstance(error, (ValueError, OSError, TypeError, RuntimeError, ModuleNotFoundError)):
        print(f"error: {_in_words(error)}", file=sys.stderr)
    else:  # no error of the user's
        traceback.print_exception(error)


def _in_words(error: Exception) -> str:
    """Return the text of an error, without the number that the system gives to a file that cannot be opened."""
    if not isinstance(error, OSError) or error.filename is None or error.strerror is None:
        return str(error)
    name = os.fsdecode(error.filename) if isinstance(error.filename, (bytes, str)) else error.filename
    if isinstance(error, FileNotFoundError):
        return f"there is no file {name!r}."
    return f"{name!r}: {error.strerror[:1].lower()}{error.strerror[1:]}."


def _last_line(script: str, error: Exception) -> str:
    """Return the last line of the user's file that led to an error; "" if none did."""
    path, at = os.path.realpath(script), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        if os.path.realpath(frame.f_code.co_filename) == path:
            at = f"{script}, line {line}, in {frame.f_code.co_name}"
    return at


def _from(script: str, lines: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in a file; None if it does not come there."""
    path = os.path.realpath(script)
    while lines is not None and os.path.realpath(lines.tb_frame.f_code.co_filename) != path:
        lines = lines.tb_next
    return lines
