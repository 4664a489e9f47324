"""Trace a loss function before anything is compiled: find the state it writes and the parameters it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.messages import listed, warn_user
from jaxpp_flax.trainers.data.batch import shape_of
from jaxpp_flax.trainers.data.joined_examples import Joins, find_joins
from jaxpp_flax.trainers.errors import BatchStatisticsWarning, MicrobatchLossWarning, ModelError, PrecisionWarning
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_function
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.model.wide_products import wide_products
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.loss import read_loss
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
    wide: str | None = None  # of its matrix products, how many have a wider type than they are to have, and where


def trace_loss(model: ModelAdapter, loss_fn: Callable[..., Any], state: TrainState, microbatch: Any) -> LossTrace:
    """Trace the loss function for microbatches of this structure; nothing is computed.

    `state` and `microbatch` are shapes; they have the types, and the context has the mesh, that a stage sees.
    """
    leaves, tree = jax.tree.flatten(state.model_state)
    is_pair: list[bool] = []
    changes: list[Changes | None] = []

    def run(
        leaves: Sequence[Any], params: Any, step: Any, index: Any, batch: Any, made: Sequence[Any] = ()
    ) -> tuple[Sequence[Any], Any, Sequence[Any]]:
        own, rest = model, jax.tree.unflatten(tree, leaves)
        given = rest
        if changes and changes[0] is not None:  # the second call
            own, given = model_after(own, rest, changes[0], made)  # type: ignore[arg-type]
        numbers = {"step": step, "microbatch": index, "training": True}
        output, bound = call_function(loss_fn, own, params, given, batch, **numbers)
        terms = read_loss(output, differentiated=True)
        is_pair.append(terms.weight is not None)
        changes.append(changes_of(bound, own.bind(params, given, **numbers), _THE_CALL))
        if changes[0] is not None and changes[0].graphdef is None:  # a Linen model
            raise ModelError(changes[0].message)
        after, new_params = own.rest_of(bound, rest), own.params_of(bound, params)
        check_types(after, rest, _THE_CALL)
        check_types(new_params, params, _THE_CALL)
        return jax.tree.leaves(after), terms.total, jax.tree.leaves(new_params)

    arguments = leaves, state.params, state.step, jax.ShapeDtypeStruct((), jnp.int32), microbatch
    jaxpr = jax.make_jaxpr(run)(*arguments)
    if changes[0] is not None:
        made = jax.tree.map(shape_of, [*changes[0].made.values()])
        second = jax.make_jaxpr(run)(*arguments, made)
        if changes[1] is not None or not same_program(jaxpr, second):
            raise ModelError(changes[0].message)
    graph, consts = from_jaxpr(jaxpr)
    inputs, paths = graph.inputs[len(consts) :], _paths(state.params)
    writes = find_writes(graph, len(consts), model.frozen_parameters(state.model_state), len(paths))
    of_loss = [i == len(leaves) for i in range(len(graph.outputs))]
    used = used_inputs(graph, of_loss)[len(consts) + len(leaves) :]
    statistics = model.batch_statistics(state.model_state)
    overwritten = model.overwritten_by_gradients(state.model_state)
    joins = _joins_of_loss(graph, inputs[-len(jax.tree.leaves(microbatch)) :], len(leaves))
    return LossTrace(
        writes=writes,
        overwritten=tuple(i for i, is_one in enumerate(overwritten) if is_one),
        weighs=is_pair[-1],
        unused=tuple(path for path, is_used in zip(paths, used, strict=False) if not is_used),
        batch_statistics=tuple(
            path for i, path in enumerate(_paths(state.model_state)) if i in writes.carried and statistics[i]
        ),
        divided=None if is_pair[-1] else joins.divided,  # a weight may make up for a quotient in the sum
        mixed=joins.mixed,
        wide=None if model.compute is None else wide_products(graph, model.compute),
    )


def _joins_of_loss(graph: Graph, batch: Sequence[Value], position: int) -> Joins:
    """Return how the loss, an output of the graph, joins examples; scalars of a batch are constants."""
    examples = [leaf for leaf in batch if leaf.aval.shape]
    return find_joins(graph, examples, examples[0].aval.shape[0])[position]


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


def warn_of_microbatches(trace: LossTrace, num_microbatches: int) -> bool:
    """Warn of what makes the loss of the microbatches another one than that of the whole batch; return whether."""
    if num_microbatches == 1:
        return False
    if trace.batch_statistics:
        _warn_of_batch_statistics(trace.batch_statistics, num_microbatches)
    mixed = None if trace.batch_statistics else trace.mixed  # BatchNorm mixes examples: that warning has said so
    if trace.divided or mixed:
        _warn_of_joins(trace.divided, mixed, num_microbatches)
    return bool(trace.batch_statistics or trace.divided or mixed)


def warn_of_precision(trace: LossTrace, compute: Any) -> bool:
    """Warn of a model that does not compute in the type that it is to compute in; return whether."""
    if trace.wide is None:
        return False
    name = jnp.dtype(compute).name
    warn_user(
        f"precision={name!r}, but {trace.wide}: a layer that sets its own dtype keeps it. Make the model with "
        f"dtype={name!r}, or leave its dtype out. If you intend this, ignore the category "
        "jaxpp_flax.trainers.PrecisionWarning.",
        PrecisionWarning,
    )
    return True


def _warn_of_batch_statistics(paths: Sequence[str], num_microbatches: int) -> None:
    """Warn that the named batch statistics are computed from one microbatch."""
    shown = listed(paths, 3, str)
    warn_user(
        f"the loss writes statistics of the batch ({shown}). In each of the {num_microbatches} microbatches a "
        "BatchNorm normalizes by the mean and variance of this microbatch alone, as in any gradient accumulation, so "
        "loss and gradients are not those of the whole batch. Use larger microbatches, or a norm within each example "
        "(LayerNorm, RMSNorm, GroupNorm). If you intend this, ignore the category "
        "jaxpp_flax.trainers.BatchStatisticsWarning.",
        BatchStatisticsWarning,
    )


def _warn_of_joins(divided: str | None, mixed: str | None, num_microbatches: int) -> None:
    """Warn that the loss of a microbatch is no mean over its examples, and name the places."""
    found = []
    if divided:
        found.append(
            f"It divides by a number that depends on the values in the microbatch, such as its count of unmasked "
            f"tokens: {divided}. Return the sum and this divisor, (loss_sum, weight), and not their quotient."
        )
    if mixed:
        found.append(
            f"It combines examples, those of one microbatch only, and not by a mean or a sum: {mixed}. For a loss "
            "across all examples of the batch, give it in two parts: loss_fn=WholeBatchLoss(embed_fn, loss_fn)."
        )
    warn_user(
        f"the loss is not a mean over equally weighted examples, so the mean over {num_microbatches} microbatches, and "
        f"its gradients, are not those of the whole batch. {' '.join(found)} If you intend this, ignore the category "
        "jaxpp_flax.trainers.MicrobatchLossWarning.",
        MicrobatchLossWarning,
    )


def used_inputs(graph: Graph, wanted: Sequence[bool]) -> list[bool]:
    """Mark the inputs that the wanted outputs depend on. Calls are entered; loops and conditions use all inputs."""
    needed = {atom for atom, want in zip(graph.outputs, wanted, strict=True) if want and isinstance(atom, Value)}
    for equation in reversed(graph.equations):
        results = [value in needed for value in equation.outputs]
        if not any(results):
            continue
        used = [True] * len(equation.inputs)
        if (called := facts_of(equation.primitive).body_in(equation.params)) is not None:
            body, consts = from_jaxpr(called)
            used = used_inputs(body, results)[len(consts) :]
        needed.update(a for a, is_used in zip(equation.inputs, used, strict=True) if is_used and isinstance(a, Value))
    return [value in needed for value in graph.inputs]
