"""The trainer's weights, as ordinary modules and variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen import LinenModel
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.step.compilation import to_ordinary

__all__ = ["Weights"]


@dataclass(frozen=True)
class Weights:
    """Copies the weights of a state for the user.

    Args:
      adapter: the adapter of the model.
      held: the state.
      meet: a function of the name of a call that every process must make after the same step.
    """

    adapter: ModelAdapter
    held: StateHolder
    meet: Callable[[str], None]

    def model(self) -> Any:
        """An ordinary module with the current weights (NNX: a new module; Linen: a module bound to its variables).

        With several processes, each process must read `model` after the same step.
        """
        state = self.held.weights()
        self.meet("trainer.model")
        return self.adapter.rebuild(to_ordinary(state.params), to_ordinary(state.model_state))

    def ema_model(self) -> Any:
        """An ordinary module with the moving average of the weights instead of the trained weights.

        Raises:
          ValueError: without `Parameters(ema_decay=)`.
        """
        state = self.held.weights()
        if state.ema is None:
            raise ValueError(
                "trainer.ema_model needs an average of the weights: parameters=Parameters(ema_decay=0.999)."
            )
        self.meet("trainer.ema_model")
        return self.adapter.rebuild(to_ordinary(state.ema), to_ordinary(state.model_state))

    def variables(self) -> dict[str, Any]:
        """The current variables of a Linen model, in the form that `module.apply` takes.

        Raises:
          TypeError: for an NNX model.
        """
        if not isinstance(self.adapter, LinenModel):
            raise TypeError("trainer.variables is for Linen models; an NNX model's are in `trainer.model`.")
        state = self.held.weights()
        self.meet("trainer.variables")
        return self.adapter.variables_of(to_ordinary(state.params), to_ordinary(state.model_state))
