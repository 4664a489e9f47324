"""A tracker during `fit`: the configuration comes first, and the tracker is closed on every way out."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import flax
import jax
import optax

from jaxpp_flax.trainers.callbacks import Callback

__all__ = ["TrackedRun", "configuration"]


class TrackedRun(Callback):
    """Gives a trainer's tracker the run's configuration, and closes it; its state goes into checkpoints.

    The loop closes it after the last save, and not in `on_fit_end`: a run whose last save fails has failed.

    Args:
      config: the user's part of the configuration.
    """

    def __init__(self, trainer: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        self._tracker, self._config, self._has_begun = trainer.tracker, config, False

    def get_state(self) -> Any:
        return self._tracker.get_state()

    def set_state(self, state: Any) -> None:
        if state is not None:
            self._tracker.set_state(state)

    def on_fit_start(self, trainer: Any) -> None:
        self._has_begun = True
        self._tracker.log_config({**configuration(trainer), **self._config})

    def close(self) -> None:
        """Close the tracker if `fit` has begun; an error that is being handled ends the run."""
        if not self._has_begun:
            return
        try:
            self._tracker.close()
        except Exception as error:  # an error of `fit` must not be hidden by one of its tracker
            warnings.warn(
                f"{type(self._tracker).__name__} did not close, so its last metrics may be missing: {error!r}",
                RuntimeWarning,
                stacklevel=2,
            )


def configuration(trainer: Any) -> dict[str, Any]:
    """Return facts about a trainer's run, by name.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineTrainer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: model(x).mean(),
      ...                           num_stages=1, num_microbatches=2, logging=False)
      >>> {name: value for name, value in configuration(trainer).items() if name.startswith("num_")}
      {'num_stages': 1, 'num_microbatches': 2, 'num_processes': 1}
    """
    mesh = trainer.mesh
    return {
        "num_stages": trainer.num_stages,
        "num_microbatches": trainer.num_microbatches,
        "schedule": None if trainer.schedule is None else repr(trainer.schedule),
        "mesh": None if mesh is None else dict(mesh.jax_mesh.shape),
        "num_processes": jax.process_count(),
        "device": jax.devices()[0].device_kind,
        "versions": {package.__name__: package.__version__ for package in (jax, flax, optax)},
    }


def as_config(config: Any) -> dict[str, Any]:
    """Convert `Logging(config=)`, a mapping or a dataclass, to a dictionary.

    Raises:
      TypeError: for anything else.

    Example:
      >>> as_config({"learning_rate": 0.5}), as_config(None)
      ({'learning_rate': 0.5}, {})
    """
    if config is None:
        return {}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if isinstance(config, Mapping):
        return dict(config)
    raise TypeError(f"Logging(config={config!r}): it must be a mapping or a dataclass, not {type(config).__name__}.")
