"""`treduce` and `treduce_i`, which take JaxPP's schedules beside this package's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.api.schedules import own_schedule
from jaxpp_flax.engine.tracing import treduce as engine
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches

__all__ = ["treduce", "treduce_i"]

_STACK_AND_ADD = (engine.Concat(), engine.Add)  # the values and the gradients of `jax.value_and_grad`


def treduce(
    fun: Callable[..., Any],
    xs: Any,
    schedule: Any = None,
    axis: int = 0,
    operation: Any = _STACK_AND_ADD,
    **carry: Any,
) -> Any:
    """Reduce `fun(xs[i])` over the microbatches `i`, as `jaxpp_flax.treduce` does.

    The schedule may be one of JaxPP's classes or one of `jaxpp_flax.schedules`; `xs` may be `jaxpp_flax.Microbatches`.

    Raises:
      ScheduleError: if the schedule's tasks are not legal.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxpp_flax.api as jaxpp
      >>> jaxpp.treduce(lambda x: x * 2, jnp.arange(4.0), jaxpp.Std1F1B(1), operation=jaxpp.Add).item()
      12.0
    """
    if isinstance(xs, Microbatches):  # of several shapes
        return engine.treduce(fun, xs, own_schedule(schedule, len(xs)), axis, operation, **carry)
    shapes = {jnp.shape(leaf)[axis] for leaf in jax.tree.leaves(xs) if -jnp.ndim(leaf) <= axis < jnp.ndim(leaf)}
    own = own_schedule(schedule, shapes.pop()) if len(shapes) == 1 else None  # else the engine refuses `xs`
    return engine.treduce(fun, xs, own, axis, operation, **carry)


def treduce_i(
    fun: Callable[..., Any],
    length: int,
    schedule: Any = None,
    operation: Any = _STACK_AND_ADD,
    axis: int = 0,
    **carry: Any,
) -> Any:
    """Reduce `fun(i)` over `i` in `range(length)`, as `jaxpp_flax.treduce_i` does.

    The schedule may be one of JaxPP's classes or one of `jaxpp_flax.schedules`.

    Raises:
      ScheduleError: if the schedule's tasks are not legal.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxpp_flax.api as jaxpp
      >>> jaxpp.treduce_i(lambda i: jnp.float32(i), 4, jaxpp.GPipe(1), operation=jaxpp.Add).item()
      6.0
    """
    return engine.treduce_i(fun, length, own_schedule(schedule, length), operation, axis, **carry)
