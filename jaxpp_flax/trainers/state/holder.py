"""The state that a trainer holds: in memory or on disk until a step is compiled, then placed for that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxpp_flax.checkpoint import abstract_state
from jaxpp_flax.checkpoint.reading import plan_restore
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.trainers.loop.process_synchronization import compare_initial_states
from jaxpp_flax.trainers.state.placing import is_abstract, place_state
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.compilation import copied

__all__ = ["Beginning", "Made", "OnDisk", "Placed", "StateHolder"]

# Larger first parameters are not kept for the diagnosis of a first loss that is not finite.
_KEPT_FOR_DIAGNOSIS = 256 << 20


@dataclass(frozen=True)
class Made:
    """The state before a step is compiled: the user's own arrays, or arrays on the default device.

    Args:
      state: the state; `opt_state` may have only shapes.
    """

    state: TrainState


@dataclass(frozen=True)
class OnDisk:
    """The state is a checkpoint with checked files. The checkpoint is read once the target shardings are known.

    Args:
      path: the path of the checkpoint.
      state: the state in memory, with the same shapes and dtypes; the checkpoint will replace it.
    """

    path: Path
    state: TrainState

    def read(self, shardings: TrainState | None = None) -> TrainState:
        """Read the checkpoint's state: to the default device, or to `shardings`."""
        target = abstract_state(self.state)
        if shardings is not None:
            target = jax.tree.map(_with_sharding, target, shardings)
        return plan_restore(self.path, target, check=False).read()


@dataclass(frozen=True)
class Placed:
    """The state on the devices of the compiled steps; a step reuses the memory of these arrays."""

    state: TrainState


@dataclass(frozen=True)
class Beginning:
    """The inputs of the first step, for the diagnosis of a first loss that is not finite.

    Args:
      values: parameters and the rest of the model's state; None if they are too large to keep beside the state.
    """

    values: tuple[Any, Any] | None


class StateHolder:
    """Holds the `TrainState` and counts its steps. A large state is never on a single device.

    Until the first step is compiled, the parameters are the user's own arrays, and the optimizer's state has only
    shapes. Then each leaf is copied, or made, directly on the devices of its ranks. A run that resumes reads its
    checkpoint directly onto these devices; `load` before that reads it to the default device.

    Args:
      first: the state before the first step; `opt_state` may have only shapes.
      init: makes the `opt_state` from parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxpp_flax.trainers.step.update import Update
      >>> update = Update.of(optax.sgd(0.1, momentum=0.9), None, None, None, skips_nonfinite=False)
      >>> held = StateHolder(update.first_state({"w": jnp.ones(2)}, {}), update.tx.init)
      >>> is_abstract(held.memory.opt_state), is_abstract(held.whole().opt_state), held.is_placed
      (True, False, False)
    """

    def __init__(self, first: TrainState, init: Callable[[Any], Any]) -> None:
        self.step = 0
        """The number of optimizer steps done."""
        self._now: Made | OnDisk | Placed = Made(first)
        self._init = init
        self._beginning: Beginning | None = Beginning((first.params, first.model_state))  # until the first loss is seen

    @property
    def memory(self) -> TrainState:
        """The state in memory: shapes and dtypes are correct; values too, unless the state is on disk."""
        return self._now.state

    @property
    def is_placed(self) -> bool:
        """True if the state is on the devices of the compiled steps."""
        return isinstance(self._now, Placed)

    def whole(self) -> TrainState:
        """Return all values of the state, with the optimizer's values.

        Raises:
          RuntimeError: if the state is on disk: the caller did not `load` it.
        """
        state = self.weights()
        if is_abstract(state.opt_state):
            self._now = replace(self._now, state=replace(state, opt_state=self._init(state.params)))
        return self._now.state

    def weights(self) -> TrainState:
        """Return the state; `opt_state` may have only shapes.

        Raises:
          RuntimeError: as `whole`.
        """
        if isinstance(self._now, OnDisk):
            raise RuntimeError(
                f"the state is the checkpoint {self._now.path}, which `fit(resume=True)` reads after it has drawn the "
                "first batch. Look at the state after that: in `Callback.on_fit_start`, or when `fit` has ended."
            )
        return self._now.state

    def load(self) -> None:
        """Read the state to the default device, if it is on disk."""
        if isinstance(self._now, OnDisk):
            self.restored(self._now.read())

    def place(self, mesh: MpmdMesh | None, shardings: Callable[[], TrainState]) -> None:
        """Place the state for the compiled step; later calls do nothing.

        Args:
          mesh: the mesh of all ranks; None copies the state to the default device.
          shardings: returns an `MpmdSharding` for each leaf.
        """
        match self._now:
            case Placed():
                return
            case OnDisk() as stored if mesh is not None:
                placed, self._beginning = stored.read(shardings()), None
            case Made(state) if mesh is not None:
                compare_initial_states(mesh, state, self._init)
                placed = place_state(mesh, state, shardings(), self._init)
            case _:
                self.load()
                placed = jax.tree.map(copied, self.whole())
        self._now = Placed(placed)
        if self._beginning is not None and _num_bytes(self._beginning.values) > _KEPT_FOR_DIAGNOSIS:
            self._beginning = Beginning(None)

    def advance(self, state: TrainState) -> None:
        """Hold `state`, the result of a step. The step has reused the memory of the state held before."""
        self._now = Placed(state)
        self.step += 1

    def restored(self, state: TrainState) -> None:
        """Replace the held state by `state`, which is on the same devices."""
        self._now = Placed(state) if self.is_placed else Made(state)
        self._beginning = None  # the state is no longer the first one

    def is_on_disk(self, path: Path) -> None:
        """Hold the checkpoint at `path`, which fits. It is read once the target shardings are known."""
        self._now = OnDisk(path, self._now.state)

    def take_beginning(self) -> Beginning | None:
        """Return the inputs of the first step once: later calls, and a state from a checkpoint, give None."""
        beginning, self._beginning = self._beginning, None
        return beginning


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
