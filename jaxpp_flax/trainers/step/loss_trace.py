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
from jaxpp_flax.trainers.data.joined_examples import Joins, find_joins
from jaxpp_flax.trainers.errors import BatchStatisticsWarning, MicrobatchLossWarning, ModelError, PrecisionWarning
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_function
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.model.wide_products import wide_products
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.loss import read_loss


@dataclass(frozen=True, kw_only=True)
class LossTrace:
    """The properties of a loss function for microbatches of one structure.

    The carried leaves of `model_state` are those that the loss function writes. They go from microbatch to microbatch;
    all other leaves (frozen parameters, keys) are constants of the loop.
    """

    carried: tuple[int, ...]  # the positions of these leaves
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

    def run(leaves: Sequence[Any], params: Any, step: Any, index: Any, batch: Any) -> tuple[Sequence[Any], Any]:
        rest = jax.tree.unflatten(tree, leaves)
        output, bound = call_function(loss_fn, model, params, rest, batch, step=step, microbatch=index, training=True)
        terms = read_loss(output, differentiated=True)
        is_pair.append(terms.weight is not None)
        return jax.tree.leaves(model.rest_of(bound, rest)), terms.total

    index = jax.ShapeDtypeStruct((), jnp.int32)
    graph, consts = from_jaxpr(jax.make_jaxpr(run)(leaves, state.params, state.step, index, microbatch))
    inputs = graph.inputs[len(consts) :]
    carried = tuple(i for i in range(len(leaves)) if graph.outputs[i] is not inputs[i])
    used = used_inputs(graph, [False] * len(leaves) + [True])[len(consts) + len(leaves) :]
    statistics = model.batch_statistics(state.model_state)
    joins = _joins_of_loss(graph, inputs[-len(jax.tree.leaves(microbatch)) :], len(leaves))
    return LossTrace(
        carried=carried,
        unused=tuple(path for path, is_used in zip(_paths(state.params), used, strict=False) if not is_used),
        batch_statistics=tuple(
            path for i, path in enumerate(_paths(state.model_state)) if i in carried and statistics[i]
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


def check_written(trace: LossTrace, stored: Any, computed: Any) -> None:
    """Refuse a loss that writes a frozen parameter of which it has a copy in the type of the computation."""
    paths, leaves = _paths(stored), zip(jax.tree.leaves(stored), jax.tree.leaves(computed), strict=True)
    converted = [i for i, (kept, used) in enumerate(leaves) if kept.dtype != used.dtype]
    if written := sorted(paths[i] for i in {*trace.carried} & {*converted}):
        raise ModelError(
            f"the model's call writes the frozen parameter {listed(written, 3, str)}, but with precision= it computes "
            "with a copy in a narrower dtype, so the written values would be rounded. Keep these values in a variable "
            "of another type (NNX) or collection (Linen)."
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
