"""Which leaves and examples of a batch this process reads, for the user who loads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxpp_flax.trainers.data.batch import InferencePart, shape_of
from jaxpp_flax.trainers.data.loading import InferenceKind, Rows
from jaxpp_flax.trainers.loop.process_synchronization import leaves_read

__all__ = ["ProcessInputs"]


class ProcessInputs:
    """Asks the compiled steps what this process reads.

    Args:
      rows: the examples that this process loads.
      compile: gives the training step for a batch.
      compile_inference: gives a step of inference for a part of a batch.
    """

    def __init__(
        self,
        rows: Rows,
        compile: Callable[[Any], Any],
        compile_inference: Callable[[InferenceKind, InferencePart], Any],
    ) -> None:
        self._rows, self._compile, self._compile_inference = rows, compile, compile_inference

    def leaves_read(self, batch: Any) -> Any:
        """For each leaf of such a batch, whether this process reads it in training."""
        return leaves_read(self._compile(batch), batch)

    def rows_read(self, batch: Any, call: Literal["train"] | InferenceKind = "train") -> Any:
        """Which examples of such a batch this process reads: the rows to load of each leaf.

        With `fit(..., global_batch_size=)` or `train_step(..., global_batch_size=)`, these are all that it passes, in
        this order, as an array of shape (rows, ...). They are the same as the index of the devices' shards in
        `jax.make_array_from_process_local_data`, in one microbatch after another. Processes that divide a dataset among
        themselves by other means (such as grain's `ShardOptions`) may pass any examples in their places: each process
        adds its own to every microbatch.

        Args:
          batch: a whole batch, or its shapes: leaves with `shape` (B, ...) and `dtype`.
          call: what the batch is for. Rows for "evaluate" are those for "train" if the batch can be cut into
            `num_microbatches` parts, but for leaves that only one of the two losses reads.

        Returns:
          A tree like `batch`, of int64 arrays of shape (rows,): indices along the first axis, ascending; empty for a
          leaf that this process does not read. `...` for a scalar, which has no rows: pass it as it is.

        Raises:
          ValueError, TypeError: as `compile`; and for another `call`.

        Example:
          >>> import jax, optax, numpy as np
          >>> from flax import nnx
          >>> from jaxpp_flax import PipelineStage, PipelineTrainer
          >>> model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(0))) for _ in range(2)])
          >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
          ...                           num_stages=2, num_microbatches=2, logging=False)
          >>> trainer.rows_read(jax.ShapeDtypeStruct((6, 4), np.float32))  # one process reads all of them
          array([0, 1, 2, 3, 4, 5])
        """
        if call not in ("train", "evaluate", "predict"):
            raise ValueError(f"rows_read knows no call {call!r}; use 'train', 'evaluate' or 'predict'.")
        if call == "train":
            return self._rows.read(self._compile(batch), batch, self._rows.num_microbatches)
        part = self._rows.inference_parts(jax.tree.map(shape_of, batch), rows_only=True)[0]
        return self._rows.read(self._compile_inference(call, part), batch, part.num_microbatches)
