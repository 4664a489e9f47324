"""The end of a process of a run: a good one, one by its own error, or one because of another process.

At JAX's shutdown, a Python program with an uncaught error would wait for the others while they wait for its arrays. So
the process prints the error, tells the others, and ends at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from jaxpp_flax._compat_texts.errors import is_of_jax, may_come_from_a_peer
from jaxpp_flax.error_codes import documented
from jaxpp_flax.messages import error_location
from jaxpp_flax.processes.failures import Failure
from jaxpp_flax.processes.group import ProcessGroup
from jaxpp_flax.processes.store import ProcessFailedError
from jaxpp_flax.processes.waits import flush_output, print_error, print_notice, reporting_thread

__all__ = [
    "INTERRUPTED_STATUS",
    "ProcessEnd",
    "ProgramExitError",
    "end_at_once",
    "listen_to_launcher",
    "type_and_message",
]

INTERRUPTED_STATUS = 128 + signal.SIGINT

EXIT_SECONDS = 600.0
"""The limit of the exit, for threads and exit handlers: twice the time that a save may take there."""

_SECONDS_IN_SILENCE = 10.0


def end_at_once(status: int) -> NoReturn:
    """Flush the output, and end the process without waiting for anything."""
    logging.shutdown()
    flush_output()
    os._exit(status)


def type_and_message(error: BaseException) -> str:
    """An error as other processes are told it: the process's own output has its traceback and its notes.

    Example:
      >>> type_and_message(ValueError("bad luck")), type_and_message(MemoryError())
      ('ValueError: bad luck', 'MemoryError')
    """
    name, message = type(error).__name__, str(error)
    return f"{name}: {message}" if message else name


@documented("JPF507")
class ProgramExitError(Exception):
    """The user's program called `sys.exit` with an error."""

    def __init__(self, code: object) -> None:
        super().__init__(f"its program ended by sys.exit({code!r})")
        self.status = (code & 0xFF or 1) if isinstance(code, int) else 1


class ProcessEnd:
    """The end of this process; to be installed once.

    Args:
      group, failure_timeout: all processes of the run, and the seconds within which a failure has ended them.
      leave: disconnects this process after a good end.
      control_fd: the connection to the launcher, which hears of a good end; None if there is no launcher.
    """

    def __init__(
        self, group: ProcessGroup, failure_timeout: float, leave: Callable[[], None], control_fd: int | None = None
    ) -> None:
        self.group, self._timeout, self._leave, self._control = group, failure_timeout, leave, control_fd
        self._exit_finished = threading.Event()
        self._status = 0
        self._before = sys.excepthook
        self._done = False

    def install(self) -> None:
        """Handle uncaught exceptions, and the end of the program."""
        sys.excepthook = self._uncaught
        # Runs before JAX's own handler, which was registered earlier.
        atexit.register(self.finish)

    def program_is_over(self, status: int = 0) -> None:
        """The program has come to a good end with this exit status; Python waits for its threads and exit handlers."""
        self._status = status
        threading.Thread(target=self._watch_exit, name="jaxpp_flax exit", daemon=True).start()

    def _watch_exit(self) -> None:
        """End the process if its exit takes too long: then all other processes would wait for this one."""
        begun = time.monotonic()
        if self._exit_finished.wait(_SECONDS_IN_SILENCE):
            return
        text = f"the program of process {self.group.process_index} is over, but {_what_holds_the_exit()}"
        print_notice(f"{text}. The other processes wait for it; after {EXIT_SECONDS:g} s it ends.")
        if not self._exit_finished.wait(EXIT_SECONDS - (time.monotonic() - begun)):
            why = f"{text}, for {EXIT_SECONDS:g} s"
            self.group.report_failure(why)
            print_notice(f"{why}: it ends.")
            end_at_once(1)

    def finish(self) -> None:
        """A good end: wait for the other processes, and disconnect. If one of them fails, this one fails too."""
        if self._done:
            return
        self._done = True
        self._exit_finished.set()
        try:
            self.group.close()
        except BaseException as error:
            self.fail(error)
        if self._control is not None:
            with contextlib.suppress(OSError):  # the launcher has gone
                os.write(self._control, f"over {self._status}\n".encode())
        self._leave()

    def fail(self, error: BaseException) -> NoReturn:
        """Print the error, tell the other processes, and end."""
        if isinstance(error, KeyboardInterrupt):
            self.group.report_failure("it was interrupted from the keyboard")
            print_error("\n".join(["interrupted", *getattr(error, "__notes__", ())]))
            end_at_once(INTERRUPTED_STATUS)
        if isinstance(error, ProgramExitError):
            self.group.report_failure(str(error))
            end_at_once(error.status)
        # The user's code is gone from the stack, and another thread may end this process while this one waits.
        self.group.place = error_location(error)
        if self.is_a_consequence(error):
            self._because_of_a_peer(error)
        # Another thread that fails too (a save of Orbax) would print behind this error, which says what to do.
        threading.excepthook = lambda _: None
        error.with_traceback(_user_frames(error.__traceback__))
        try:
            self._before(type(error), error, error.__traceback__)
            flush_output()
        finally:  # a hook may fail, as where nobody reads the output any more
            self.group.report_failure(type_and_message(error))
            end_at_once(1)

    def _because_of_a_peer(self, error: BaseException) -> NoReturn:
        if isinstance(error, ProcessFailedError):
            self.group.end_process(str(error))
        own = type_and_message(error)
        print_error(f"(a consequence of what follows: {own[:500]})")
        self.group.end_process(self.group.failure or own)

    def is_a_consequence(self, error: BaseException) -> bool:
        """Whether a failure of another process has caused this error, maybe through a transport."""
        if isinstance(error, ProcessFailedError):
            return True
        failure = self.group.failure
        if failure is not None and failure.process == self.group.process_index:
            # Another thread, such as that of a save, reported it: the transports have given up since.
            return is_of_jax(error)
        if not is_of_jax(error):
            return failure is not None
        patience = 0.7 * self._timeout if may_come_from_a_peer(error) else 0.5
        return self.group.failed.wait(patience)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.fail(error.with_traceback(trace))


def _what_holds_the_exit() -> str:
    # A thread that is no daemon keeps Python from exiting.
    names = [thread.name for thread in threading.enumerate() if not thread.daemon]
    others = [name for name in names if name != threading.main_thread().name]
    if not others:
        return "an exit handler of it (`atexit`) still runs"
    listed = ", ".join(map(repr, others))
    return (
        f"its thread{'s' if len(others) > 1 else ''} {listed} still run{'' if len(others) > 1 else 's'} (daemon=False)"
    )


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the code that ran the user's program."""
    rest = trace
    while rest is not None and (
        rest.tb_frame.f_code.co_filename.startswith("<frozen runpy")
        or (
            rest.tb_frame.f_globals.get("__spec__") is not None
            and rest.tb_frame.f_globals["__spec__"].name in ("jaxpp_flax.launch.child", "jaxpp_flax.launch.host.warm")
        )
    ):
        rest = rest.tb_next
    return rest if rest is not None else trace


def listen_to_launcher(control_fd: int, on_failure: Callable[[Failure], None], on_end: Callable[[], None]) -> None:
    """Read other processes' failures from the launcher, and notice its end, in a background thread.

    A line of `control_fd` is a process's index, a space, and its failure.
    """

    def listen() -> None:
        # A launcher that is killed before it has read what this process wrote resets the connection.
        lines = os.fdopen(control_fd, encoding="utf-8", errors="replace")
        with contextlib.suppress(ConnectionResetError), lines:
            for line in lines:
                index, _, message = line.rstrip("\n").partition(" ")
                on_failure(Failure(int(index) if index.isdigit() else None, message))
        on_end()

    reporting_thread("jaxpp_flax launcher", listen, print_notice).start()
