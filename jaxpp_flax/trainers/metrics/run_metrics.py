"""The metrics of a run that the host knows: step time by part, goodput, use of the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxpp_flax.trainers.data.batch import signature
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.metrics.throughput import Throughput

__all__ = ["RunMetric", "RunMetrics", "goodput", "stepping_seconds"]

RunMetric = Literal["step_time", "goodput", "skipped_steps", "utilization"]

_SHOWN = ("data", "dispatch", "device", "save", "evaluation")
# The parts in which a run trains, or could train if its data were there.
_STEPPING = ("data", "dispatch", "device", "other")


def goodput(seconds: Mapping[str, float]) -> float:
    """Return the share of a run's time in which it trained: the host gave steps to the devices or waited for them.

    Example:
      >>> goodput({"dispatch": 1.0, "device": 8.0, "compilation": 2.0, "save": 1.0})
      0.75
    """
    total = sum(seconds.values())
    return (seconds.get("dispatch", 0.0) + seconds.get("device", 0.0)) / total if total else 0.0


def stepping_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds in which a run trained, or could have trained if its data had been there.

    Example:
      >>> stepping_seconds({"data": 1.0, "device": 8.0, "compilation": 2.0})
      9.0
    """
    return sum(seconds.get(part, 0.0) for part in _STEPPING)


@dataclass(kw_only=True)
class RunMetrics:
    """Counts the time, the units and the operations of a run. It never asks a device for a value.

    Args:
      names: the metrics that rows have.
      flops: returns the operations of a step on a batch, given the batch and `global_batch_size`.
      peak: the peak operations per second of all devices together.
      skipped: returns the number of steps skipped so far.
    """

    names: tuple[RunMetric, ...] = ()
    throughput: Throughput = field(default_factory=Throughput)
    clock: Clock = field(default_factory=Clock)
    flops: Callable[[Any, int | None], float] | None = None
    peak: float | None = None
    skipped: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        self._flops_of: dict[Any, float] = {}
        self.begin()

    def begin(self) -> None:
        """Start to count a run. Each `fit` and `training_steps` is a run; the counts do not go into checkpoints."""
        self._beginning = self.clock.read()
        self._row: tuple[int, dict[str, float], float] | None = None  # the step, the clock, the operations
        self.operations = 0.0  # up to the latest step
        self._skipped_before = self.skipped()

    def count(self, batch: Any, global_batch_size: int | None) -> tuple[int, str]:
        """Count a step on this batch; return its units and their name."""
        if "utilization" in self.names and self.flops is not None:
            key = (signature(batch), global_batch_size)
            if key not in self._flops_of:
                self._flops_of[key] = self.flops(batch, global_batch_size)
            self.operations += self._flops_of[key]
        return self.throughput.count(batch, global_batch_size)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part since the run began."""
        return _difference(self.clock.read(), self._beginning)

    def row(self, step: int, operations: float) -> dict[str, float]:
        """Return the metrics since the last row; the first row of a run has no times, since it compiles.

        `operations` are those up to this step: later steps may have been counted meanwhile.
        """
        if not self.names:
            return {}
        found: dict[str, float] = {}
        now, before = self.clock.read(), self._row
        self._row = (step, now, operations)
        if "skipped_steps" in self.names:
            found["skipped_steps"] = float(self.skipped() - self._skipped_before)
        if before is None or step == before[0]:
            return found
        spent, steps = _difference(now, before[1]), step - before[0]
        if "step_time" in self.names:
            found["step_seconds"] = sum(spent.values()) / steps
            found |= {f"{part}_seconds": spent[part] / steps for part in _SHOWN}
        if "goodput" in self.names:
            found["goodput"] = goodput(_difference(now, self._beginning))
        if "utilization" in self.names and self.peak is not None:
            found["utilization"] = (operations - before[2]) / max(stepping_seconds(spent), 1e-9) / self.peak
        return found


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in after}
