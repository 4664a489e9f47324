"""The loss rule: a step has the loss and gradients of the whole batch.

A loss function sees one microbatch and returns one of

- the **mean loss** of the microbatch, a scalar. The step's loss is the mean over the (equally large) microbatches;
- **(loss_sum, weight)**, two scalars: a sum over the microbatch and the divisor of this sum, such as the number of
  unmasked tokens. The step's loss is the sum of all `loss_sum` over the sum of all `weight`, so microbatches count by
  their weight. The weight is counted in the data: it depends on no trained parameter, or the loss is refused. A batch
  with a total weight of zero has loss zero and changes no gradient;
- one of these with a mapping of **metrics**: `(loss, metrics)` or `((loss_sum, weight), metrics)`. A metric is
  averaged over the microbatches. A metric that is a pair `(sum, weight)` is summed and divided by the summed weight.

Gradients are summed over the microbatches and divided once, after the loop.

What a call of the loss writes into the model: a trained parameter, and state that is made of parameters, get the value
that one call for the whole batch would write; other state goes from microbatch to microbatch. Variables of Linen's
collection `_overwrite_with_gradient` (the scales of fp8 layers) get the largest of their gradients, in units of the
whole batch's loss, and the optimizer does not see them. All else that a call changes is refused if a later call reads
it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.trainers.errors import LossError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """The terms of one microbatch; their sum over the microbatches is the terms of the batch."""

    total: Any
    weight: Any  # None: the loss is a mean
    metrics: Any  # each metric is a value, or a pair (sum, weight)


def read_loss(output: Any, *, differentiated: bool = False) -> LossTerms:
    """Read the terms from the output of a loss function for one microbatch; sums are in float32 or wider.

    A loss that is `differentiated` must be a float: the gradients of an integer are zero.

    Example:
      >>> read_loss((jnp.float32(6.0), 3)).weight.item()
      3.0
    """
    loss, metrics = output, {}
    if isinstance(output, (tuple, list)) and len(output) == 2 and isinstance(output[1], Mapping):
        loss, metrics = output
    if isinstance(loss, (tuple, list)):
        if len(loss) != 2:
            raise LossError(f"the loss function returned {_describe(output)}. {_FORMS}")
        total, weight = (_scalar(part, name, output) for part, name in zip(loss, ("loss_sum", "weight"), strict=True))
        weight = jax.lax.stop_gradient(weight)
        name, given = "loss_sum", loss[0]
    else:
        total, weight = _scalar(loss, "loss", output), None
        name, given = "loss", loss
    if differentiated and not jnp.issubdtype(jnp.result_type(given), jnp.floating):
        raise LossError(
            f"the loss function returned a {name} of dtype {jnp.result_type(given)}, which has no gradient: nothing "
            "would be trained. Return a float that is computed from the model's outputs, not from their argmax or "
            "from comparisons. Return counts of hits or errors as metrics."
        )
    for reserved in {"loss", "weight", "loss_scale", "skipped_step"} & set(metrics):
        raise LossError(f"the loss function returned a metric called {reserved!r}, a name that is reserved. Rename it.")
    return LossTerms(total=total, weight=weight, metrics={name: _metric(name, v) for name, v in metrics.items()})


def counted_by(terms: LossTerms, examples: int) -> LossTerms:
    """Return the terms of a microbatch of so many examples, among microbatches of other sizes: every example counts.

    A mean becomes a pair of a sum and a weight, so that the mean over the batch is that over its examples.

    Example:
      >>> terms = counted_by(LossTerms(total=jnp.float32(3.0), weight=None, metrics={"hits": jnp.float32(0.5)}), 4)
      >>> float(terms.total), float(terms.weight), [float(part) for part in terms.metrics["hits"]]
      (12.0, 4.0, [2.0, 4.0])
    """

    def of(value: Any) -> tuple[Any, Any]:
        return value * examples, jnp.asarray(examples, jnp.result_type(value))

    metrics = {name: value if isinstance(value, tuple) else of(value) for name, value in terms.metrics.items()}
    if terms.weight is not None:
        return LossTerms(total=terms.total, weight=terms.weight, metrics=metrics)
    total, weight = of(terms.total)
    return LossTerms(total=total, weight=weight, metrics=metrics)


def whole_batch(summed: LossTerms, num_microbatches: int) -> tuple[dict[str, jax.Array], Any]:
    """Return the metrics of the whole batch, from the sums over its microbatches, and the divisor of the gradients.

    Example:
      >>> terms = LossTerms(total=jnp.float32(6.0), weight=jnp.float32(4.0), metrics={"hits": (2.0, 8.0)})
      >>> metrics, divisor = whole_batch(terms, 2)
      >>> {name: float(value) for name, value in metrics.items()}, float(divisor)
      ({'loss': 1.5, 'weight': 4.0, 'hits': 0.25}, 4.0)
    """
    divisor = num_microbatches if summed.weight is None else not_zero(summed.weight)
    metrics = {"loss": summed.total / divisor}
    if summed.weight is not None:
        metrics["weight"] = summed.weight
    for name, value in summed.metrics.items():
        if isinstance(value, tuple):
            metrics[name] = value[0] / not_zero(value[1])
        else:
            metrics[name] = value / num_microbatches
    return metrics, divisor


_FORMS = (
    "Return the mean loss of the microbatch (a scalar), or (loss_sum, weight) with two scalars, "
    "or one of these with a dict of metrics: (loss, {'accuracy': ...})."
)


def with_aux(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Let a loss of JAX's form `(loss, aux)`, as for `jax.grad(has_aux=True)`, be the loss of a trainer.

    A bare `(loss, accuracy)` would be read as `(loss_sum, weight)`.

    Args:
      loss_fn: a loss function that returns `(loss, aux)`. `aux` is a pytree of scalars: each becomes a metric, and is
        averaged over the microbatches. Those of a dict have its names; others are called "aux", "aux/0", ...

    Raises:
      LossError: in a step, if it returns no pair, or `aux` has an array.

    Example:
      >>> loss_fn = with_aux(lambda model, batch: (batch.mean(), (batch.max(), batch.min())))
      >>> sorted(loss_fn(None, jnp.arange(3.0))[1])
      ['aux/0', 'aux/1']
    """

    @functools.wraps(loss_fn)
    def with_metrics(*args: Any, **kwargs: Any) -> Any:
        output = loss_fn(*args, **kwargs)
        if not isinstance(output, (tuple, list)) or len(output) != 2:
            raise LossError(f"a loss in with_aux returned {_describe(output)}. Return (loss, aux).")
        loss, aux = output
        metrics: dict[str, Any] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            name = name if isinstance(aux, Mapping) else f"aux/{name}".rstrip("/")
            if jnp.shape(leaf) != ():
                raise LossError(
                    f"a loss in with_aux returned {name!r} with the shape {jnp.shape(leaf)}. A metric is a scalar: "
                    "reduce it, or take values of each example with `predict`."
                )
            metrics[name] = leaf
        return loss, metrics

    return with_metrics


def not_zero(weight: Any) -> Any:
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _wide(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def _scalar(value: Any, name: str, output: Any) -> jax.Array:
    if not isinstance(value, (int, float)) and not hasattr(value, "dtype"):
        raise LossError(f"the loss function returned {_describe(output)}. {_FORMS}")
    if jnp.shape(value) != () and name == "weight":
        raise LossError(
            f"the loss function returned a pair (loss_sum, weight) with a weight of shape {jnp.shape(value)}, which is "
            "not a scalar. Return a number of examples or tokens. Values of each example are no metrics: take them "
            "with `predict`; report scalars by name: (loss, {'accuracy': accuracy})."
        )
    if jnp.shape(value) != ():
        raise LossError(
            f"the loss function returned a {name} of shape {jnp.shape(value)}, which is not a scalar. "
            "Reduce it first, e.g. with `.mean()`; to weight examples, return (loss_sum, weight)."
        )
    wide = _wide(value)
    if not jnp.issubdtype(wide.dtype, jnp.floating):
        raise LossError(f"the loss function returned a {name} of dtype {wide.dtype}; it must be a real number.")
    return wide


def _metric(name: str, value: Any) -> Any:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if not (len(parts) <= 2 and all(isinstance(part, (int, float)) or hasattr(part, "dtype") for part in parts)):
        raise LossError(
            f"the loss function returned the metric {name!r} as {_describe(value)}. "
            "A metric is an array (averaged over the microbatches), or a pair (sum, weight)."
        )
    wide = tuple(map(_wide, parts))
    return wide if isinstance(value, (tuple, list)) and len(wide) == 2 else wide[0]


def _describe(output: Any) -> str:
    if isinstance(output, (tuple, list)):
        return f"({', '.join(map(_describe, output))})"
    if isinstance(output, Mapping):
        return f"a dict of {', '.join(map(repr, output)) or 'nothing'}"
    if hasattr(output, "dtype"):
        return f"an array of shape {tuple(output.shape)} and dtype {output.dtype}"
    return "None" if output is None else f"a {type(output).__name__}"
