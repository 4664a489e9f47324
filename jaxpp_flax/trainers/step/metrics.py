"""Metrics that a training step computes besides those of its loss: learning rate and norms."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpp_flax.trainers.errors import LossError
from jaxpp_flax.trainers.step.learning_rate import LearningRate

__all__ = ["NO_METRICS", "StepMetric", "StepMetrics", "check_apart"]

StepMetric = Literal["learning_rate", "gradient_norm", "parameter_norm", "update_ratio"]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The metrics that a step computes from what it has anyway: gradients, parameters and updates.

    Norms are the square roots of sums over all trained parameters, in float32 or wider. Each parameter is reduced to
    one number where it lies, and these numbers are added in the order of the parameters: the sum depends neither on
    the schedule nor on the stages.

    Args:
      names: the metrics to compute.
      learning_rate: reads the learning rate, if it is one of them.
    """

    names: tuple[StepMetric, ...] = ()
    learning_rate: LearningRate | None = None

    def of(
        self,
        step: Any,
        grads: Any,
        params: Any,
        updates: Any,
        opt_state: Any,
        *,
        finite: Any = None,
    ) -> dict[str, jax.Array]:
        """Return the metrics of a step, scalars by name.

        Args:
          step: the number of steps done before.
          grads: the gradients of the whole batch, without a loss scale.
          params: the parameters before the step.
          updates: what the step adds to the parameters.
          opt_state: the optimizer's state after the update.
          finite: False if the step is skipped, so that its update is zero; None if steps are never skipped.
        """

        def ratio() -> Any:
            size = norm(params)
            found = norm(updates) / jnp.where(size == 0, 1, size)
            return found if finite is None else jnp.where(finite, found, 0)

        makers: dict[StepMetric, Callable[[], jax.Array]] = {
            "learning_rate": lambda: self._rate(step, opt_state),
            "gradient_norm": lambda: norm(grads),
            "parameter_norm": lambda: norm(params),
            "update_ratio": ratio,
        }
        return {name: makers[name]() for name in self.names}

    def _rate(self, step: Any, opt_state: Any) -> jax.Array:
        if self.learning_rate is None:
            raise ValueError('the metric "learning_rate" needs StepMetrics(learning_rate=).')
        return jnp.asarray(self.learning_rate(step, opt_state), jnp.float32)


NO_METRICS = StepMetrics()


def check_apart(of_loss: Iterable[str], of_step: Iterable[str]) -> None:
    """Refuse metrics of a loss with the name of a metric of the step.

    Raises:
      LossError: naming the first of them.

    Example:
      >>> check_apart(["loss", "accuracy"], ["gradient_norm"])
    """
    for name in sorted(set(of_loss) & set(of_step)):
        raise LossError(
            f"the loss function returned a metric called {name!r}, but Logging(metrics=...) has a metric of this name. "
            "Rename yours, or leave the name out of Logging(metrics=...)."
        )


def norm(tree: Any) -> jax.Array:
    """Return the Euclidean norm over all leaves, in float32 or wider.

    Example:
      >>> float(norm({"a": jnp.full(4, 1.5, jnp.bfloat16), "b": jnp.full((), 4.0)}))
      5.0
    """
    first, *others = [jnp.sum(_squared(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(others, start=first))


def _squared(leaf: Any) -> jax.Array:
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return jnp.square(jnp.abs(wide)) if jnp.iscomplexobj(wide) else jnp.square(wide)
