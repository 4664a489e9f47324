"""The leaves and examples of a batch that this process reads, so that users load only these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxpp_flax.trainers.data.batch import InferencePart, shape_of
from jaxpp_flax.trainers.data.loading import InferenceKind, Rows
from jaxpp_flax.trainers.loop.process_synchronization import leaves_read

__all__ = ["ProcessInputs"]


class ProcessInputs:
    """Finds the inputs that this process reads, from the compiled steps.

    Args:
      rows: the examples that this process loads.
      compile: returns the training step for a batch.
      compile_inference: returns a step of inference for a part of a batch.
    """

    def __init__(
        self,
        rows: Rows,
        compile: Callable[[Any], Any],
        compile_inference: Callable[[InferenceKind, InferencePart], Any],
    ) -> None:
        self._rows, self._compile, self._compile_inference = rows, compile, compile_inference

    def leaves_read(self, batch: Any) -> Any:
        """Return, for each leaf of a batch of these shapes, True if this process reads the leaf in training."""
        return leaves_read(self._compile(batch), batch)

    def rows_read(self, batch: Any, call: Literal["train"] | InferenceKind = "train") -> Any:
        """Return the examples of a batch that this process reads: the rows to load of each leaf.

        With `fit(..., global_batch_size=)` or `train_step(..., global_batch_size=)`, the process passes only these
        rows, in this order, as an array of shape (rows, ...). They are the same as the index of the devices' shards in
        `jax.make_array_from_process_local_data`, in one microbatch after another. Processes may also divide a dataset
        by other means (such as grain's `ShardOptions`) and pass any examples in these places: each process adds its own
        examples to every microbatch.

        Args:
          batch: a whole batch, or its shapes: leaves with `shape` (B, ...) and `dtype`.
          call: the use of the batch. "evaluate" has the rows of "train" if the batch can be cut into `num_microbatches`
            parts, except for leaves that only one of the two losses reads.

        Returns:
          A tree like `batch`, of int64 arrays of shape (rows,): indices along the first axis, ascending; empty for a
          leaf that this process does not read. `...` for a scalar, which has no rows: pass the scalar itself.

        Raises:
          ValueError, TypeError: as `compile`; and for an unknown `call`.

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
