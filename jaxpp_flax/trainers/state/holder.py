"""The state that a trainer holds: made, or on disk, until a step is compiled; then placed where that step reads it."""

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

# Larger parameters are not kept beside the state to find out why a first loss is not finite.
_KEPT_FOR_DIAGNOSIS = 256 << 20


@dataclass(frozen=True)
class Made:
    """The state before a step is compiled: the user's own arrays, or ones on the default device.

    Args:
      state: its `opt_state` may be shapes alone.
    """

    state: TrainState


@dataclass(frozen=True)
class OnDisk:
    """The state is a checkpoint whose files have been checked. It is read when its place is known.

    Args:
      path: of the checkpoint.
      state: in memory, with the same shapes and dtypes; the checkpoint takes its place.
    """

    path: Path
    state: TrainState

    def read(self, shardings: TrainState | None = None) -> TrainState:
        """The checkpoint's state: on the default device, or where `shardings` say."""
        target = abstract_state(self.state)
        if shardings is not None:
            target = jax.tree.map(_with_sharding, target, shardings)
        return plan_restore(self.path, target, check=False).read()


@dataclass(frozen=True)
class Placed:
    """The state on the devices that the compiled steps read it from; a step reuses its memory."""

    state: TrainState


@dataclass(frozen=True)
class Beginning:
    """What the first step began with, to find out why its loss is not finite.

    Args:
      values: parameters and the rest of the model's state; None where they are too large to keep beside the state.
    """

    values: tuple[Any, Any] | None


class StateHolder:
    """Holds the `TrainState` and counts its steps, so that a large state is never on one device alone.

    Until the first step is compiled, the parameters are the user's own arrays and the optimizer's state is shapes
    alone; then each leaf is copied, or made, straight on the devices of its ranks. A checkpoint that a run resumes from
    is read straight onto them. A caller that asks for `whole` before gets it on the default device.

    Args:
      first: the state before the first step; its `opt_state` may be shapes alone.
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
        """Optimizer steps done."""
        self._now: Made | OnDisk | Placed = Made(first)
        self._init = init
        self._beginning: Beginning | None = Beginning((first.params, first.model_state))  # until the first loss is seen

    @property
    def memory(self) -> TrainState:
        """What is in memory: right in shapes and dtypes; in values, too, unless the state is on disk."""
        return self._now.state

    @property
    def is_placed(self) -> bool:
        """Whether the state lies where compiled steps read it."""
        return isinstance(self._now, Placed)

    def whole(self) -> TrainState:
        """All values of the state, those of the optimizer too."""
        state = self.weights()
        if is_abstract(state.opt_state):
            self._now = replace(self._now, state=replace(state, opt_state=self._init(state.params)))
        return self._now.state

    def weights(self) -> TrainState:
        """The state, whose `opt_state` may be shapes alone."""
        if isinstance(self._now, OnDisk):
            self.restored(self._now.read())
        return self._now.state

    def place(self, mesh: MpmdMesh | None, shardings: Callable[[], TrainState]) -> None:
        """Bring the state where a compiled step reads it, once.

        Args:
          mesh: of all ranks; None copies the state to the default device.
          shardings: gives an `MpmdSharding` for each leaf.
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
                placed = jax.tree.map(copied, self.whole())
        self._now = Placed(placed)
        if self._beginning is not None and _num_bytes(self._beginning.values) > _KEPT_FOR_DIAGNOSIS:
            self._beginning = Beginning(None)

    def advance(self, state: TrainState) -> None:
        """`state` is what a step has made of the one held, whose memory it took."""
        self._now = Placed(state)
        self.step += 1

    def restored(self, state: TrainState) -> None:
        """`state` takes the place of the one held; it lies where that one did."""
        self._now = Placed(state) if self.is_placed else Made(state)
        self._beginning = None  # the state is no longer the first one

    def is_on_disk(self, path: Path) -> None:
        """The state is the checkpoint at `path`, which fits: it is read when its place is known."""
        self._now = OnDisk(path, self._now.state)

    def take_beginning(self) -> Beginning | None:
        """What the first step began with, once: None after that, and for a state from a checkpoint."""
        beginning, self._beginning = self._beginning, None
        return beginning


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
