"""Trackers write metrics to memory, a JSONL file, TensorBoard, Weights & Biases, or several of these."""

from __future__ import annotations

import abc
import importlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "CompositeTracker",
    "DictTracker",
    "JsonlTracker",
    "NoopTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]


class Tracker(abc.ABC):
    """Receives metrics that are already on the host. For your own tracker, write a subclass with `log`.

    Example:
      >>> class Printer(Tracker):
      ...     def log(self, metrics, *, step):
      ...         print(step, metrics)
      >>> Printer().log({"loss": 1.5}, step=3)
      3 {'loss': 1.5}
    """

    @abc.abstractmethod
    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Record `metrics` (floats, or NumPy arrays) of `step`."""

    def log_config(self, config: Mapping[str, Any]) -> None:  # noqa: B027 (optional)
        """Record the configuration of the run; by default, do nothing."""

    def close(self) -> None:  # noqa: B027 (optional)
        """Write the remaining metrics at the end of the run; a later `log` may reopen the tracker."""


class NoopTracker(Tracker):
    """Records nothing."""

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Record nothing."""


class DictTracker(Tracker):
    """Keeps everything in memory, which makes tests easy.

    Example:
      >>> tracker = DictTracker()
      >>> tracker.log({"loss": 2.0}, step=1)
      >>> tracker.log({"loss": 1.0}, step=2)
      >>> tracker["loss"]
      {1: 2.0, 2: 1.0}
    """

    def __init__(self) -> None:
        self.metrics: dict[str, dict[int, Any]] = {}
        self.config: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for name, value in metrics.items():
            self.metrics.setdefault(name, {})[step] = value

    def log_config(self, config: Mapping[str, Any]) -> None:
        self.config.update(config)

    def __getitem__(self, name: str) -> dict[int, Any]:
        return self.metrics[name]


class JsonlTracker(Tracker):
    """Appends one line with a JSON object for each call; each line is complete after the call.

    JSON has no NaN and no infinities: these are written as strings (`"nan"`).

    Args:
      path: the path of the file; its folder is made.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> tracker = JsonlTracker(path)
      >>> tracker.log({"loss": 2.0}, step=1)
      >>> path.read_text()
      '{"step": 1, "loss": 2.0}\\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        self._write({"step": step, **{name: _plain(value) for name, value in metrics.items()}})

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._write({"config": {name: _plain(value) for name, value in config.items()}})

    def _write(self, line: dict[str, Any]) -> None:
        # The file is opened for each line: a killed process loses no line, and no call has to close the file.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class CompositeTracker(Tracker):
    """Passes everything on to several trackers.

    Example:
      >>> first, second = DictTracker(), DictTracker()
      >>> CompositeTracker(first, second).log({"loss": 2.0}, step=1)
      >>> first["loss"] == second["loss"]
      True
    """

    def __init__(self, *trackers: Tracker) -> None:
        self.trackers = trackers

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for tracker in self.trackers:
            tracker.log(metrics, step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log_config(config)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()


class TensorBoardTracker(Tracker):
    """Writes scalars, and no arrays, for TensorBoard; needs the extra `tensorboard`.

    Args:
      log_dir: the run's folder.

    Raises:
      ImportError: without `tensorboardX`.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._writer = _load("tensorboardX", "tensorboard").SummaryWriter(os.fspath(log_dir))

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._writer.add_text("config", "\n".join(f"- {name}: {value}" for name, value in config.items()))

    def close(self) -> None:
        self._writer.close()  # `flush` alone may leave the last metrics in the queue


class WandbTracker(Tracker):
    """Logs to Weights & Biases; needs the extra `wandb`.

    Args:
      run_options: arguments of `wandb.init`: `project=`, `name=`, ...

    Raises:
      ImportError: without `wandb`.
    """

    def __init__(self, **run_options: Any) -> None:
        self._run = _load("wandb", "wandb").init(**run_options)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


def _load(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this tracker needs the package {module!r}, which is not installed: `pip install 'jaxpp-flax[{extra}]'`."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return repr(value)
