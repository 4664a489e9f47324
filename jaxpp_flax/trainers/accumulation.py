"""The trainer's step in two calls, for loops of other frameworks: gradients of several batches, then one update."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.trainers.data.batch_sharding import compared_rows
from jaxpp_flax.trainers.metrics.clock import timed
from jaxpp_flax.trainers.state.holder import is_gone
from jaxpp_flax.trainers.steps import StepCalls, check_one_shape

__all__ = ["AccumulationCalls"]


class AccumulationCalls(StepCalls):
    """The methods of `PipelineTrainer` that take a step in two halves. Every process makes these calls."""

    @without_ambient_mesh
    @timed("dispatch")
    def accumulate(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]:
        """Add the gradients of a batch to those of the calls before; the state does not change until `update`.

        A step of K calls equals one step of a trainer with K times as many microbatches, on the K batches one after
        another: with mean losses the mean of the calls' losses, whatever the sizes of their batches; with
        `(loss_sum, weight)` the sum of all losses over the sum of all weights. Random keys differ from call to call,
        and running statistics go on from call to call. The sums stay on the devices of their stages.

        Between this call and `update`, all other calls see the state before the step: `evaluate`, `predict`, and
        `save`, whose checkpoint holds no gradients. What would change the state (`fit`, `restore`, ...) is refused.

        Args:
          batch, global_batch_size: as in `train_step`. Batches of a step may have other shapes; each shape compiles
            once.

        Returns:
          The metrics of this batch, as its loss returns them, and at least `loss`. The call waits for the batch two
          calls before.

        Raises:
          ModelError: for a model with variables that their gradients overwrite.
          RuntimeError: if a call before did not end, so that its sums are lost.
          BatchError, NonFiniteLossError, ValueError, TypeError: as `train_step`.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from flax import nnx
          >>> from jaxpp_flax import PipelineTrainer
          >>> trainer = PipelineTrainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
          ...                           lambda model, x: (model(x) ** 2).mean(), num_stages=1, num_microbatches=2,
          ...                           logging=False)
          >>> losses = [float(trainer.accumulate(scale * jnp.ones((4, 2)))["loss"]) for scale in (1.0, 2.0)]
          >>> abs(float(trainer.update()["loss"]) - sum(losses) / 2) < 1e-6, trainer.step
          (True, 1)
        """
        self._check_ready("accumulate")
        self._check_sums("accumulate")
        check_one_shape("accumulate", batch)
        rows, trained_on = self.steps.rows, self.steps.trained_on
        whole = rows.whole(batch, global_batch_size)
        microbatches = rows.split(whole)
        add = self.steps.for_accumulation(microbatches, lambda known: self._announce_shapes(whole, known, 1))
        if self.checkpoints.store is not None:
            self.checkpoints.store.check()
        if whole is not batch:
            microbatches = compared_rows(add.compiled, batch, microbatches, trained_on)
        else:
            trained_on.before(microbatches)
        self.pending, metrics = add(self.pending, self.held.memory, microbatches)
        trained_on.after(metrics["loss"], None)
        with self.clock.part("device"):
            self.steps.under_way.add(self.step + 1, metrics)
        return metrics

    @without_ambient_mesh
    @timed("dispatch")
    def update(self) -> dict[str, Any]:
        """Take one optimizer step with the gradients that `accumulate` has summed.

        Returns:
          The metrics of all batches of the step, as `train_step` returns them.

        Raises:
          RuntimeError: if there are no gradients.
          NonFiniteLossError: see `train_step`.
          CheckpointSaveError: if a save in the background has failed since the last step.
        """
        self._check_ready("update")
        pending = self.pending
        if pending is None:
            raise RuntimeError(
                "trainer.update has no gradients: nothing was accumulated since the last update. Call "
                "trainer.accumulate(batch) before, once or several times."
            )
        self._check_sums("update")
        if self.checkpoints.store is not None:
            self.checkpoints.store.check()
        program = self.steps.for_update(pending)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            results = program(self.held.memory, pending.sums, np.int32(pending.calls))
        self.pending = None
        return self._finish(results)

    def zero_grad(self) -> None:
        """Drop the gradients that `accumulate` has summed, and what the loss has written with them."""
        self.pending = None
        self.steps.under_way.drop(self.step + 1)

    def _check_sums(self, call: str) -> None:
        """Refuse sums whose memory was reused by a call that did not end."""
        pending = self.pending
        if pending is not None and any(map(is_gone, jax.tree.leaves(pending.sums))):
            raise RuntimeError(
                f"trainer.{call}: {pending} are lost, since a call "
                "that reused their memory did not end. Call trainer.zero_grad(), and accumulate the step's batches "
                "again."
            )
