"""What a step loses in narrow sums and narrow optimizer states, in a line that a user sees at the start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["lost_bits"]


def lost_bits(state: TrainState, summed: Any, num_microbatches: int) -> Iterator[str]:
    """Tell of sums of gradients, and of arrays of the optimizer, in types below 32 bits.

    Args:
      state: arrays or their shapes.
      summed: the type of sums of gradients; None: that of each parameter.
      num_microbatches: the terms of a sum.

    Yields:
      A line for each, with the switch that keeps the bits.
    """
    names = _narrow(state.params) if summed is None else {}
    # The roundings of a sum grow with the root of its terms: 3.4 bits were measured with 256 of them.
    lost = math.log2(num_microbatches) / 2 - 0.6
    for name, paths in names.items():
        if lost > 0:
            yield (
                f"gradients of parameters in {name} ({listed(paths, 3, str)}) are added up in {name}: over "
                f"{num_microbatches} microbatches a sum loses about {lost:.1f} of its {_bits(name)} bits. "
                'precision=Precision(gradients="float32") keeps them.'
            )
    for name, paths in _narrow(state.opt_state).items():
        yield (
            f"the optimizer keeps its state in {name} ({listed(paths, 3, str)}): each step rounds it to {_bits(name)} "
            "bits, and a smaller change is lost. Parameters in float32 keep such states in float32 "
            '(precision="bfloat16" computes in bfloat16 even so), unless the optimizer names a type (mu_dtype=).'
        )


def _narrow(tree: Any) -> dict[str, list[str]]:
    """Return the paths of arrays of numbers below 32 bits, by their types."""
    found: dict[str, list[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_number = jnp.issubdtype(leaf.dtype, jnp.number)
        if leaf.ndim and is_number and leaf.dtype.itemsize < 4:
            found.setdefault(leaf.dtype.name, []).append(path_text(path))
    return found


def _bits(name: str) -> int:
    """Return the bits of a number's digits."""
    dtype = jnp.dtype(name)
    return jnp.finfo(dtype).nmant + 1 if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
