"""The builders of a trainer's steps: the training loss is traced once for each structure of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.trainers.data.batch import dtype_of, signature
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import StepBuilder
from jaxpp_flax.trainers.step.loss_trace import LossTrace, trace_loss, warn_of_batch_statistics

__all__ = ["StepBuilderCache"]


class StepBuilderCache:
    """Returns the builder for a batch. The leaves that a loss writes or does not use depend on the batch.

    Args:
      untraced: a builder with the model, the update and the training loss.
      num_microbatches: the number of microbatches of a training step.
    """

    def __init__(self, untraced: StepBuilder, num_microbatches: int) -> None:
        self._untraced, self._num_microbatches = untraced, num_microbatches
        self._traced: dict[Any, LossTrace] = {}
        self._has_warned = False

    def for_training(self, state: TrainState, microbatches: Any) -> StepBuilder:
        """Return the builder for batches with the structure, shapes and dtypes of `microbatches`.

        Raises:
          LossError: if the loss function returns none of the documented forms.
        """
        found = self.trace(state, microbatches)
        return replace(self._untraced, carried=found.carried, unused=found.unused)

    def trace(self, state: TrainState, microbatches: Any) -> LossTrace:
        """Trace the training loss for such batches; each structure of a batch is traced once.

        Raises:
          LossError: as above.
        """
        key = signature(microbatches)
        if key not in self._traced:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], dtype_of(x)), microbatches)
            found = trace_loss(self._untraced.model, self._untraced.loss_fn, state, one)
            if found.batch_statistics and self._num_microbatches > 1 and not self._has_warned:
                self._has_warned = True
                warn_of_batch_statistics(found.batch_statistics, self._num_microbatches)
            self._traced[key] = found
        return self._traced[key]

    def for_inference(self, loss_fn: Callable[..., Any] | None = None) -> StepBuilder:
        """Return a builder without carried leaves, by default with the training loss; nothing is traced."""
        return self._untraced if loss_fn is None else replace(self._untraced, loss_fn=loss_fn)
