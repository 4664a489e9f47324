"""Trackers that need an extra package, which is imported when the tracker is made."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from jaxpp_flax.trainers.trackers.base import Tracker

__all__ = ["TensorBoardTracker", "WandbTracker"]


def _load(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this tracker needs the package {module!r}, which is not installed: `pip install 'jaxpp-flax[{extra}]'`."
        ) from error


class TensorBoardTracker(Tracker):
    """Writes scalars for TensorBoard; needs the extra `tensorboard`.

    Args:
      log_dir: the run's folder.

    Raises:
      ImportError: without `tensorboardX`.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._writer = _load("tensorboardX", "tensorboard").SummaryWriter(os.fspath(log_dir))

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Write scalars; arrays are left out."""
        for name, value in metrics.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the config as text."""
        self._writer.add_text("config", "\n".join(f"- {name}: {value}" for name, value in config.items()))

    def close(self) -> None:
        """Write the queued metrics, and close the file; `flush` alone may leave the last ones in the queue."""
        self._writer.close()


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
        """Log all metrics."""
        self._run.log(dict(metrics), step=step)

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Save the config as the run's config."""
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self) -> None:
        """End the run."""
        self._run.finish()
