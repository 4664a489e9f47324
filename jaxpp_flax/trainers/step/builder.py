"""The functions that the trainer compiles: train, evaluate, predict. They are pure, and run under `jax.jit` too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.analyses.work import count_flops
from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.engine.tracing.ir import from_jaxpr, struct_of
from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max, treduce_i, treduce_items
from jaxpp_flax.layers.remat import policy_of
from jaxpp_flax.trainers.data.batch import dtype_of, first_examples, shape_of
from jaxpp_flax.trainers.loss.loss_graph import LossGrowth
from jaxpp_flax.trainers.loss.loss_rule import LossTerms, counted_by, not_zero, read_loss, whole_batch
from jaxpp_flax.trainers.loss.loss_trace import evaluated_growth
from jaxpp_flax.trainers.loss.whole_batch import (
    WholeBatchLoss,
    embedding_operations,
    loss_and_cotangents,
    loss_of_all,
    second_pass,
    summed,
)
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_function
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.facts.unused_parameters import of_used, with_zeros
from jaxpp_flax.trainers.step.metrics import check_apart
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly, MicrobatchLoop
from jaxpp_flax.trainers.step.optimizer_update import Update
from jaxpp_flax.trainers.writes.after_update import AfterUpdate, call_after_update
from jaxpp_flax.trainers.writes.dependencies import NO_WRITES, Writes
from jaxpp_flax.trainers.writes.overwriting import total_weight

StepFunction = Callable[[TrainState, Any], Any]


def _at(batch: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), batch)


def with_leaves(tree: Any, values: Mapping[int, Any]) -> Any:
    """Return the tree with other values at the positions of these leaves."""
    leaves, structure = jax.tree.flatten(tree)
    for i, leaf in values.items():
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _numbered(positions: Sequence[int], values: Sequence[Any]) -> dict[int, Any]:
    return dict(zip(positions, values, strict=True))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sums:
    """What the loop over the microbatches computes, or several such loops.

    Args:
      terms, grads: sums. The gradients are those of the used parameters, or of all of them.
      written, params: what the loss has written, see `Writes`: leaves of the model's state, and parameters, by their
        positions. Leaves that gradients overwrite are among the first.
    """

    terms: LossTerms
    grads: Any
    written: Mapping[int, Any]
    params: Mapping[int, Any]


@dataclass(frozen=True, kw_only=True)
class StepBuilder:
    """Builds functions of `(state, batch)`; batch leaves have shape (num_microbatches, microbatch, ...)."""

    model: ModelAdapter
    update: Update
    loss_fn: Callable[..., Any]
    writes: Writes = NO_WRITES  # what the loss writes into the model
    overwritten: tuple[int, ...] = ()  # the leaves of `model_state` whose gradients are their next values
    weighs: bool = False  # the loss returns a weight
    unused: tuple[str, ...] = ()  # the parameters that the loss does not use
    judge: Callable[[LossGrowth, int], None] | None = None  # takes the loss of an evaluation of several microbatches
    after_update: AfterUpdate | None = None  # changes variables after the optimizer
    remat: Any = None  # None, "full" or a policy: the values of the loss to recompute in backward

    def train(self, loop: MicrobatchLoop) -> StepFunction:
        """Return `step(state, batch) -> (state, metrics)`: one optimizer step on the whole batch."""

        def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
            sums = self.sums(state, batch, loop)
            params, grads = with_zeros(sums.grads, state.params, self.unused, self.update.summand)
            several = isinstance(batch, StackedMicrobatches)
            count = len(batch.items) if several else loop.num_microbatches
            # A mean over microbatches of several shapes is weighed by their examples.
            begun, weighs = replace(state, params=params), self.weighs or not several
            return self.finish(begun, replace(sums, grads=grads), count, tells_weight=weighs)

        return step

    def sums(self, state: TrainState, batch: Any, loop: MicrobatchLoop) -> Sums:
        """Return the first half of a step: what the loop over the microbatches computes."""
        loss, computed = self._in_two_passes(loop), self._computed(state)
        if loss is not None:
            return self._accumulate_in_two_passes(loss, computed, batch, loop)
        known = self._known_divisor(computed, batch, loop) if self.overwritten else None
        return self._accumulate(computed, batch, loop, known)

    def finish(
        self, state: TrainState, sums: Sums, num_microbatches: int, calls: Any = 1, *, tells_weight: bool = True
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Return the second half of a step: the new state and the metrics.

        `sums` have the gradients of all parameters, of so many `calls` of a loop over `num_microbatches`.
        """
        metrics, divisor = whole_batch(sums.terms, calls * self.num_means(num_microbatches))
        if not tells_weight:
            metrics.pop("weight")
        params = with_leaves(state.params, sums.params) if sums.params else None

        def after(params: Any, rest: Any, more: dict[str, Any]) -> tuple[Any, Any]:
            check_apart(metrics, more)
            if self.after_update is None:
                return params, rest
            return call_after_update(
                self.after_update, self.model, params, rest, {**metrics, **more},
                step=state.step, num_microbatches=calls * num_microbatches,
            )  # fmt: skip

        new, more = self.update.apply(
            state, sums.grads, metrics["loss"], 1 if self.overwritten else divisor,
            with_leaves(state.model_state, sums.written), written=params, after=after,
        )  # fmt: skip
        return new, {**metrics, **more}

    def num_means(self, num_microbatches: int) -> int:
        """Return the number of means that a loop adds up: that of the microbatches, or one for the whole batch."""
        return 1 if isinstance(self.loss_fn, WholeBatchLoss) and num_microbatches > 1 else num_microbatches

    def _computed(self, state: TrainState) -> TrainState:
        """Return the state with the parameters in the type of the computation: converted before the loop, once."""
        params, rest = self.model.narrowed(state.params, state.model_state)
        return replace(state, params=params, model_state=rest)

    def computed_shapes(self, state: TrainState) -> TrainState:
        """Return the shapes of what the loss computes with."""
        shapes = jax.tree.map(shape_of, (state.params, state.model_state))
        params, rest = jax.eval_shape(self.model.narrowed, *shapes)
        return replace(state, params=params, model_state=rest)

    def _accumulate(self, state: TrainState, batch: Any, loop: MicrobatchLoop, divisor: Any = None) -> Sums:
        """Return what the loop over the microbatches computes; the loss to differentiate is divided by `divisor`."""
        writes, leaves = self.writes, jax.tree.leaves(state.model_state)

        def body(carry: Sequence[Any], index: Any, microbatch: Any) -> tuple[Sequence[Any], Any]:
            model_state = with_leaves(state.model_state, _numbered(writes.carried, carry))

            def loss_of(params: Any, overwritten: Sequence[Any]) -> tuple[Any, Any]:
                rest = with_leaves(model_state, _numbered(self.overwritten, overwritten))
                output, bound = call_function(
                    self.loss_fn, self.model, params, rest, microbatch,
                    step=state.step, microbatch=loop.number(index), training=True,
                )  # fmt: skip
                terms = read_loss(output)
                if isinstance(batch, StackedMicrobatches):
                    terms = counted_by(terms, first_examples(microbatch)[1].shape[0])
                after = jax.tree.leaves(self.model.rest_of(bound, rest))
                new_params = jax.tree.leaves(self.model.params_of(bound, params))
                last = [new_params[i] for i in writes.params], [after[i] for i in writes.once]
                total = terms.total if divisor is None else terms.total / divisor
                return self.update.scaled(total, state), (terms, [after[i] for i in writes.carried], last)

            if self.remat is not None:  # the engine divides this region into one for each stage
                loss_of = jax.checkpoint(loss_of, policy=policy_of(self.remat))
            differentiated = state.params, [leaves[i] for i in self.overwritten]
            (_, (terms, carry, last)), (grads, overwriting) = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(
                *differentiated
            )
            # The gradients are the last results: `verify` finds them there.
            return carry, (terms, overwriting, last, self.update.summand(of_used(grads, self.unused)))

        before = [leaves[i] for i in writes.carried]
        operations = (Add, Max, Last, Add)
        carried, (terms, overwriting, (params, once), grads) = self._loop(body, before, loop, operations, batch)
        written = (*writes.carried, *writes.once, *self.overwritten), (*carried, *once, *overwriting)
        return Sums(terms=terms, grads=grads, written=_numbered(*written), params=_numbered(writes.params, params))

    def _known_divisor(self, state: TrainState, batch: Any, loop: MicrobatchLoop) -> Any:
        """Return the divisor of the sums over the microbatches, before the loop.

        Overwritten leaves hold the largest gradients of a layer's outputs: these are to be those of the whole batch.
        """
        if not self.weighs:
            return loop.num_microbatches

        def weight_of(microbatch: Any, index: Any) -> Any:
            output, _ = call_function(
                self.loss_fn, self.model, state.params, state.model_state, microbatch,
                step=state.step, microbatch=index, training=True,
            )  # fmt: skip
            return read_loss(output).weight

        return not_zero(total_weight(weight_of, batch, loop.num_microbatches))

    def _in_two_passes(self, loop: MicrobatchLoop) -> WholeBatchLoss | None:
        """Return the loss, if it has two parts and the batch several; one microbatch is the whole batch."""
        return self.loss_fn if isinstance(self.loss_fn, WholeBatchLoss) and loop.num_microbatches > 1 else None

    def _accumulate_in_two_passes(
        self, loss: WholeBatchLoss, state: TrainState, batch: Any, loop: MicrobatchLoop
    ) -> Sums:
        """Return what `_accumulate` returns, with the terms of the whole batch."""
        stacked = self._embed_all(loss, state, batch, loop, training=True)

        def scaled(terms: LossTerms) -> Any:
            total = terms.total / whole_batch(terms, 1)[1] if self.overwritten else terms.total
            return self.update.scaled(total, state)

        terms, cotangents = loss_and_cotangents(loss, stacked, batch, scaled)
        # The gradients of the embeddings are scaled already. The carried leaves begin as in the first pass.
        second = replace(self, loss_fn=second_pass(loss), update=replace(self.update, loss_scale=None))
        sums = second._accumulate(state, (batch, cotangents), loop)
        # The engine would drop a forward whose loss nobody reads, and `remat` recomputes from its marks.
        total, _ = jax.lax.optimization_barrier((terms.total, sums.terms.total))
        return replace(sums, terms=replace(terms, total=total))

    def _embed_all(
        self, loss: WholeBatchLoss, state: TrainState, batch: Any, loop: MicrobatchLoop, *, training: bool
    ) -> Any:
        """Return the embeddings of a `WholeBatchLoss`, stacked by microbatch: a pass without a backward."""
        leaves, carried = jax.tree.leaves(state.model_state), self.writes.carried

        def embed(carry: Sequence[Any], index: Any, microbatch: Any) -> tuple[Sequence[Any], Any]:
            rest = with_leaves(state.model_state, _numbered(carried, carry))
            embeddings, bound = call_function(
                loss.embed_fn, self.model, state.params, rest, microbatch,
                step=state.step, microbatch=loop.number(index), training=training,
            )  # fmt: skip
            after = jax.tree.leaves(self.model.rest_of(bound, rest))
            return [after[i] for i in carried], embeddings

        before = [leaves[i] for i in carried]
        forward = replace(loop, schedule=loop.schedule and ForwardOnly(loop.schedule))
        operations = embedding_operations(embed, before, batch)
        return self._loop(embed, before, forward, operations, batch)[1]

    def count_flops(self, state: TrainState, microbatch: Any) -> float:
        """Count the operations of the loss and its gradients for one microbatch.

        `state` has the shapes of what the loss computes with, and the context has the mesh that a stage sees. What the
        trainer's `remat` recomputes does not count; what a block's own `remat` recomputes does.
        """

        def loss_of(params: Any, rest: Any, step: Any, microbatch: Any, index: Any) -> Any:
            output, _ = call_function(
                self.loss_fn, self.model, params, rest, microbatch, step=step, microbatch=index, training=True
            )
            return read_loss(output).total

        shapes = (state.params, state.model_state, state.step, microbatch)
        index = jax.ShapeDtypeStruct((), jnp.int32)
        return count_flops(from_jaxpr(jax.make_jaxpr(jax.value_and_grad(loss_of))(*shapes, index))[0].equations)

    def evaluate(self, loop: MicrobatchLoop) -> Callable[[TrainState, Any, Any], LossTerms]:
        """Return `evaluate(state, batch, shares) -> LossTerms`: sums over the microbatches, each times its share.

        Writes to the state are dropped. The loss of a whole batch has no shares.
        """

        def evaluate(state: TrainState, batch: Any, shares: Any) -> LossTerms:
            state = self._computed(state)
            if (loss := self._in_two_passes(loop)) is not None:
                stacked = self._embed_all(loss, state, batch, loop, training=False)
                terms = summed(loss_of_all(loss, stacked, batch), loop.num_microbatches)
            else:

                def share_of(index: Any) -> LossTerms:
                    own = read_loss(self._infer(self.loss_fn, state, batch, index))
                    return jax.tree.map(lambda term: term * shares[index], own)

                terms = treduce_i(share_of, loop.num_microbatches, loop.schedule, Add)
            weighs = terms.weight is not None or any(isinstance(value, tuple) for value in terms.metrics.values())
            judges = self.judge is not None and loop.num_microbatches > 1 and loss is None
            if weighs or judges:
                shapes, one = jax.tree.map(_type_of, (state, jax.eval_shape(partial(_at, index=0), batch)))
                growth = evaluated_growth(self.model, self.loss_fn, shapes, one)
                if judges:
                    self.judge(growth, loop.num_microbatches)  # type: ignore[misc]
            return terms

        return evaluate

    def predict(self, loop: MicrobatchLoop, predict_fn: Callable[..., Any]) -> StepFunction:
        """Return `predict(state, batch)` -> outputs stacked by microbatch."""

        def predict(state: TrainState, batch: Any) -> Any:
            state = self._computed(state)

            def body(index: Any) -> Any:
                return self._infer(predict_fn, state, batch, index)

            return treduce_i(body, loop.num_microbatches, loop.schedule, Concat())

        return predict

    def _infer(self, function: Callable[..., Any], state: TrainState, batch: Any, index: Any) -> Any:
        params, rest, microbatch = state.params, state.model_state, _at(batch, index)
        return call_function(
            function, self.model, params, rest, microbatch, step=state.step, microbatch=index, training=False
        )[0]

    def _loop(
        self, body: Any, init: Sequence[Any], loop: MicrobatchLoop, operation: Any, batch: Any
    ) -> tuple[Sequence[Any], Any]:
        # Without a carry, the microbatches have no order.
        once = body if init else lambda *given: body([], *given)[1]
        carry: dict[str, Any] = {"init": list(init)} if init else {}
        if isinstance(batch, StackedMicrobatches):
            results = treduce_items(once, batch, loop.schedule, operation, **carry)
        else:
            each = lambda *given: once(*given, _at(batch, given[-1]))  # noqa: E731
            results = treduce_i(each, loop.num_microbatches, loop.schedule, operation, **carry)
        return results if init else ([], results)


def _type_of(leaf: Any) -> Any:
    return struct_of(jax.typeof(leaf))


def one_of(microbatches: Any) -> Any:
    """Return the shapes of one microbatch."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], dtype_of(x)), microbatches)
