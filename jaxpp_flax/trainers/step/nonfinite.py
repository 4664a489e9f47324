"""Checks for losses and parameters that are not finite: while steps are under way, and before each save."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.processes import exchange_values, process_group
from jaxpp_flax.trainers.errors import NonFiniteLossError
from jaxpp_flax.trainers.progress import Display

__all__ = ["OnNonFinite", "StepsUnderWay", "check_parameters", "nonfinite_leaf"]

OnNonFinite = Literal["stop", "skip", "ignore"]

# Steps dispatched ahead of the devices: enough that they never wait, few enough that batches do not pile up.
_MAX_AHEAD = 2
# This number of skipped steps in a row ends a run: the run learns nothing any more.
_MAX_SKIPPED = 100

_ADVICE = (
    "Check the data of that step, lower the learning rate, or clip the gradients. fit(resume=True) goes on from the "
    'latest checkpoint. Training(on_nonfinite="skip") skips such steps, and "ignore" trains on.'
)


_FIRST = (
    "the loss of step 1 is {loss}. Under `{switch}(True)`, a pipeline names the task and stage that makes the first "
    "such value, and a call of the loss function on one microbatch names the operation. Check the data and the initial "
    "parameters, and operations such as log, division and square root of zero; a lower learning rate does not change "
    "the first loss."
)


class StepsUnderWay:
    """The steps that devices may still run: only a few, and each is checked when it is done.

    Args:
      how: the reaction to a loss that is not finite.
      tells: True prints messages about all skipped steps; with a loss scale, some are normal, and False prints only
        those whose loss is not finite.
      display: shows these messages.
    """

    def __init__(self, how: OnNonFinite, display: Display, *, tells: bool) -> None:
        self._how, self._display, self._tells = how, display, tells
        self._metrics: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()
        self.skipped = self._in_a_row = 0

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Note a step that was dispatched, and wait for the step two before.

        A run that stops at such losses waits for step 1 too: the rest may be in vain.

        Raises:
          NonFiniteLossError: if the loss of a finished step is not finite, and this stops the run.
        """
        kept = {name: metrics[name] for name in ("loss", "skipped_step") if name in metrics}
        self._metrics.append((step, kept))
        if step == 1 and self._how == "stop" and not math.isfinite(loss := _number(metrics["loss"])):
            switch = "jax.debug_nans" if math.isnan(loss) else "jax.debug_infs"
            raise NonFiniteLossError(_FIRST.format(loss=loss, switch=switch))
        while len(self._metrics) > _MAX_AHEAD:
            self._look(*self._metrics.popleft())

    def finish(self) -> None:
        """Wait for all steps; raises as `add` does."""
        while self._metrics:
            self._look(*self._metrics.popleft())

    def drop(self, step: int) -> None:
        """Forget a step that is not taken: its batches are dropped."""
        self._metrics = collections.deque((number, metrics) for number, metrics in self._metrics if number != step)

    def clear(self) -> None:
        """Forget the steps: their state is given up."""
        self._metrics.clear()

    def _look(self, step: int, metrics: Mapping[str, Any]) -> None:
        is_part = self._how == "skip" and "skipped_step" not in metrics  # a batch of `accumulate`: its step may skip
        if self._how == "ignore" or is_part:
            metrics["loss"].block_until_ready()
        elif self._how == "stop":
            loss = _number(metrics["loss"])
            if not math.isfinite(loss):
                raise NonFiniteLossError(f"the loss of step {step} is {loss}, and training stops. {_ADVICE}")
        else:
            self._count(step, metrics["loss"], bool(_number(metrics["skipped_step"])))

    def _count(self, step: int, loss: Any, is_skipped: bool) -> None:
        self._in_a_row = self._in_a_row + 1 if is_skipped else 0
        self.skipped += is_skipped
        if self._in_a_row == _MAX_SKIPPED:
            raise NonFiniteLossError(
                f"the last {_MAX_SKIPPED} steps, up to step {step}, were all skipped: none had a finite loss and "
                "finite gradients, so training makes no progress. Check the data, and lower the learning rate."
            )
        if not is_skipped or (self.skipped > 3 and self.skipped & (self.skipped - 1)):
            return
        if self._tells or not math.isfinite(_number(loss)):  # a loss scale overflows gradients, not the loss
            text = f"step {step} is skipped: its loss or gradients are not finite ({self.skipped} so far)"
            self._display.message(text)


def _number(scalar: Any) -> float:
    """Return a metric's value; `jax.transfer_guard("disallow")` lets an explicit transfer pass."""
    return float(jax.device_get(scalar))


def nonfinite_leaf(params: Any) -> str | None:
    """Return the path of a parameter with a value that is not finite, of those in this process; else None.

    Example:
      >>> nonfinite_leaf({"head": {"bias": jnp.array([0.0, jnp.inf])}, "scale": jnp.ones(2)})
      'head/bias'
    """
    # One small program for each device: these programs run in parallel, and none waits for another process.
    places: dict[Any, dict[str, Any]] = {}
    for path, leaf in flatten(params)[0].items():
        for array in jax.tree.leaves(leaf.to_mpmd_local_array if isinstance(leaf, MpmdArray) else leaf):
            if not jnp.issubdtype(array.dtype, jnp.inexact):
                continue
            parts = [shard.data for shard in array.addressable_shards] if isinstance(array, jax.Array) else [array]
            for part in parts:
                places.setdefault(_device(part), {})[path] = part
    with context_mesh(None):
        found = [
            (list(parts), (_are_finite if device is not None else _are_finite_on_host)(list(parts.values())))
            for device, parts in places.items()
        ]
    for paths, finite in found:
        for path, is_finite in zip(paths, np.asarray(finite), strict=True):
            if not is_finite:
                return path
    return None


def _device(part: Any) -> Any:
    """Return the device whose memory holds a part; None for host memory."""
    if not isinstance(part, jax.Array):
        return None
    (device,) = part.devices()
    return device if named_memory(part.sharding) is None else None


def _are_finite_on_host(parts: list[Any]) -> list[bool]:
    return [bool(np.isfinite(np.asarray(part)).all()) for part in parts]


@jax.jit
def _are_finite(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(array).all() for array in arrays])


def check_parameters(step: int, params: Any) -> None:
    """Refuse to save parameters after a step that are not finite; each process checks its parts.

    Raises:
      NonFiniteLossError: the message names one of these parameters.
    """
    paths = exchange_values(process_group(), "whether the parameters are finite", nonfinite_leaf(params))
    path = next((path for path in paths if path is not None), None)
    if path is not None:
        raise NonFiniteLossError(
            f"after step {step} the parameter {path} holds a value that is not finite: no checkpoint is written, and "
            f"older ones stay. {_ADVICE}"
        )
