"""The display of a trainer's messages and of its progress: a bar on a terminal, plain lines elsewhere, or nothing.

It gets values that are already on the host; it never asks a device for values.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

__all__ = ["Display", "Rate"]

_WHOLE = ("loss", "rate", "left")  # what a bar always shows whole


class Rate:
    """Units per second of training, and the time left, from the first reading on: neither includes compilation.

    Args:
      total_steps: the number of the last step; None: no time is left to tell.
      training: returns the seconds spent training so far, without saves and evaluations.
      clock: returns the seconds of a clock, for the time left.

    Example:
      >>> clock, training = iter([0.0, 2.0]), iter([0.0, 1.0])
      >>> rate = Rate(total_steps=30, training=lambda: next(training), clock=lambda: next(clock))
      >>> rate.read(step=10, units=100), rate.read(step=20, units=300)
      ((None, None), (200.0, 2.0))
    """

    def __init__(
        self, total_steps: int | None, training: Callable[[], float], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._total, self._training, self._clock = total_steps, training, clock
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)

    def read(self, step: int, units: int) -> tuple[float | None, float | None]:
        """Return (units per second since the last reading, seconds left); `units` in all are done at `step`."""
        now, first, last = self._clock(), self._first, self._last
        self._last = (self._training(), units)
        if first is None:
            self._first = (now, step)
            return None, None
        rate = (units - last[1]) / max(self._last[0] - last[0], 1e-9)
        if self._total is None or step <= first[1]:
            return rate, None
        return rate, (self._total - step) * (now - first[0]) / (step - first[1])


class Display:
    """Shows messages at any time, and between `start` and `stop` the progress of a loop.

    Args:
      messages: False shows no message. With several processes, process 0 alone shows anything.
      progress: False shows no progress.
      console: where to write; None: the standard output of the moment.

    Example:
      >>> display = Display()
      >>> display.start(total=100, done=0)
      >>> display.update(10, {"loss": 2.5}, 12345.0, "tokens", 65.0)
      step 10/100  loss 2.5000  12.3k tokens/s  ETA 0:01:05
    """

    def __init__(self, *, messages: bool = True, progress: bool = True, console: Console | None = None) -> None:
        is_first = jax.process_index() == 0
        self._messages, self._progress, self._console = messages and is_first, progress and is_first, console
        self._total: int | None = None
        self._bar: Progress | None = None
        self._task: Any = None
        self._told: set[str] = set()

    @classmethod
    def silent(cls) -> Display:
        """A display that shows nothing."""
        return cls(messages=False, progress=False)

    def start(self, total: int | None, done: int) -> None:
        """Show that a loop begins at `done` and ends at `total`, if known."""
        self._total = total
        if self._progress and (terminal := self._terminal()) is not None:
            # On a narrow terminal the last column alone is cut: the loss, the rate and the time left stay.
            rest = TextColumn("{task.fields[rest]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
            whole = [TextColumn(f"{{task.fields[{name}]}}", table_column=Column(no_wrap=True)) for name in _WHOLE]
            columns = (BarColumn(bar_width=16), MofNCompleteColumn(), *whole, rest)
            self._bar = Progress(*columns, console=terminal, expand=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=total, completed=done, loss="", rate="", left="", rest="")

    def advance(self, step: int) -> None:
        """Show that `step` was started; its metrics are not known yet."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def update(self, step: int, metrics: Mapping[str, Any], rate: float | None, unit: str, left: float | None) -> None:
        """Show the metrics of `step`, units per second, and seconds left."""
        values = _values(metrics)
        loss = f"loss {values.pop('loss')}" if "loss" in values else ""
        rest = "  ".join(f"{name} {value}" for name, value in values.items())
        speed = "" if rate is None else f"{_short(rate)} {unit}/s"
        time_left = "" if left is None else f"ETA {_clock(left)}"
        if self._bar is not None:
            self._bar.update(self._task, loss=loss, rate=speed, left=time_left, rest=rest)
        else:
            total = f"/{self._total}" if self._total is not None else ""
            fields = (f"step {step}{total}", loss, rest, speed, time_left)
            self._print("  ".join(filter(None, fields)), self._progress)

    def message(self, text: Any) -> None:
        """Print a line, or anything that rich can draw, without disturbing a bar."""
        self._print(text, self._messages)

    def _print(self, text: Any, is_shown: bool) -> None:
        if not is_shown:
            return
        if (terminal := self._terminal()) is not None:
            terminal.print(text, highlight=False)
        elif isinstance(text, str) and self._console is None:
            print(text, flush=True)
        else:
            (self._console or Console(width=int(os.environ.get("COLUMNS") or 80))).print(
                text, highlight=False, soft_wrap=isinstance(text, str)
            )

    def message_once(self, text: str | None) -> None:
        """Print a line that was not printed before; None prints nothing."""
        if text is not None and text not in self._told:
            self._told.add(text)
            self.message(text)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show work that takes long, such as compilation, and then its seconds."""
        begin = time.perf_counter()
        # A spinner beside a bar needs rich 14.1.
        terminal = self._terminal() if self._messages and self._bar is None else None
        with nullcontext() if terminal is None else terminal.status(text):
            yield
        self.message(f"{text}: {time.perf_counter() - begin:.1f} s")

    def stop(self) -> None:
        """Show that the loop has ended."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _terminal(self) -> Console | None:
        """Return the console, if it is a terminal."""
        console = self._bar.console if self._bar is not None else self._console or Console()
        return console if console.is_terminal else None


def _values(metrics: Mapping[str, Any]) -> dict[str, str]:
    """The texts of scalars. A learning rate of 3e-5 would be 0.0000."""
    shown = {name: value for name, value in metrics.items() if isinstance(value, float) and name != "weight"}
    return {name: f"{value:.4f}" if not 0 < abs(value) < 1e-2 else f"{value:.2e}" for name, value in shown.items()}


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.1f}"
