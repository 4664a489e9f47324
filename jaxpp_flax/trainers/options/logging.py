"""The options of metrics and of the progress display."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.metrics.run_metrics import RunMetric, RunMetrics
from jaxpp_flax.trainers.metrics.throughput import Throughput
from jaxpp_flax.trainers.metrics.utilization import peak_flops
from jaxpp_flax.trainers.options.base import Options
from jaxpp_flax.trainers.step.learning_rate import find_learning_rate
from jaxpp_flax.trainers.step.metrics import StepMetric, StepMetrics
from jaxpp_flax.trainers.trackers import Tracker

__all__ = ["Logging"]

_OF_STEP, _OF_RUN = get_args(StepMetric), get_args(RunMetric)


@dataclass(frozen=True, kw_only=True)
class Logging(Options):
    """The options of metrics and of the progress display: `logging=`.

    A boolean alone means `Logging(progress=..., messages=...)`: `logging=False` shows nothing.

    Args:
      tracker: gets the configuration and the metrics; with several processes, only in process 0.
      config: a mapping or a dataclass. The tracker gets it together with the number of stages and other facts.
      every: steps between two rows of metrics.
      progress: True shows a progress bar on a terminal, and prints lines of metrics elsewhere.
      messages: True prints the table of stages, the summary at the end, and what happens between: saves, compilations.
      metrics: the names of the metrics to measure; True measures all. "learning_rate", "gradient_norm",
        "parameter_norm" and "update_ratio" (the norm of the update divided by the norm of the parameters before it) are
        computed inside the step over all trained parameters, and `train_step` returns them. The other metrics are in
        the rows of the tracker: "step_time" (`step_seconds`, and the host's `data_seconds`, `dispatch_seconds`,
        `device_seconds`, `save_seconds` and `evaluation_seconds` for each step), "goodput" (the share of the time since
        the start of `fit` that was spent on training), "skipped_steps" (since the start of `fit`), "utilization" (the
        model's operations per second divided by the peak of all devices). A resumed `fit` counts goodput and skipped
        steps from zero: they leave out earlier runs, and the steps that a crash lost.
      learning_rate: the value of the metric "learning_rate": a number, or a function of the number of steps done. None
        reads it from `optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)`, so that it is given only once; an
        optimizer made otherwise does not tell it, and the metric is left out, with a message.
      throughput: what the rate counts, for instance tokens without padding: `Throughput("tokens", of="targets")`.
      peak_flops: the peak floating-point operations per second of one device, for "utilization". None takes it from a
        table of NVIDIA's and AMD's data-centre GPUs, and TPUs.

    Raises:
      TypeError, ValueError: if a field has a value that does not fit; the message names the field.

    Example:
      >>> Logging(every=100, progress=False).every
      100
    """

    tracker: Tracker | None = None
    config: Any = None
    every: int = 10
    progress: bool = True
    messages: bool = True
    metrics: Sequence[StepMetric | RunMetric] | bool = ()
    learning_rate: float | Callable[[Any], Any] | None = None
    throughput: Throughput = field(default_factory=Throughput)
    peak_flops: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "every", check_count("every", self.every))
        _ = self.run_config
        self._check_metrics()
        if not isinstance(self.throughput, Throughput):
            kind = type(self.throughput).__name__
            raise TypeError(f"throughput={self.throughput!r} ({kind}): it must be a Throughput.")
        rate = self.learning_rate
        if rate is not None and not callable(rate) and not hasattr(rate, "__float__"):
            kind = type(rate).__name__
            raise TypeError(
                f"learning_rate={rate!r} ({kind}): it must be a number, or a schedule: a function of the step."
            )
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise ValueError(f"peak_flops={self.peak_flops!r}: it must be above 0, or None.")
        for name, value in (("progress", self.progress), ("messages", self.messages)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r} ({type(value).__name__}): it must be True or False.")

    @classmethod
    def of(cls, value: Logging | bool | None) -> Logging:
        """Convert the trainer's `logging=`."""
        return cls(progress=value, messages=value) if isinstance(value, bool) else super().of(cast(Any, value))

    @property
    def run_config(self) -> dict[str, Any]:
        """`config` as a dictionary."""
        if self.config is None:
            return {}
        if dataclasses.is_dataclass(self.config) and not isinstance(self.config, type):
            return dataclasses.asdict(self.config)
        if isinstance(self.config, Mapping):
            return dict(self.config)
        kind = type(self.config).__name__
        raise TypeError(f"Logging(config={self.config!r}): it must be a mapping or a dataclass, not {kind}.")

    def step_metrics(self, opt_state: Any) -> StepMetrics:
        """Return the metrics that steps compute; `opt_state` is the optimizer's state, arrays or shapes.

        A learning rate that is not known is left out.
        """
        rate, names = find_learning_rate(opt_state, self.learning_rate), list(self._chosen(_OF_STEP))
        if rate is None and "learning_rate" in names:
            names.remove("learning_rate")
        return StepMetrics(names=tuple(names), learning_rate=rate)

    def lacks_learning_rate(self, measured: StepMetrics) -> bool:
        """True if the learning rate is asked for, and `measured` leaves it out."""
        return "learning_rate" in set(self._chosen(_OF_STEP)) - set(measured.names)

    def run_metrics(self, devices: Sequence[Any], flops: Callable[[Any, int | None], float]) -> RunMetrics:
        """Return the metrics of a run on these devices; `flops` counts the operations of a step on a batch.

        Raises:
          ValueError: if "utilization" is asked for by name, and the peak of the devices is not known.
        """
        peak = None if self.peak_flops is None else self.peak_flops * len(devices)
        peak, names = peak or peak_flops(devices), self._chosen(_OF_RUN)
        if "utilization" in names and peak is None:
            if self.metrics is not True:
                kind = getattr(devices[0], "device_kind", devices[0])
                raise ValueError(
                    f'Logging(metrics=...) asks for "utilization", and the peak of a device of kind {kind!r} is not '
                    "known. Pass it: Logging(peak_flops=), the peak operations per second of one device."
                )
            names = tuple(name for name in names if name != "utilization")
        return RunMetrics(names=names, throughput=self.throughput, flops=flops, peak=peak)

    def _chosen(self, names: Sequence[Any]) -> tuple[Any, ...]:
        if isinstance(self.metrics, bool):
            return tuple(names) if self.metrics else ()
        return tuple(name for name in names if name in self.metrics)

    def _check_metrics(self) -> None:
        known = ", ".join((*_OF_STEP, *_OF_RUN))
        if not isinstance(self.metrics, (bool, tuple, list)):
            raise TypeError(f"metrics={self.metrics!r}: it must be True, or a tuple of names: {known}.")
        for name in () if isinstance(self.metrics, bool) else self.metrics:
            if name not in (*_OF_STEP, *_OF_RUN):
                raise ValueError(f"metrics={self.metrics!r}: {name!r} is not one of {known}.")
