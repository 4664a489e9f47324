"""The trainer's side of inference: `evaluate` and `predict`, pipelined like a step, without a backward."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.batch import batch_size, join_microbatches, split_for_inference
from jaxpp_flax.trainers.evaluation import Average
from jaxpp_flax.trainers.inference import ForwardOnly
from jaxpp_flax.trainers.loading import InferenceKind, Loading, rows_alike
from jaxpp_flax.trainers.step import Loop, StepBuilder
from jaxpp_flax.trainers.together import BatchesAlike

__all__ = ["Inferring", "call_model"]


def call_model(model: Any, batch: Any) -> Any:
    """What `predict` does unless it is told."""
    return model(batch)


class Inferring(Loading):
    """What `PipelineTrainer` does without changing its state; batches are loaded as in training."""

    schedule: Schedule | None
    _eval_loss_fn: Callable[[Any, Any], Any]
    _predict_fn: Callable[[Any, Any], Any]
    _builder: StepBuilder | None

    def evaluate(self, data: Iterable[Any], *, global_batch_size: int | None = None) -> dict[str, Any]:
        """The mean loss and metrics over all examples of `data`, pipelined; the state is not changed.

        Batches may be of any sizes, and each is cut into at most `num_microbatches` parts. NNX modules run in
        `eval()` mode; for Linen, `model.training` is False.

        Args:
          data: an iterable of batches, or one that is a dict.
          global_batch_size: as in `fit`: batches have so many examples, of which each process passes those that it
            reads, `rows_read(batch, "evaluate")`.

        Returns:
          Metrics as floats, at least `loss`.

        Raises:
          BatchError: if a batch cannot be cut, or has not the rows that this process reads.
          ValueError: if there is no batch.
        """
        self._call_together("trainer.evaluate")
        average, pending, alike = Average(), None, BatchesAlike(self.mesh, "evaluation")
        for batch in [data] if isinstance(data, Mapping) else data:
            whole = self._whole(batch, global_batch_size)
            microbatches, count = split_for_inference(whole, self.num_microbatches, self._shards)
            compiled, taken = self._ready("evaluate", microbatches, count, batch if whole is not batch else None, alike)
            terms = compiled(self._state_for_inference(), taken)
            if pending is not None:
                average.add(*pending)
            pending = (terms, count, batch_size(whole))
        if pending is None:
            raise ValueError(f"evaluate got data (a {type(data).__name__}) without a single batch.")
        average.add(*pending)
        alike.end()
        return average.result()

    def predict(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """The model's outputs for a batch of any size, pipelined: `jax.Array`s of shape (batch, ...).

        Outputs that are scalars for each microbatch come back as one value for each microbatch.

        Args:
          batch: what the model, or `predict_fn`, takes: leaves of shape (batch, ...).
          global_batch_size: as in `fit`: the whole has so many examples, of which this process passes those that it
            reads, `rows_read(batch, "predict")`. The outputs are those of the whole, in every process.

        Raises:
          TypeError: if the batch is a dict and no `predict_fn` says what of it the model takes.
          BatchError: if the batch cannot be cut, or has not the rows that this process reads.
        """
        if isinstance(batch, Mapping) and self._predict_fn is call_model:
            raise TypeError(
                f"predict got a dict with {', '.join(map(repr, batch))}, and cannot know what the model takes of it. "
                "Pass the model's input, or give the trainer `predict_fn=lambda model, batch: model(batch['x'])`."
            )
        whole = self._whole(batch, global_batch_size)
        microbatches, count = split_for_inference(whole, self.num_microbatches, self._shards)
        self._call_together("trainer.predict")
        alike, own = BatchesAlike(self.mesh, "prediction"), batch if whole is not batch else None
        compiled, taken = self._ready("predict", microbatches, count, own, alike)
        return join_microbatches(compiled(self._state_for_inference(), taken))

    def _ready(
        self, kind: InferenceKind, microbatches: Any, count: int, own: Any, alike: BatchesAlike
    ) -> tuple[Any, Any]:
        """The compiled step, and the microbatches as it takes them, compared; `own` is a batch of rows, or None."""
        if own is None:
            alike.before(microbatches)
            return self._for_inference(kind, microbatches, count), microbatches
        compiled = self._for_inference(kind, microbatches, count)
        return compiled, rows_alike(compiled, own, microbatches, alike)

    def _for_inference(self, kind: InferenceKind, microbatches: Any, count: int) -> Any:
        schedule = ForwardOnly(self.schedule) if self.schedule is not None else None
        loop = Loop(num_microbatches=count, schedule=schedule)
        if kind == "evaluate":
            builder = self._prepare(microbatches).with_loss(self._eval_loss_fn)
            return self._executable(kind, microbatches, lambda: builder.evaluate(loop), donate=False)
        builder = self._builder or self._new_builder()  # inference carries nothing
        return self._executable(kind, microbatches, lambda: builder.predict(loop, self._predict_fn), donate=False)

    @abc.abstractmethod
    def _prepare(self, microbatches: Any) -> StepBuilder: ...

    @abc.abstractmethod
    def _new_builder(self) -> StepBuilder: ...

    @abc.abstractmethod
    def _executable(self, kind: str, microbatches: Any, build: Callable[[], Any], *, donate: bool) -> Any: ...

    @abc.abstractmethod
    def _state_for_inference(self) -> Any: ...

    @abc.abstractmethod
    def _call_together(self, call: str) -> None: ...
