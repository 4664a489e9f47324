"""A callback that runs some steps twice from the same state, and compares every bit of the results."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mesh import named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord
from jaxpp_flax.verify.errors import ReplayError

__all__ = ["Replay"]


class Replay(Callback):
    """Run each `every`-th step a second time from the same state, and compare the bits of the new state and metrics.

    This finds a device that sometimes computes wrong values. A replay takes the time of one more step, and memory for a
    second state, which is copied at the end of the step before. The training is not changed. Each process compares the
    arrays on its own devices. Side effects of the loss (host callbacks) happen twice.

    On GPUs some operations are not deterministic unless `XLA_FLAGS=--xla_gpu_deterministic_ops=true` is set.

    Args:
      every: steps between two replays.

    Raises:
      ReplayError: in the loop, if a replay has different bits; the message names the first leaf, its device and both
        values.
      ValueError: if `every` is below 1.

    Example:
      >>> import optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage, PipelineTrainer
      >>> model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i))) for i in range(2)])
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=2,
      ...                           num_microbatches=2, logging=False)
      >>> replay = Replay(every=2)
      >>> _ = trainer.fit([jnp.ones((4, 4))], steps=4, callbacks=[replay])
      >>> replay.replayed
      [2, 4]
    """

    def __init__(self, *, every: int = 100) -> None:
        super().__init__(every=every)
        self.replayed: list[int] = []  # the steps of this loop that ran twice
        self._before: Any = None  # a copy of the state before the next step, if that one will be replayed

    def wants(self, step: int) -> bool:
        """Return True at a step to replay, and at the step before it, whose state it needs."""
        return super().wants(step) or super().wants(step + 1)

    @without_ambient_mesh
    def on_fit_start(self, trainer: Any) -> None:
        """Copy the state if the first step is to be replayed."""
        self.replayed = []
        self._keep(trainer)

    @without_ambient_mesh
    def on_step(self, trainer: Any, record: StepRecord) -> None:
        """Replay this step if it is due, and copy the state if the next one is."""
        before, self._before = self._before, None
        if before is not None and super().wants(record.step):
            step = trainer.compiled_step(record.batch, global_batch_size=record.global_batch_size)
            found = step(before, record.batch)
            before = None  # the step reused its memory
            self.replayed.append(record.step)
            _check_equal((trainer.state, dict(record.metrics)), found, record.step)
        self._keep(trainer)

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        """Free the copy."""
        self._before = None

    def _keep(self, trainer: Any) -> None:
        if super().wants(trainer.step + 1):
            self._before = jax.tree.map(copy.deepcopy, trainer.state)


def _check_equal(first: tuple[Any, Any], again: tuple[Any, Any], step: int) -> None:
    """Raise a `ReplayError` that names the first leaf of which a local device has other bits."""
    leaves, others = flatten(first)[0], flatten(again)[0]
    differing = {
        (path, where): (one, other, _differ(one, other))
        for path in leaves
        for where, one, other in _shards(leaves[path], others[path])
    }
    wrong = [(place, one, other) for place, (one, other, differ) in differing.items() if bool(differ)]
    if not wrong:
        return
    (path, where), one, other = wrong[0]
    a, b = (np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in (one, other))
    index = tuple(map(int, np.argwhere(_unequal(a, b))[0]))
    more = f", and {len(wrong) - 1} more places" if len(wrong) > 1 else ""
    raise ReplayError(
        f"step {step} gave other bits when it ran again from the same state: {path.partition('/')[2]} on {where}, at "
        f"{index} of its part: {a[index]!r}, then {b[index]!r}{more}. Possible causes: this device, or one that sent "
        "values to it, computes wrongly; an operation is not deterministic (on GPUs, set "
        "XLA_FLAGS=--xla_gpu_deterministic_ops=true); or the loss reads values that are not its arguments. If it is a "
        "device, restore a checkpoint from before the last replay that agreed, on other devices."
    )


def _shards(one: Any, other: Any) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Yield the parts that local devices hold of two equally placed arrays, with the device of each."""
    for rank, (a, b) in _replicas(one, other).items():
        of_rank = "" if rank is None else f" of rank {rank}"
        for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
            yield f"device {x.device}{of_rank}", x.data, y.data


def _replicas(one: Any, other: Any) -> Mapping[int | None, tuple[Any, Any]]:
    if not isinstance(one, MpmdArray):
        return {None: (jnp.asarray(one), jnp.asarray(other))}
    parts = other._partially_addressable_arrays
    return {rank: (array, parts[rank]) for rank, array in one._partially_addressable_arrays.items()}


def _differ(one: jax.Array, other: jax.Array) -> Any:
    """Return whether two parts on one device differ in a bit: a value that may not be ready yet."""
    if named_memory(one.sharding) is not None:  # in host memory, where devices do not compute
        return _unequal(np.asarray(one), np.asarray(other)).any()
    return _differ_on_device(one, other)


@jax.jit
def _differ_on_device(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.any(_bits(one) != _bits(other))


def _bits(array: jax.Array) -> jax.Array:
    if is_key(array):
        return jax.random.key_data(array)
    if jnp.iscomplexobj(array):
        array = jnp.stack([array.real, array.imag])
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.lax.bitcast_convert_type(array, f"uint{jnp.finfo(array.dtype).bits}")


def _unequal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return where two arrays of one shape and dtype differ in a bit."""
    a, b = (np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (one, other))
    return (a != b).any(axis=-1).reshape(one.shape)
