"""Predictions for fixed inputs during training, for the tracker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord

__all__ = ["SamplePredictions"]


class SamplePredictions(Callback):
    """Predicts for the same inputs every `every` steps, and logs the texts and arrays to the tracker.

    Args:
      inputs: a batch for `trainer.predict`, or the argument `inputs` of `function`. All processes pass the same inputs.
      every: steps between two predictions.
      function: a function of `(trainer, inputs)`, called in all processes. It returns an array, a number, a text, a
        list of texts, or a mapping of these by name. Default: `trainer.predict`. For text: `lambda trainer, prompts:
        [tokenizer.decode(tokens) for tokens in trainer.generate(prompts, max_new_tokens=20)]`.
      name: the name in the tracker; the names of a mapping are added to it, as in `samples/logits`.

    Raises:
      ValueError: if `every` is below 1.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import DictTracker, PipelineTrainer
      >>> from jaxpp_flax.trainers import Logging
      >>> tracker = DictTracker()
      >>> trainer = PipelineTrainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
      ...                           lambda model, x: (model(x) ** 2).mean(), num_stages=1, num_microbatches=2,
      ...                           logging=Logging(tracker=tracker, progress=False))
      >>> _ = trainer.fit([jnp.ones((4, 2))], steps=4, callbacks=[SamplePredictions(jnp.ones((2, 2)), every=2)])
      >>> {step: value.shape for step, value in tracker["samples"].items()}
      {2: (2, 1), 4: (2, 1)}
    """

    def __init__(
        self,
        inputs: Any,
        *,
        every: int,
        function: Callable[[Any, Any], Any] | None = None,
        name: str = "samples",
    ) -> None:
        super().__init__(every=every)
        self._inputs, self._function, self._name = inputs, function, name

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        made = trainer.predict(self._inputs) if self._function is None else self._function(trainer, self._inputs)
        trainer.guarded_tracker.log(dict(_by_name(self._name, made)), step=record.step)


def _by_name(name: str, made: Any) -> list[tuple[str, Any]]:
    """Return texts, floats and NumPy arrays by name.

    >>> _by_name("samples", {"text": ["a", "b"], "score": np.float32(0.5)})
    [('samples/text', 'a\\nb'), ('samples/score', 0.5)]
    """
    if isinstance(made, Mapping):
        return [pair for key, value in made.items() for pair in _by_name(f"{name}/{key}", value)]
    if isinstance(made, Sequence) and all(isinstance(text, str) for text in made):
        return [(name, made if isinstance(made, str) else "\n".join(made))]
    array = np.asarray(made)
    return [(name, array.item() if array.ndim == 0 else array)]
