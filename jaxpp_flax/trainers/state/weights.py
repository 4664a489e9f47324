"""The trainer's weights, as ordinary modules and variables."""

from __future__ import annotations

import abc
from typing import Any

from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen import LinenModel
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.compilation import to_ordinary

__all__ = ["Weights"]


class Weights(abc.ABC):
    """The part of `PipelineTrainer` that gives its weights to the user."""

    _adapter: ModelAdapter

    @abc.abstractmethod
    def _with_weights(self) -> TrainState: ...

    @abc.abstractmethod
    def _call_together(self, call: str) -> None: ...

    @property
    def model(self) -> Any:
        """An ordinary module with the current weights (NNX: a new one; Linen: bound to its variables).

        With several processes, each of them must ask for it after the same step.
        """
        state = self._with_weights()
        self._call_together("trainer.model")
        return self._adapter.rebuild(to_ordinary(state.params), to_ordinary(state.model_state))

    @property
    def ema_model(self) -> Any:
        """An ordinary module with the moving average of the weights in place of the trained ones.

        Raises:
          ValueError: without `ema_decay=`.
        """
        state = self._with_weights()
        if state.ema is None:
            raise ValueError(
                "trainer.ema_model needs an average of the weights: parameters=Parameters(ema_decay=0.999)."
            )
        self._call_together("trainer.ema_model")
        return self._adapter.rebuild(to_ordinary(state.ema), to_ordinary(state.model_state))

    @property
    def variables(self) -> dict[str, Any]:
        """Of a Linen model: its current variables, as `module.apply` takes them.

        Raises:
          TypeError: for an NNX model.
        """
        if not isinstance(self._adapter, LinenModel):
            raise TypeError("trainer.variables is for Linen models; an NNX model's are in `trainer.model`.")
        state = self._with_weights()
        self._call_together("trainer.variables")
        return self._adapter.variables_of(to_ordinary(state.params), to_ordinary(state.model_state))
