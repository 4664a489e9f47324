"""The output of several processes as one: whole lines, each with its process's number before it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import IO

from rich.console import Console

__all__ = ["Logs", "lines_of"]

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_KEPT_LINES = 400  # the tracebacks of libraries that chain several errors are long


class Logs:
    """Prints the output of processes line by line, and remembers the last lines of each process's errors.

    Args:
      num_processes: how many processes there are.
      console: where errors go; colours are used if it is a terminal.
      out: where standard output goes.

    Attributes:
      lost: why output could not be written, as onto a full disk; None: it could.
    """

    def __init__(self, num_processes: int, console: Console, out: IO[str]) -> None:
        self._console, self._out = console, out
        self.lost: OSError | None = None
        self._lock = threading.Lock()
        self._errors: list[deque[str]] = [deque(maxlen=_KEPT_LINES) for _ in range(num_processes)]
        width = len(str(num_processes - 1))
        # The console itself writes nothing: it ends this process where nobody reads, and raises where a disk is full.
        names = [f"[{index:>{width}}]" for index in range(num_processes)]
        self._prefixes = [self._render(name, _COLOURS[index % 6]) + " " for index, name in enumerate(names)]
        self._own = self._render("|", "bold")
        self._readers: list[threading.Thread] = []

    def _render(self, text: str, style: str) -> str:
        with self._console.capture() as capture:
            self._console.print(text, style=style, end="", markup=False, highlight=False)
        return capture.get()

    def say(self, text: str) -> None:
        """Print what the launcher itself has to say."""
        before, _, after = self._own.partition("|")
        with self._lock:
            self._put(self._console.file, f"\n{before}jaxpp_flax.launch: {text}{after}\n")

    def forget_errors(self) -> None:
        """Begin with the errors of another life of the run."""
        with self._lock:
            for lines in self._errors:
                lines.clear()

    def follow(self, index: int, stream: IO[str], errors: bool) -> None:
        """Print the lines of `stream` in a background thread, until it ends."""
        reader = threading.Thread(target=self._read, args=(index, stream, errors), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _read(self, index: int, stream: IO[str], errors: bool) -> None:
        for line in lines_of(stream):
            self.print_line(index, line, errors)

    def print_line(self, index: int, line: str, errors: bool) -> None:
        """Print one line of a process."""
        with self._lock:
            if errors:
                self._errors[index].append(line)
            self._put(self._console.file if errors else self._out, f"{self._prefixes[index]}{line}\n")

    def _put(self, file: IO[str], text: str) -> None:
        """Write, if the file takes it: the run goes on without its output, and is started again without it."""
        try:
            _write(file, text)
        except BrokenPipeError:
            return  # its reader has gone; a process whose output is not read would stand still
        except OSError as error:
            self.lost = self.lost or error

    def drain(self, seconds: float) -> None:
        """Wait for the ends of all streams, which programs started by a process may hold open for long."""
        for reader in self._readers:
            reader.join(timeout=seconds)
        self._readers.clear()

    def close(self) -> None:
        """Give up the standard output, with what could not be written."""
        self._out.close()

    def tell_error(self, index: int) -> None:
        """Print the last lines of a process's errors again."""
        for line in self.last_error(index):
            self._put(self._console.file, line + "\n")

    def last_error(self, index: int) -> list[str]:
        """The last lines of a process's standard error, from its main thread's last traceback on, if there is one."""
        with self._lock:
            lines = list(self._errors[index])
        starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        # A library's thread may print its error after the main thread has told what it means.
        own = [start for start in starts if not lines[max(start - 1, 0)].startswith("Exception in thread")]
        shown = lines[(own or starts)[-1] :] if starts else lines[-20:]
        return [f"{self._prefixes[index]}{line}" for line in shown]


def lines_of(stream: IO[str]) -> Iterator[str]:
    """The lines of a process's output, until it ends or is closed."""
    with contextlib.suppress(ValueError), stream:
        for line in stream:
            yield line.rstrip("\n")


def _write(file: IO[str], text: str) -> None:
    """Write at once; characters that the file's encoding lacks are escaped."""
    try:
        file.write(text)
    except UnicodeEncodeError:
        encoding = getattr(file, "encoding", None) or "ascii"
        file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()
