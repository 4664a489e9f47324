"""The parameters of an equation that change its results, and the cosmetic ones that do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import primitives as jax_primitives

__all__ = ["COSMETIC", "telling"]

# The attribute in which one of our own primitives lists its cosmetic parameters.
COSMETIC = "cosmetic_parameters"

# The cosmetic parameters of JAX's primitives; in another primitive of the same name, they may mean anything. The listed
# functions only differentiate a call; a call is evaluated by its jaxpr.
_OF_JAX = {
    "call_p": ("name",),
    "closed_call_p": ("name",),
    "custom_jvp_call_p": ("jvp_jaxpr_fun", "name"),
    "custom_vjp_call_p": ("fwd_jaxpr_thunk", "bwd", "out_trees", "name"),
    "jit_p": ("name", "inline"),
    "name_p": ("name",),
}
_COSMETIC = {getattr(jax_primitives, name, None): frozenset(params) for name, params in _OF_JAX.items()}


def telling(primitive: Any, params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the parameters that change an equation's results, sorted by name."""
    cosmetic = _COSMETIC.get(primitive) or getattr(primitive, COSMETIC, ())
    return [(k, v) for k, v in sorted(params.items()) if k not in cosmetic and not _is_debug_info(v)]


def _is_debug_info(value: Any) -> bool:
    # JAX's class for it is private; it holds names and places of source files, under `debug_info` or another name.
    return type(value).__name__ == "DebugInfo" and type(value).__module__.startswith("jax.")
