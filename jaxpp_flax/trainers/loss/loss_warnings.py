"""What a user is warned of, once, if the loss of the microbatches is not that of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxpp_flax.messages import listed, warn_user
from jaxpp_flax.trainers.errors import (
    BatchStatisticsWarning,
    MicrobatchLossWarning,
    MicrobatchStateWarning,
    PrecisionWarning,
)
from jaxpp_flax.trainers.loss.loss_graph import LossGrowth
from jaxpp_flax.trainers.loss.loss_trace import LossTrace

__all__ = ["warn_of_evaluation", "warn_of_microbatches", "warn_of_precision", "warn_of_states"]


def warn_of_microbatches(trace: LossTrace, num_microbatches: int) -> bool:
    """Warn of what makes the loss of the microbatches another one than that of the whole batch; return whether."""
    if num_microbatches == 1:
        return False
    if trace.batch_statistics:
        _warn_of_batch_statistics(trace.batch_statistics, num_microbatches)
    mixed = None if trace.batch_statistics else trace.mixed  # BatchNorm mixes examples: that warning has said so
    places, verb = (trace.divided, mixed, trace.growing), f"{num_microbatches} microbatches, like its gradients, is"
    joins = _warn_of_joins("the loss", places, verb)
    return joins or bool(trace.batch_statistics)


def warn_of_evaluation(growth: LossGrowth, num_microbatches: int) -> bool:
    """Warn of a loss of `evaluate` that is not that of the whole batch; return whether."""
    name = "the loss of `evaluate` (eval_loss_fn; by default, loss_fn)"
    return _warn_of_joins(name, (growth.divided, growth.mixed, growth.text), f"{num_microbatches} microbatches is")


def warn_of_precision(trace: LossTrace, compute: Any) -> bool:
    """Warn of a model that does not compute in the type that it is to compute in; return whether."""
    if trace.wide is None:
        return False
    name = jnp.dtype(compute).name
    warn_user(
        f"precision={name!r}, but {trace.wide}. A layer that sets its own dtype keeps it: make the model with "
        f"dtype={name!r}, or leave its dtype out. A part of the model that the loss calls by itself takes its inputs "
        f"as they are: convert them to {name} in the loss. If you intend this, ignore the category "
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


def warn_of_states(trace: LossTrace, num_microbatches: int) -> bool:
    """Warn of states that plain Flax moves once a step; return whether."""
    if num_microbatches == 1 or not trace.moved:
        return False
    warn_user(
        f"the loss moves {listed(trace.moved, 3, str)} in each of the {num_microbatches} microbatches, so later ones "
        "compute with other values, and a step leaves other values than one call with the whole batch. Move such state "
        "once a step, after the optimizer: Training(after_update=fn) calls fn(model, metrics). A loss may add sums "
        "over the examples to a variable that it does not read (`variable[...] += x.sum(0)`). If the model sows it, "
        "leave it out: `nnx.pop` before you make the trainer, or variables= without this collection. If you intend "
        "this, ignore the category jaxpp_flax.trainers.MicrobatchStateWarning.",
        MicrobatchStateWarning,
    )
    return True


def _warn_of_joins(name: str, places: tuple[str | None, str | None, str | None], verb: str) -> bool:
    """Warn that the loss of a microbatch is no mean over its examples, and name the places; return whether.

    The places are those where it divides by a sum, and where it mixes examples; the last one is a text of its growth.
    """
    divided, mixed, growing = places
    if not any(places):
        return False
    found = [growing] if growing and not (divided or mixed) else []
    if divided:
        found.append(
            f"It divides by a number that depends on the values in the microbatch, such as its count of unmasked "
            f"tokens: {divided}. Return the sum and this divisor, (loss_sum, weight), and not their quotient; a sum of "
            "several quotients needs loss_fn=WholeBatchLoss(embed_fn, loss_fn)."
        )
    if mixed:
        found.append(
            f"It combines examples, those of one microbatch only, and not by a mean or a sum: {mixed}. For a loss "
            "across all examples of the batch, give it in two parts: loss_fn=WholeBatchLoss(embed_fn, loss_fn)."
        )
    warn_user(
        f"{name} is not a mean over equally weighted examples, so the mean over {verb} not that of the whole batch. "
        f"{' '.join(found)} If you intend this, ignore the category jaxpp_flax.trainers.MicrobatchLossWarning.",
        MicrobatchLossWarning,
    )
    return True
