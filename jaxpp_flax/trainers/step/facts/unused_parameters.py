"""Parameters that the loss does not use: their gradient is zero, and they lie beside their neighbours by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.tracing.hints import place_with
from jaxpp_flax.globs import covering_globs
from jaxpp_flax.messages import warn_user
from jaxpp_flax.trainers.errors import ModelError, UnusedParametersWarning
from jaxpp_flax.trainers.model.frozen import path_text


def report_unused(unused: Sequence[str], params: Any) -> None:
    """Warn of parameters that the loss does not depend on.

    Args:
      unused: their paths.
      params: all trained parameters.

    Raises:
      ModelError: if the loss depends on no parameter.
    """
    paths = parameter_paths(params)
    if len(unused) == len(paths):
        raise ModelError(
            f"the loss depends on none of the {len(paths)} parameters, so nothing would be trained. Return a loss that "
            "is computed by the model that the loss function receives, without jax.lax.stop_gradient around it."
        )
    globs = covering_globs(unused, [path for path in paths if path not in set(unused)])
    frozen = f"training=Training(frozen={(globs[0] if len(globs) == 1 else globs)!r})"
    warn_user(
        f"the loss does not depend on {len(unused)} of the {len(paths)} parameters: {', '.join(globs)}. Their "
        "gradients are zero, as under jax.grad, and the optimizer updates them with these: weight decay shrinks them. "
        f"To leave them as they are, freeze them: {frozen}. If this is meant, ignore the category "
        "jaxpp_flax.trainers.UnusedParametersWarning; to refuse such a model, make it an error "
        "(`warnings.simplefilter`).",
        UnusedParametersWarning,
    )


def parameter_paths(params: Any) -> list[str]:
    """Return the path of each leaf."""
    return [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def neighbours(unused: Sequence[str], used: Sequence[str], order: Sequence[str]) -> list[str]:
    """Return for each unused path the used one that has most of the path in common; among equals, the nearest one.

    Args:
      unused, used: paths of parameters.
      order: the paths of all parameters, as they stand in the model.

    Example:
      >>> order = ["embed", "head_a/kernel", "head_b/kernel", "norm/scale"]
      >>> neighbours(["head_b/kernel"], ["embed", "head_a/kernel", "norm/scale"], order)
      ['head_a/kernel']
    """
    position = {path: i for i, path in enumerate(order)}

    def nearness(path: str, other: str) -> tuple[int, int, int]:
        parts = _num_equal(path.split("/"), other.split("/"))
        return parts, _num_equal(path, other), -abs(position[path] - position[other])

    return [max(used, key=partial(nearness, path)) for path in unused]


def _num_equal(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the number of equal items at the beginning."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def of_used(grads: Any, unused: Sequence[str]) -> list[Any]:
    """Return the gradients of the used parameters, in order."""
    left_out = set(unused)
    return [
        grad for path, grad in zip(parameter_paths(grads), jax.tree.leaves(grads), strict=True) if path not in left_out
    ]


def with_zeros(
    grads: Sequence[Any], params: Any, unused: Sequence[str], summand: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Return the parameters and the gradients of all of them; `grads` are those of the used ones, in order.

    The gradient of an unused parameter is zero. Both are on the rank of a neighbour's gradient, so the update of the
    parameter, its optimizer state and its average are there too.
    """
    leaves, tree = jax.tree.flatten(params)
    order, left_out = parameter_paths(params), set(unused)
    of_path = dict(zip((path for path in order if path not in left_out), grads, strict=True))
    beside = dict(zip(unused, neighbours(unused, list(of_path), order), strict=True))
    all_grads: list[Any] = []
    for i, path in enumerate(order):
        if path in beside:
            leaves[i] = place_with(leaves[i], of_path[beside[path]])
            all_grads.append(place_with(summand(jnp.zeros_like(leaves[i])), leaves[i]))
        else:
            all_grads.append(of_path[path])
    return jax.tree.unflatten(tree, leaves), jax.tree.unflatten(tree, all_grads)
