"""The compiled training step as a pure function, for loops of the user's own and of other frameworks."""

from __future__ import annotations

from typing import Any

import jax
import jax.core

from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.trainers.data.batch import describe_batch, signature
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding, compared_rows
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.state.holder import is_gone
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["CompiledStep"]


class CompiledStep:
    """A compiled training step: `state, metrics = step(state, batch)`; `trainer.compiled_step(batch)` returns one.

    It is the program that `fit` and `train_step` run, without what they do around it: the trainer's own state does not
    change, nothing is counted, logged or saved, and a loss that is not finite stops nothing (`Training(on_nonfinite=
    "skip")` is in the program, and skips). The call does not wait for its results.

    The step reuses the memory of the state that it gets, as a function of `jax.jit(..., donate_argnums=0)`: go on with
    the state that it returns. A copy of `jax.tree.map(copy.deepcopy, state)` stays.

    With several processes, every process calls the step with its arrays of one state, in the same order, and with
    batches as `train_step` takes them.

    Args:
      program: the compiled step of the engine, or of JAX for one stage on one device.
      batch: a batch, or its shapes.
      rows: cuts batches into microbatches.
      global_batch_size: as in `PipelineTrainer.fit`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineTrainer
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=1,
      ...                           num_microbatches=2, logging=False)
      >>> batch = jnp.ones((4, 2))
      >>> step = trainer.compiled_step(batch)
      >>> state = trainer.state
      >>> for _ in range(3):
      ...     state, metrics = step(state, batch)
      >>> trainer.set_state(state)  # to evaluate, to save, or to go on with `fit`
      >>> trainer.step
      3
    """

    def __init__(self, program: Any, batch: Any, rows: BatchSharding, global_batch_size: int | None) -> None:
        self.program = program
        self._rows, self._global_batch_size, self._count = rows, global_batch_size, 0
        self._shapes = signature(rows.split(rows.whole(batch, global_batch_size)))
        self._compiled_for = describe_batch(batch)
        self._compared = BatchComparison(rows.mesh, "a compiled step")

    @without_ambient_mesh
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Return the state after an optimizer step on a batch, and the metrics of `train_step`.

        Args:
          state: `trainer.state`, or what another call returned. Its memory is reused.
          batch: leaves of shape (batch, ...), of the shapes and dtypes that the step was compiled for.

        Raises:
          BatchError: for a batch of other shapes or dtypes, or one that lacks the rows that this process reads.
          TypeError: for a state that is no `TrainState`, or is that of another model or optimizer; inside `jax.jit`.
          RuntimeError: for a state that was given to a step before.
        """
        if not isinstance(state, TrainState):
            raise TypeError(
                f"a compiled step got a {type(state).__name__} as its state. It takes `trainer.state`, or the state "
                "that another call returned: `state, metrics = step(state, batch)`."
            )
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, batch))):
            raise TypeError(
                "a compiled step got values that are being traced, as inside `jax.jit` or `jax.grad`. It is compiled "
                "already: call it outside. `trainer.step_function(batch)` is the function that it compiles."
            )
        whole = self._rows.whole(batch, self._global_batch_size)
        microbatches = self._rows.split(whole)
        if signature(microbatches) != self._shapes:
            raise BatchError(
                f"this step was compiled for a batch of {self._compiled_for}, not of {describe_batch(batch)}. Each "
                "shape has a step of its own: `trainer.compiled_step(batch)`; it takes the same state."
            )
        if any(map(is_gone, jax.tree.leaves(state))):
            raise RuntimeError(
                "this state was given to a step before, which reused its memory. Go on with the state that the step "
                "returned: `state, metrics = step(state, batch)`. A copy stays: `jax.tree.map(copy.deepcopy, state)`."
            )
        if whole is not batch:
            microbatches = compared_rows(self.program, batch, microbatches, self._compared)
        else:
            self._compared.before(microbatches)
        state, metrics = self.program(state, microbatches)
        self._count += 1
        self._compared.after(metrics["loss"], self._count)
        return state, metrics
