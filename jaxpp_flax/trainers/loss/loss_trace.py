"""Trace a loss function before anything is compiled: find the state it writes and the parameters it uses.

The loss is traced for a microbatch, and for one with twice as many examples: what differs says whether the mean over
the microbatches is the loss of the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.data.batch import resized, shape_of
from jaxpp_flax.trainers.errors import LossError, ModelError
from jaxpp_flax.trainers.loss.loss_graph import PARAMETERS, LossGraph, LossGrowth, used_inputs
from jaxpp_flax.trainers.loss.loss_rule import read_loss
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_function
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.model.wide_products import wide_products
from jaxpp_flax.trainers.state.in_place import Contents
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.writes.dependencies import Writes, find_writes
from jaxpp_flax.trainers.writes.overwriting import check_overwritten
from jaxpp_flax.trainers.writes.second_call import model_after, same_program
from jaxpp_flax.trainers.writes.structure import Changes, changes_of, check_types

_THE_CALL = "the loss's call of the model"


@dataclass(frozen=True, kw_only=True)
class LossTrace:
    """The properties of a loss function for microbatches of one structure.

    All leaves of `model_state` that the loss function does not write (frozen parameters, keys) are constants of the
    loop.
    """

    writes: Writes  # the leaves of `model_state` and the parameters that the loss function writes
    overwritten: tuple[int, ...]  # the leaves of `model_state` whose gradients are their next values
    weighs: bool  # the loss returns a weight
    unused: tuple[str, ...]  # the paths of parameters that the loss does not depend on
    batch_statistics: tuple[str, ...]  # the paths of the carried leaves that are statistics of a batch
    divided: str | None = None  # the place where a mean loss is divided by a number that depends on the examples
    mixed: str | None = None  # the place where the loss mixes examples in another way
    growing: str | None = None  # how the loss grows with the number of examples, if not as a mean
    moved: tuple[str, ...] = ()  # the paths of carried leaves that a call with the whole batch leaves with other values
    numbered: bool = False  # the loss depends on the number of the microbatch: random keys do
    wide: str | None = None  # of its matrix products, how many have a wider type than they are to have, and where


def trace_graph(
    model: ModelAdapter,
    loss_fn: Callable[..., Any],
    state: TrainState,
    microbatch: Any,
    *,
    training: bool = True,
    checked: bool = True,
) -> LossGraph:
    """Trace the loss function for microbatches of this structure; nothing is computed.

    Unless `checked`, changes that a training cannot keep are not looked for: a trace for another size has been.

    Raises:
      ModelError: if the call changes more of the model than values, and the next call would differ.
    """
    leaves, tree = jax.tree.flatten(state.model_state)
    pairs: list[tuple[bool, tuple[str, ...], tuple[str, ...]]] = []
    changes: list[Changes | None] = []
    contents: list[Contents] = []

    def run(
        leaves: Sequence[Any], params: Any, step: Any, index: Any, batch: Any, made: Sequence[Any] = ()
    ) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        own, rest = model, jax.tree.unflatten(tree, leaves)
        given = rest
        if changes and changes[0] is not None:  # the second call
            own, given = model_after(own, rest, changes[0], made)  # type: ignore[arg-type]
        numbers = {"step": step, "microbatch": index, "training": training}
        if checked and training:
            before = own.bind(params, given, **numbers)
            contents.append(Contents(before))
        output, bound = call_function(loss_fn, own, params, given, batch, **numbers, restores=not contents)
        terms = read_loss(output, differentiated=training)
        weights = {name: value[1] for name, value in terms.metrics.items() if isinstance(value, tuple)}
        pairs.append((terms.weight is not None, tuple(weights), tuple(terms.metrics)))
        if not training:  # what an evaluation writes is dropped
            values = [value[0] if isinstance(value, tuple) else value for value in terms.metrics.values()]
            return leaves, [terms.total, terms.weight, *weights.values()], values
        after = own.rest_of(bound, rest), own.params_of(bound, params)
        if checked:
            changes.append(changes_of(bound, before, _THE_CALL, contents[-1]))
            if changes[0] is not None and changes[0].graphdef is None:  # a Linen model
                raise ModelError(changes[0].message)
            check_types(after[0], rest, _THE_CALL)
            check_types(after[1], params, _THE_CALL)
        return jax.tree.leaves(after[0]), [terms.total, terms.weight, *weights.values()], jax.tree.leaves(after[1])

    arguments = leaves, state.params, state.step, jax.ShapeDtypeStruct((), jnp.int32), microbatch
    jaxpr = _traced(run, arguments, changes, contents)
    graph, constants = from_jaxpr(jaxpr)
    return LossGraph(
        graph=graph,
        constants=constants,
        num_states=len(leaves),
        num_parameters=len(jax.tree.leaves(state.params)),
        is_pair=pairs[-1][0],
        weighed=pairs[-1][1],
        metrics=pairs[-1][2],
    )


def _traced(
    run: Callable[..., Any], arguments: Sequence[Any], changes: Sequence[Changes | None], contents: Sequence[Contents]
) -> Any:
    """Return the jaxpr of a call; if it changes more than values, trace also the next call, which must be the same.

    `run` notes what it changes, and what attributes held before. These are put back.
    """
    try:
        jaxpr = jax.make_jaxpr(run)(*arguments)
        if changes and changes[0] is not None:
            made = jax.tree.map(shape_of, [*changes[0].made.values()])
            try:
                second = jax.make_jaxpr(run)(*arguments, made)
            except jax.errors.UnexpectedTracerError as error:  # it reads an array that the first call has left
                raise ModelError(changes[0].message) from error
            if changes[1] is not None or not same_program(jaxpr, second):
                raise ModelError(changes[0].message)
        return jaxpr
    finally:
        for before in reversed(contents):
            before.restore()


def trace_loss(
    model: ModelAdapter, loss_fn: Callable[..., Any], state: TrainState, microbatch: Any, *, num_microbatches: int = 1
) -> LossTrace:
    """Return what a trace tells of the loss function for microbatches of this structure; nothing is computed.

    `state` and `microbatch` are shapes; they have the types, and the context has the mesh, that a stage sees.

    Raises:
      LossError: if a weight is none.
      ModelError: if a state has a row for each example, and there are several microbatches.
    """

    def trace(microbatch: Any, checked: bool = False) -> LossGraph:
        return trace_graph(model, loss_fn, state, microbatch, checked=checked)

    try:
        loss = trace(microbatch, checked=True)
    except (TypeError, ValueError) as error:
        if num_microbatches > 1 and (found := _states_of_whole_batch(trace, state, microbatch, num_microbatches)):
            raise ModelError(_state_of_examples(found, num_microbatches)) from error
        raise
    small, large = _other_sizes(trace, loss, microbatch) if num_microbatches > 1 or loss.weighed else (loss, None)
    frozen = model.frozen_in(state.model_state)
    is_frozen = [path in frozen for path in flatten(state.model_state)[0]]
    writes = find_writes(loss.graph, len(loss.constants), is_frozen, loss.num_parameters)
    statistics = _normalising(model, small, writes, state)
    growth = LossGrowth.of(small, large, _tagged(writes, statistics, state))
    _check_weights(loss, growth, state.params)
    if num_microbatches > 1 and growth.of_examples:
        found = _named(state.model_state, growth.of_examples)
        raise ModelError(_state_of_examples(found, num_microbatches))
    paths = _paths(state.model_state)
    overwritten = model.overwritten_by_gradients(state.model_state)
    used = loss.used_parameters(loss.num_states)
    return LossTrace(
        writes=writes,
        overwritten=tuple(i for i, is_one in enumerate(overwritten) if is_one),
        weighs=loss.is_pair,
        unused=tuple(path for path, is_used in zip(_paths(state.params), used, strict=False) if not is_used),
        batch_statistics=tuple(path for i, path in enumerate(paths) if i in statistics),
        divided=growth.divided,
        mixed=growth.mixed,
        growing=growth.text,
        moved=tuple(paths[i] for i in growth.moved),
        numbered=loss.is_numbered,
        wide=None if model.compute is None else wide_products(loss.graph, model.compute),
    )


def evaluated_growth(
    model: ModelAdapter, loss_fn: Callable[..., Any], state: TrainState, microbatch: Any
) -> LossGrowth:
    """Return how the loss of an evaluation grows with the number of examples.

    Raises:
      LossError: as `trace_loss`.
    """

    def trace(microbatch: Any) -> LossGraph:
        return trace_graph(model, loss_fn, state, microbatch, training=False)

    loss = trace(microbatch)
    growth = LossGrowth.of(*_other_sizes(trace, loss, microbatch), set())
    _check_weights(loss, growth, state.params)
    return growth


def is_separable(model: ModelAdapter, loss_fn: Callable[..., Any], state: TrainState, microbatch: Any) -> bool:
    """Return whether `LossGraph.is_separable` of the loss of an evaluation."""
    size = next(leaf.shape[0] for leaf in jax.tree.leaves(microbatch) if leaf.shape)
    try:
        return trace_graph(
            model, loss_fn, state, microbatch if size > 1 else resized(microbatch, 2), training=False
        ).is_separable
    except Exception:  # the user's function may raise anything for a size that it does not expect
        return False


def _other_sizes(
    trace: Callable[[Any], LossGraph], loss: LossGraph, microbatch: Any
) -> tuple[LossGraph, LossGraph | None]:
    """Return the loss of some examples and of twice as many; the second is None if it can be traced for one size."""
    size = loss.num_examples
    few = max(size, 2)  # a single example is broadcast
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = loss if size == few else trace(resized(microbatch, few))
            return small, trace(resized(microbatch, 2 * few))
    except Exception:  # the user's function may raise anything for a size that it does not expect
        return loss, None


def _normalising(model: ModelAdapter, loss: LossGraph, writes: Writes, state: TrainState) -> set[int]:
    """Return the states that microbatches pass on and that are statistics which normalise their own batch."""
    declared, followed = model.batch_statistics(state.model_state), loss.followed
    is_known = loss.num_examples > 1  # in a single example, nobody knows which dimension runs over the examples
    return {i for i in writes.carried if declared[i] and (followed.normalises[i] or not is_known)}


def _tagged(writes: Writes, statistics: set[int], state: TrainState) -> set[int]:
    """Return the states that microbatches pass on, without statistics that normalise their batch, and metrics."""
    kinds = (nnx.Intermediate, nnx.metrics.MetricState)
    variables = jax.tree.leaves(state.model_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    known = [isinstance(variable, kinds) for variable in variables for _ in jax.tree.leaves(variable)]
    return {i for i in writes.carried if i not in statistics and not known[i]}


def _check_weights(loss: LossGraph, growth: LossGrowth, params: Any) -> None:
    """Refuse a weight that depends on parameters, or is a mean of the data.

    That of a metric may depend on parameters if it is a count, such as of the hits.
    """
    if growth.unfit and PARAMETERS not in growth.weights[0].reads:
        raise LossError(
            "the loss function returned a pair (loss_sum, weight) whose second value is a mean over the examples: this "
            "is no weight. A weight is a number of examples or tokens, such as `mask.sum()`, and the loss_sum the sum "
            'of their losses. Return values to report by name: `(loss, {"mean": mean})`.'
        )
    names = [*([None] if loss.is_pair else []), *loss.weighed]
    for position, (name, weight) in enumerate(zip(names, growth.weights, strict=True), loss.num_states + 1):
        if PARAMETERS not in weight.reads:
            continue
        paths = [p for p, used in zip(_paths(params), loss.used_parameters(position), strict=False) if used]
        depends = f"depends on the trained parameters ({listed(paths, 3, str)})"
        if name is None:
            raise LossError(
                f"the loss function returned a pair (loss_sum, weight) whose second value {depends}: this is no "
                "weight. A weight is a number of examples or tokens, counted in the data. Return values to report, "
                'which `has_aux=True` takes in plain JAX, by name: `(loss, {"accuracy": accuracy})`.'
            )
        if growth.fixed[position - loss.num_states - 1]:
            raise LossError(
                f"the loss function returned the metric {name!r} as a pair (sum, weight) whose second value {depends}, "
                "and is no sum over the examples: this is no weight. Return each value by a name of its own: "
                f'`(loss, {{{name!r}: value, "accuracy": accuracy}})`.'
            )


def _states_of_whole_batch(
    trace: Callable[[Any], LossGraph], state: TrainState, microbatch: Any, num_microbatches: int
) -> str | None:
    """Name the states with a row for each example of the batch, if the loss takes the whole batch alone."""
    size = next(leaf.shape[0] for leaf in jax.tree.leaves(microbatch) if leaf.shape) * num_microbatches
    leaves = jax.tree.leaves(state.model_state)
    rows = [i for i, leaf in enumerate(leaves) if size in leaf.shape]
    if not rows:
        return None
    try:
        loss = trace(resized(microbatch, size))
    except Exception:  # the rows are not the reason
        return None
    used = used_inputs(loss.graph, [True] * len(loss.graph.outputs))[len(loss.constants) :]
    before = loss.graph.inputs[len(loss.constants) :]
    return _named(state.model_state, [i for i in rows if used[i] and loss.graph.outputs[i] is not before[i]]) or None


def _named(tree: Any, positions: Sequence[int]) -> str:
    paths, leaves = _paths(tree), jax.tree.leaves(tree)
    return listed([f"{paths[i]} of shape {tuple(leaves[i].shape)}" for i in positions], 3, str)


def _state_of_examples(found: str, num_microbatches: int) -> str:
    return (
        f"the loss reads and writes a state with a row for each example, such as the hidden state of a recurrent "
        f"network: {found}. A step calls the loss for {num_microbatches} microbatches one after another, so each would "
        "get the rows of other examples. Start the state anew in each call, let the batch hold it (batch['state'], and "
        "return the new one in `predict`), or use num_microbatches=1."
    )


def _paths(tree: Any) -> list[str]:
    return [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_reads(
    model: ModelAdapter, loss_fn: Callable[..., Any], num_microbatches: int, state: TrainState, microbatch: Any
) -> None:
    """Refuse a loss that reads a variable at several places whose gradient is its next value."""

    def loss_of(rest: Any, params: Any, step: Any, index: Any, batch: Any) -> Any:
        output, _ = call_function(loss_fn, model, params, rest, batch, step=step, microbatch=index, training=True)
        return read_loss(output).total

    check_overwritten(model, loss_of, num_microbatches, state, microbatch)


def check_written(trace: LossTrace, stored: TrainState, computed: TrainState, num_microbatches: int) -> None:
    """Refuse a loss that writes a parameter of which it has a copy in the type of the computation.

    Refuse also one that writes another value into a trained parameter in each of several microbatches.
    """
    writes = trace.writes
    for kind, written, of, used_of in (
        ("frozen", {*writes.carried, *writes.once}, stored.model_state, computed.model_state),
        ("trained", {*writes.params}, stored.params, computed.params),
    ):
        paths, leaves = _paths(of), zip(jax.tree.leaves(of), jax.tree.leaves(used_of), strict=True)
        converted = [i for i, (kept, used) in enumerate(leaves) if kept.dtype != used.dtype]
        if rounded := sorted(paths[i] for i in written & {*converted}):
            raise ModelError(
                f"the model's call writes the {kind} parameter {listed(rounded, 3, str)}, but with precision= it "
                "computes with a copy in a narrower dtype, so the written values would be rounded. Keep these values "
                "in a variable of another type (NNX) or collection (Linen), or write them once a step: "
                "Training(after_update=)."
            )
    if num_microbatches > 1 and writes.varying:
        paths = _paths(stored.params)
        raise ModelError(
            f"the model's call writes the trained parameter {listed([paths[i] for i in writes.varying], 3, str)}, and "
            f"the value depends on the microbatch: on its examples, on random numbers, or on state that they move. So "
            f"{num_microbatches} microbatches write {num_microbatches} values, where one call for the whole batch "
            "writes one. Write it once a step, from sums over the batch: Training(after_update=); or use "
            "num_microbatches=1."
        )
