"""The options of precision: the dtypes in which a step computes, stores and sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpp_flax.trainers.options.base import misfit
from jaxpp_flax.trainers.step.optimizer_update import DynamicLossScale

__all__ = ["Precision"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a step, `precision=`; a name such as "bfloat16" is `Precision(compute="bfloat16")`.

    With `compute`, each stage converts its parameters once a step, before its microbatches, and the model's `__call__`
    gets its floating inputs in that dtype. The outputs of `__call__` are converted to float32, so the loss is float32
    too. A layer that sets its own `dtype` keeps it. The arguments of the model's other methods are not converted.

    Args:
      compute: the dtype in which the model computes, in training, `evaluate` and `predict`. None: the model's own.
        `generate` computes with the stored parameters.
      params: the dtype that the trained parameters must have; a model with another one is refused. None: float32 with
        `compute`, otherwise any dtype.
      gradients: the dtype in which gradients are summed over the microbatches. None: float32 with `compute`, otherwise
        their own.
      loss_scale: "dynamic", a `DynamicLossScale` or a number. The loss is multiplied by this scale before
        differentiation, and a step with a gradient that is not finite is skipped. The gradients of parameters are
        divided by it again; the histories of Flax's fp8 layers hold gradients of the multiplied loss. None: "dynamic"
        if `compute` is float16 (its gradients can underflow), otherwise no scale.

    Raises:
      TypeError, ValueError: if a field has a value that does not fit; the message names the field.

    Example:
      >>> Precision(compute="bfloat16").summed
      dtype('float32')
      >>> Precision.of("float16").scale.initial
      65536.0

    The recipe is that of Micikevicius et al., "Mixed Precision Training", 2018.
    """

    compute: DTypeLike | None = None
    params: DTypeLike | None = None
    gradients: DTypeLike | None = None
    loss_scale: Literal["dynamic"] | DynamicLossScale | float | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "params", "gradients"):
            value = getattr(self, name)
            if value is not None and not _is_floating(value):
                raise ValueError(
                    f"Precision({name}={value!r}) is not a floating point type. Use e.g. {name}='bfloat16', or "
                    f"{name}=jnp.float32."
                )
        scale = self.scale
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool) and 0 < scale < math.inf
        if not (number or scale is None or isinstance(scale, DynamicLossScale)):
            raise ValueError(
                f"loss_scale={self.loss_scale!r}: use None, 'dynamic', DynamicLossScale(...) or a number above 0."
            )

    @classmethod
    def of(cls, value: Precision | DTypeLike | None) -> Precision:
        """Convert the trainer's argument."""
        if isinstance(value, cls):
            return value
        if value is not None and not _is_floating(value):
            raise misfit("precision", value, 'a floating point type such as "bfloat16", or Precision(...)')
        return cls(compute=value)  # type: ignore[arg-type]

    @property
    def computed(self) -> Any:
        """The type of the computation; None: the model's own."""
        return None if self.compute is None else jnp.dtype(self.compute)

    @property
    def stored(self) -> Any:
        """The type that parameters must have; None: any."""
        return self._or_float32(self.params)

    @property
    def summed(self) -> Any:
        """The type of sums of gradients; None: their own."""
        return self._or_float32(self.gradients)

    @property
    def scale(self) -> DynamicLossScale | float | None:
        """The loss scale: "dynamic" is `DynamicLossScale()`."""
        if self.loss_scale is None:
            return DynamicLossScale() if self.computed == jnp.float16 else None
        return DynamicLossScale() if self.loss_scale == "dynamic" else self.loss_scale  # type: ignore[return-value]

    def _or_float32(self, chosen: DTypeLike | None) -> Any:
        if chosen is not None:
            return jnp.dtype(chosen)
        return None if self.compute is None else jnp.dtype(jnp.float32)


def _is_floating(value: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(value), jnp.floating)
    except TypeError:
        return False
