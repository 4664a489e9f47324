"""The builder of a step for each structure of a batch: what its loss writes, and does not use, depends on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.trainers.data.batch import describe_batch, signature
from jaxpp_flax.trainers.errors import LossError
from jaxpp_flax.trainers.loss.loss_graph import LossGrowth
from jaxpp_flax.trainers.loss.loss_trace import LossTrace, check_reads, check_written, is_separable, trace_loss
from jaxpp_flax.trainers.loss.loss_warnings import (
    warn_of_evaluation,
    warn_of_microbatches,
    warn_of_precision,
    warn_of_states,
)
from jaxpp_flax.trainers.loss.whole_batch import WholeBatchLoss, warn_of_mixing
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import StepBuilder, one_of
from jaxpp_flax.trainers.step.facts.unused_parameters import report_unused

__all__ = ["StepBuilderCache"]


class StepBuilderCache:
    """Returns the builder for a batch. The leaves that a loss writes or does not use depend on the batch."""

    def __init__(self, untraced: StepBuilder, num_microbatches: int, stage: StageContext) -> None:
        self.untraced, self._num_microbatches, self._stage = untraced, num_microbatches, stage
        self._traced: dict[Any, LossTrace] = {}
        self._has_warned = self._has_warned_of_states = self._has_warned_of_precision = False
        self._has_warned_of_evaluation = False
        self._reported: set[str] = set()  # unused parameters
        self._separable: dict[Any, bool] = {}

    @property
    def has_warned_of_microbatches(self) -> bool:
        """True if a warning has said that the loss of the microbatches is not that of the whole batch."""
        return self._has_warned

    @property
    def has_warned_of_states(self) -> bool:
        """True if a warning has said that a step leaves other variables than a call with the whole batch."""
        return self._has_warned_of_states or any(found.batch_statistics for found in self._traced.values())

    def for_training(self, state: TrainState, microbatches: Any) -> StepBuilder:
        """Return the builder for batches with the structure, shapes and dtypes of `microbatches`."""
        if isinstance(microbatches, StackedMicrobatches):
            found = self._trace_each(state, microbatches)
        else:
            found = self.trace(state, microbatches)
        return replace(
            self.untraced, writes=found.writes, overwritten=found.overwritten, weighs=found.weighs, unused=found.unused
        )

    def keeps_order(self, state: TrainState, batch: StackedMicrobatches) -> bool:
        """Return whether the loss depends on the order of the microbatches: by states, or by random keys."""
        found = self._trace_each(state, batch)
        return bool(found.writes.carried) or found.numbered

    def _trace_each(self, state: TrainState, batch: StackedMicrobatches) -> LossTrace:
        """Trace the training loss for each shape of microbatches: what one step does is the same for all of them.

        Raises:
          LossError: if the loss compares the examples of the whole batch, or does something else for another shape.
        """
        if isinstance(self.untraced.loss_fn, WholeBatchLoss):
            raise LossError(
                "a WholeBatchLoss compares the examples of a whole batch, which Microbatches are not. "
                "Pad the batch to one length and pass one pytree, or compare the examples of each microbatch alone."
            )
        shapes = {signature(item): item for item in (*batch.items, *batch.further)}
        count = max(self._num_microbatches, len(batch.items))
        traces = {shape: self.trace(state, item, count) for shape, item in shapes.items()}
        first, *others = traces
        for other in others:
            if _of_step(traces[other]) != _of_step(traces[first]):
                raise LossError(
                    "the loss writes other variables, or uses other parameters, for microbatches of "
                    f"{describe_batch(one_of(shapes[other]))} than for those of "
                    f"{describe_batch(one_of(shapes[first]))}. One step does the same for all its microbatches: let "
                    "the loss not depend on the shapes in this way."
                )
        if traces[first].overwritten:
            raise LossError(
                "the loss overwrites variables with their gradients (the scales of fp8 layers), in units of the whole "
                "batch's loss, which is not known before the last of several Microbatches. Pass batches of one shape."
            )
        return traces[first]

    def trace(self, state: TrainState, microbatches: Any, num_microbatches: int | None = None) -> LossTrace:
        """Trace the training loss for such batches; each structure of a batch is traced once."""
        count = num_microbatches or self._num_microbatches
        key = signature(microbatches), count > 1  # one alone is the whole batch
        if key not in self._traced:
            one = one_of(microbatches)
            model, loss_fn = self.untraced.model, self.untraced.loss_fn
            computed = self.untraced.computed_shapes(state)
            tracing = partial(trace_loss, model, loss_fn, num_microbatches=count)
            found = self._stage.trace(tracing, computed, one)
            check_written(found, state, computed, count)
            if found.overwritten:
                self._stage.trace(partial(check_reads, model, loss_fn, count), computed, one)
            if isinstance(loss_fn, WholeBatchLoss):  # its comparisons see the whole batch
                found = replace(found, divided=None, mixed=None, growing=None)
                if count > 1 and not self._has_warned:
                    mixing = partial(warn_of_mixing, loss_fn, model, count)
                    self._has_warned = self._stage.trace(mixing, computed, one)
            self._has_warned = self._has_warned or warn_of_microbatches(found, count)
            self._has_warned_of_states = self._has_warned_of_states or warn_of_states(found, count)
            self._has_warned_of_precision = self._has_warned_of_precision or warn_of_precision(found, model.compute)
            if not self._reported.issuperset(found.unused):
                report_unused(found.unused, state.params)
                self._reported.update(found.unused)
            self._traced[key] = found
        return self._traced[key]

    def count_flops(self, state: TrainState, microbatches: Any) -> float:
        """Count the operations of the loss and its gradients for such batches."""
        computed = self.untraced.computed_shapes(state)
        if isinstance(microbatches, StackedMicrobatches):
            return sum(self.count_flops(state, item) for item in microbatches.items) / self._num_microbatches
        return self._num_microbatches * self._stage.trace(self.untraced.count_flops, computed, one_of(microbatches))

    def for_inference(self, loss_fn: Callable[..., Any] | None = None) -> StepBuilder:
        """Return a builder without carried leaves, by default with the training loss; nothing is traced."""
        if loss_fn is None:
            return self.untraced
        told = self._has_warned and loss_fn is self.untraced.loss_fn
        return replace(self.untraced, loss_fn=loss_fn, judge=None if told else self._judge)

    def is_separable(self, loss_fn: Callable[..., Any], state: TrainState, one: Any) -> bool:
        """Return whether each example counts for itself in evaluations of a loss; `one` has the shapes of a microbatch.

        A trainer has one such loss. It is traced once for each structure of a batch.
        """
        key, untraced = signature(one), self.untraced
        if key not in self._separable:
            tracing = partial(is_separable, untraced.model, loss_fn)
            compares = isinstance(loss_fn, WholeBatchLoss)
            self._separable[key] = not compares and self._stage.trace(tracing, untraced.computed_shapes(state), one)
        return self._separable[key]

    def _judge(self, growth: LossGrowth, num_microbatches: int) -> None:
        """Warn once of a loss of evaluations that is not that of the whole batch."""
        if not self._has_warned_of_evaluation:
            self._has_warned_of_evaluation = warn_of_evaluation(growth, num_microbatches)


def _of_step(trace: LossTrace) -> tuple[Any, ...]:
    """Return what a step does of what a loss does."""
    return trace.writes, trace.overwritten, trace.weighs, trace.unused
