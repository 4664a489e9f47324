"""The two halves of a step as two programs: one adds the gradients of a batch to sums, one updates with the sums.

Sums stay on the ranks that make them, in the type in which a step sums gradients. The state changes in the update
alone: what a loss writes into the model, such as running statistics, waits beside the sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers.errors import LossError, ModelError
from jaxpp_flax.trainers.loss.loss_rule import LossTerms, read_loss, whole_batch
from jaxpp_flax.trainers.model.calling import call_function
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import StepBuilder, Sums, with_leaves
from jaxpp_flax.trainers.step.facts.unused_parameters import with_zeros
from jaxpp_flax.trainers.step.microbatch_loop import MicrobatchLoop

__all__ = ["Accumulation", "Pending", "StatePlaces", "adding", "as_read", "terms_of", "zero_terms", "zeros_on"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Pending:
    """The sums of several calls of `accumulate`, before the update that uses them."""

    sums: Sums
    calls: int

    def __str__(self) -> str:
        return f"the gradients of {self.calls} batch{'' if self.calls == 1 else 'es'}"


@dataclass(frozen=True, eq=False)
class StatePlaces:
    """The places that a training step gives its arguments, without the step: see `StateHolder.place`."""

    in_shardings: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class Accumulation:
    """A compiled program that adds the gradients of a batch to sums.

    Args:
      compiled: takes `(state, microbatches, sums, calls)`, and returns the new sums and the metrics of the batch.
      places: those of the state.
      terms: the shapes of the loss's terms.
      carried: the leaves of the model's state that go from microbatch to microbatch, by their positions.
      zeros: makes the gradients to begin with.
    """

    compiled: Any
    places: StatePlaces
    carried: tuple[int, ...]
    terms: Any
    zeros: Callable[[], Any]

    def __call__(self, pending: Pending | None, state: TrainState, microbatches: Any) -> tuple[Pending, dict[str, Any]]:
        """Run the program, which reuses the memory of the sums before.

        Raises:
          LossError: if the loss returns other metrics than for the batches before.
        """
        if pending is None:
            before = Sums(terms=zero_terms(self.terms), grads=self.zeros(), written={}, params={})
            pending = Pending(sums=before, calls=0)
        elif (told := jax.tree.structure(pending.sums.terms)) != jax.tree.structure(self.terms):
            raise LossError(
                f"the loss returned {jax.tree.structure(self.terms)} for this batch, and {told} for those that "
                "trainer.accumulate has summed before. Return the same weight and metrics for each batch of a step."
            )
        before, leaves = pending.sums, jax.tree.leaves(state.model_state)
        # The program reuses the memory of these: the state keeps its own.
        carried = {i: before.written[i] if i in before.written else copy.deepcopy(leaves[i]) for i in self.carried}
        given = replace(before, written=carried, params={})
        sums, metrics = self.compiled(as_read(state), microbatches, given, np.int32(pending.calls))
        written, params = {**before.written, **sums.written}, {**before.params, **sums.params}
        return Pending(sums=replace(sums, written=written, params=params), calls=pending.calls + 1), metrics


def adding(
    builder: StepBuilder, loop: MicrobatchLoop
) -> Callable[[TrainState, Any, Sums, Any], tuple[Sums, dict[str, Any]]]:
    """Return the first half of a step as a function that adds to the sums of so many `calls` before.

    The result equals that of one loop over the microbatches of all calls: their random keys differ, and each begins
    with what the microbatch before has left.

    Raises:
      ModelError: for leaves that gradients overwrite.
    """
    if builder.overwritten:
        raise ModelError(
            "trainer.accumulate cannot train this model: it has variables that their gradients overwrite (Linen's "
            "`_overwrite_with_gradient`: the scales of fp8 layers). Their values are in units of the loss of the whole "
            "step, which no single call knows. Take such steps with trainer.train_step, with more microbatches."
        )

    def add(state: TrainState, batch: Any, sums: Sums, calls: Any) -> tuple[Sums, dict[str, Any]]:
        own = replace(loop, before=calls * loop.num_microbatches)
        new = builder.sums(replace(state, model_state=with_leaves(state.model_state, sums.written)), batch, own)
        metrics, _ = whole_batch(new.terms, builder.num_means(loop.num_microbatches))
        _, grads = with_zeros(new.grads, state.params, builder.unused, builder.update.summand)
        terms, grads = jax.tree.map(jnp.add, (sums.terms, sums.grads), (new.terms, grads))
        return replace(new, terms=terms, grads=grads), metrics

    return add


def as_read(state: TrainState) -> TrainState:
    """Return the part of a state that the first half of a step reads."""
    return replace(state, opt_state=(), ema=None)


def terms_of(builder: StepBuilder, state: TrainState, microbatch: Any) -> LossTerms:
    """Return the shapes of the terms of a loss; nothing is computed."""

    def terms(state: TrainState, microbatch: Any) -> LossTerms:
        return read_loss(
            call_function(
                builder.loss_fn, builder.model, state.params, state.model_state, microbatch,
                step=state.step, microbatch=jnp.int32(0), training=True,
            )[0]
        )  # fmt: skip

    return jax.eval_shape(terms, state, microbatch)


def zero_terms(shapes: Any) -> Any:
    """Return the terms to begin with."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def zeros_on(shapes: Any, shardings: Any) -> Callable[[], Any]:
    """Return a function that makes zeros, each leaf in parts on its ranks; without shardings, on the default device.

    Example:
      >>> zeros_on({"w": jax.ShapeDtypeStruct((2,), jnp.float32)}, None)()
      {'w': Array([0., 0.], dtype=float32)}
    """
    leaves, structure = jax.tree.flatten(shapes)
    if shardings is None:
        return jax.jit(partial(_zeros, leaves, structure))
    places: list[MpmdSharding] = jax.tree.leaves(shardings)
    mesh = places[0].mpmd_mesh
    own = {rank: [i for i, to in enumerate(places) if rank in to.ranks] for rank in mesh.local_ranks}
    makers = {
        rank: jax.jit(
            partial(_zeros, [leaves[i] for i in numbers], jax.tree.structure(numbers)),
            out_shardings=[places[i].local_sharding(rank) for i in numbers],
        )
        for rank, numbers in own.items()
    }

    def make() -> Any:
        parts: list[dict[int, jax.Array]] = [{} for _ in leaves]
        for rank, maker in makers.items():
            for i, part in zip(own[rank], maker(), strict=True):
                parts[i][rank] = part
        arrays = [
            MpmdArray(part, to, shape=leaf.shape, dtype=leaf.dtype)
            for part, to, leaf in zip(parts, places, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, arrays)

    return make


def _zeros(leaves: Any, structure: Any) -> Any:
    return jax.tree.unflatten(structure, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves])
