"""`mark_stage_end`, `pipeline_enter_stage` and `place_with`, with JaxPP's names of their parameters."""

from __future__ import annotations

from typing import TypeVar

from jaxpp_flax.engine.tracing import hints, markers

__all__ = ["mark_stage_end", "pipeline_enter_stage", "place_with"]

T = TypeVar("T")


def mark_stage_end(anchor: T, name: str | None = None) -> T:
    """Mark the end of a stage: `jaxpp_flax.mark_stage_end(anchor, name)`.

    Example:
      >>> import jax.numpy as jnp
      >>> mark_stage_end(anchor=jnp.ones(2), name="embedding")
      Array([1., 1.], dtype=float32)
    """
    return markers.mark_stage_end(anchor, name)


def pipeline_enter_stage(anchor: T, name: str | None = None) -> T:
    """Mark the end of a stage, under JaxPP's older name."""
    return markers.mark_stage_end(anchor, name)


def place_with(val: T, with_val: object) -> T:
    """Ask that `val` is computed on the ranks that hold `with_val`: `jaxpp_flax.engine.tracing.hints.place_with`.

    Raises:
      ValueError: if `with_val` holds no array.

    Example:
      >>> import jax.numpy as jnp
      >>> place_with(val=jnp.ones(2), with_val=jnp.ones(3))
      Array([1., 1.], dtype=float32)
    """
    return hints.place_with(val, with_val)
