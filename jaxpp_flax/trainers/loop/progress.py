"""The display of training progress: a bar on a terminal, plain lines elsewhere, or nothing.

A meter gets values that are already on the host; it never asks a device for values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

__all__ = ["BarMeter", "Display", "Meter", "PlainMeter", "Rate", "choose_meter"]


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


class Meter:
    """Shows the progress of `fit`; the methods of this class show nothing. Subclass it for a display of your own.

    Example:
      >>> class Steps(Meter):
      ...     def update(self, step, metrics, rate, unit, left):
      ...         print(f"step {step}, loss {metrics['loss']:.2f}")
      >>> Steps().update(10, {"loss": 2.5}, None, "tokens", None)  # the trainer calls it: Logging(progress=Steps())
      step 10, loss 2.50
    """

    def start(self, total: int | None, done: int) -> None:
        """Show that training begins at step `done` and ends at step `total`, if known."""

    def update(self, step: int, metrics: Mapping[str, Any], rate: float | None, unit: str, left: float | None) -> None:
        """Show the metrics of `step`, units per second, and seconds left."""

    def advance(self, step: int) -> None:
        """Show that `step` was started; its metrics are not known yet."""

    def message(self, text: Any) -> None:
        """Print a line, or anything that rich can draw, above the bar."""

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show work that takes long, such as compilation, and then its seconds."""
        begin = time.perf_counter()
        yield
        self.message(f"{text}: {time.perf_counter() - begin:.1f} s")

    def stop(self) -> None:
        """Show that training has ended."""


class PlainMeter(Meter):
    """Lines of text, for logs.

    Example:
      >>> meter = PlainMeter()
      >>> meter.start(total=100, done=0)
      >>> meter.update(10, {"loss": 2.5}, 12345.0, "tokens", 65.0)
      step 10/100  loss 2.5000  12.3k tokens/s  ETA 0:01:05
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console
        self._total: int | None = None

    def start(self, total: int | None, done: int) -> None:
        self._total = total

    def update(self, step: int, metrics: Mapping[str, Any], rate: float | None, unit: str, left: float | None) -> None:
        total = f"/{self._total}" if self._total is not None else ""
        self._print("  ".join([f"step {step}{total}", *_fields(metrics, rate, unit, left)]))

    def message(self, text: Any) -> None:
        if isinstance(text, str):
            self._print(text)
        else:
            (self._console or Console(width=120)).print(text)

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)


class BarMeter(Meter):
    """A bar on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=self._console, transient=False)
        self._task: Any = None

    def start(self, total: int | None, done: int) -> None:
        self._progress.start()
        self._task = self._progress.add_task("", total=total, completed=done)

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def update(self, step: int, metrics: Mapping[str, Any], rate: float | None, unit: str, left: float | None) -> None:
        self._progress.update(self._task, description="  ".join(_fields(metrics, rate, unit, left)))

    def message(self, text: Any) -> None:
        self._console.print(text)

    @contextmanager
    def phase(self, text: str) -> Iterator[None]:
        begin = time.perf_counter()
        if self._progress.live.is_started:  # a spinner beside a bar needs rich 14.1
            yield
        else:
            with self._console.status(text):
                yield
        self._console.print(f"{text}: {time.perf_counter() - begin:.1f} s", highlight=False)

    def stop(self) -> None:
        self._progress.stop()


def choose_meter(progress: bool | Meter) -> Meter:
    """Return the meter for `Logging(progress=)`: True chooses by the terminal, False shows nothing; or a `Meter`."""
    if isinstance(progress, Meter):
        return progress
    if not progress or jax.process_index() > 0:  # only process 0 shows progress
        return Meter()
    return BarMeter() if Console().is_terminal else PlainMeter()


class Display:
    """The receiver of a trainer's messages: the meter of the latest `fit`, since a bar runs once.

    Args:
      progress: see `choose_meter`.
    """

    def __init__(self, progress: bool | Meter) -> None:
        self._progress = progress
        self.meter = choose_meter(progress)

    def renew(self) -> None:
        """Choose a new meter, before a `fit`."""
        self.meter = choose_meter(self._progress)

    def message(self, text: Any) -> None:
        """Print a line, or anything that rich can draw, without disturbing a bar."""
        self.meter.message(text)


def _fields(metrics: Mapping[str, Any], rate: float | None, unit: str, left: float | None) -> list[str]:
    shown = {name: value for name, value in metrics.items() if isinstance(value, float) and name != "weight"}
    # A learning rate of 3e-5 would be 0.0000.
    fields = [
        f"{name} {value:.4f}" if not 0 < abs(value) < 1e-2 else f"{name} {value:.2e}" for name, value in shown.items()
    ]
    if rate is not None:
        fields.append(f"{_short(rate)} {unit}/s")
    if left is not None:
        hours, seconds = divmod(round(left), 3600)
        fields.append(f"ETA {hours}:{seconds // 60:02d}:{seconds % 60:02d}")
    return fields


def _short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.1f}"
