"""What a loss function returns, read by hand: the loss and the metrics of the whole batch, and the divisor of sums."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Terms", "add_up", "asked_for", "read"]


class Terms(NamedTuple):
    """What a loss function returned for some examples: a mean, or a sum with a weight; and metrics by name."""

    total: Any
    weight: Any
    metrics: dict[str, Any]


def read(output: Any) -> Terms:
    """Read `loss`, `(loss_sum, weight)`, or one of them with a dict of metrics.

    Example:
      >>> read(((jnp.float32(6), 3), {"hits": 2.0})).weight.item()
      3.0
    """
    loss, metrics = output if _is_pair(output) and isinstance(output[1], Mapping) else (output, {})
    total, weight = loss if _is_pair(loss) else (loss, None)
    weight = None if weight is None else jax.lax.stop_gradient(_float(weight))
    return Terms(_float(total), weight, {name: jax.tree.map(_float, metric) for name, metric in metrics.items()})


def add_up(parts: Sequence[Terms]) -> tuple[dict[str, Any], Any]:
    """Return the metrics of the whole batch, with its loss, and what divides the sum of the parts' gradients.

    Example:
      >>> metrics, divisor = add_up([read((jnp.float32(6), 3)), read((jnp.float32(2), 1))])
      >>> {name: float(value) for name, value in metrics.items()}, float(divisor)
      ({'weight': 4.0, 'loss': 2.0}, 4.0)
    """
    weights = [part.weight for part in parts]
    metrics, divisor = {}, jnp.float32(len(parts))
    if weights[0] is not None:
        metrics["weight"] = sum(weights)
        divisor = jnp.where(metrics["weight"] == 0, 1, metrics["weight"])
    metrics["loss"] = sum(part.total for part in parts) / divisor
    for name in parts[0].metrics:
        values = [part.metrics[name] for part in parts]
        if _is_pair(values[0]):
            below = sum(value[1] for value in values)
            metrics[name] = sum(value[0] for value in values) / jnp.where(below == 0, 1, below)
        else:
            values = [value[0] if isinstance(value, (tuple, list)) else value for value in values]
            metrics[name] = sum(values) / len(parts)
    return metrics, divisor


def asked_for(function: Callable[..., Any]) -> set[str]:
    """Return those of `training` and `rngs` that a function takes after the model and the batch.

    Example:
      >>> sorted(asked_for(lambda model, batch, rngs: 0))
      ['rngs']
    """
    try:
        taken = inspect.signature(function).parameters
    except (TypeError, ValueError):  # not written in Python
        return set()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [name for name, of in taken.items() if of.kind not in variadic]
    first = [name for name in named if taken[name].kind is not inspect.Parameter.KEYWORD_ONLY][:2]
    bound = function.keywords if isinstance(function, partial) else {}
    return {"training", "rngs"}.intersection(named).difference(first, bound)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _float(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))
