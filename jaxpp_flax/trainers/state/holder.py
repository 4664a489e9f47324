"""The state that a trainer holds: in memory or on disk until a step is compiled, then placed for that step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.checkpoint import abstract_state
from jaxpp_flax.checkpoint.reading import plan_restore
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.engine.arrays.reshard import spmd_to_mpmd_reshard
from jaxpp_flax.trainers.loop.process_synchronization import compare_initial_states
from jaxpp_flax.trainers.state.optimizer_state import make_on_ranks
from jaxpp_flax.trainers.state.train_state import TrainState

# Larger first parameters are not kept for the diagnosis of a first loss that is not finite.
_KEPT_FOR_DIAGNOSIS = 256 << 20


@dataclass(frozen=True)
class Made:
    """The state before a step is compiled: the user's own arrays, or arrays on the default device."""

    state: TrainState  # `opt_state` may have only shapes


@dataclass(frozen=True)
class OnDisk:
    """The state is a checkpoint with checked files. The checkpoint is read once the target shardings are known."""

    path: Path
    state: TrainState  # in memory, with the same shapes and dtypes; the checkpoint will replace it

    def read(self, shardings: TrainState | None = None) -> TrainState:
        """Read the checkpoint's state: to the default device, or to `shardings`."""
        target = abstract_state(self.state)
        if shardings is not None:
            target = jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), target, shardings)
        return plan_restore(self.path, target, check=False).read()


@dataclass(frozen=True)
class Unread:
    """The weights are in checked files. They are read once the target shardings are known, as a checkpoint is."""

    read: Callable[[TrainState | None], TrainState]  # to these shardings; None: to the default device
    state: TrainState  # in memory, with the same shapes and dtypes


@dataclass(frozen=True)
class Placed:
    """The state on the devices of the compiled steps; a step reuses the memory of these arrays."""

    state: TrainState


@dataclass(frozen=True)
class Beginning:
    """The inputs of the first step, for the diagnosis of a first loss that is not finite."""

    # Parameters and the rest of the model's state; None if they are too large to keep beside the state.
    values: tuple[Any, Any] | None


class StateHolder:
    """Holds the `TrainState` and counts its steps. A large state is never on a single device.

    Until the first step is compiled, the parameters are the user's own arrays, and the optimizer's state has only
    shapes. Then each leaf is copied, or made, directly on the devices of its ranks. A run that resumes reads its
    checkpoint directly onto these devices; `load` before that reads it to the default device.

    `init` makes the optimizer's state from parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxpp_flax.trainers.step.optimizer_update import Update
      >>> update = Update(tx=optax.sgd(0.1, momentum=0.9))
      >>> held = StateHolder(update.first_state({"w": jnp.ones(2)}, {}), update.tx.init)
      >>> is_abstract(held.memory.opt_state), is_abstract(held.whole().opt_state), held.is_placed
      (True, False, False)
    """

    def __init__(self, first: TrainState, init: Callable[[Any], Any]) -> None:
        self.step = 0  # the number of optimizer steps done
        self._now: Made | OnDisk | Unread | Placed = Made(first)
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
        if isinstance(self._now, Unread):
            self.load()
        if isinstance(self._now, OnDisk):
            raise RuntimeError(
                f"the state is the checkpoint {self._now.path}, which `fit(resume=True)` reads after it has drawn the "
                "first batch. Look at the state after that: in `Callback.on_fit_start`, or when `fit` has ended."
            )
        return self._now.state

    def load(self) -> None:
        """Read the state to the default device, if it is on disk."""
        if isinstance(self._now, (OnDisk, Unread)):
            self.restored(self._now.read(None))

    def place(self, mesh: MpmdMesh | None, shardings: Callable[[], TrainState]) -> None:
        """Place the state for the compiled step; without a mesh, copy it to the default device. Later calls do nothing.

        `shardings` returns an `MpmdSharding` for each leaf.
        """
        match self._now:
            case Placed():
                return
            case OnDisk() as stored if mesh is not None:
                placed, self._beginning = stored.read(shardings()), None
            case Unread() as stored if mesh is not None:
                compare_initial_states(mesh, stored.state, self._init)
                placed, self._beginning = stored.read(shardings()), None
            case Made(state) if mesh is not None:
                compare_initial_states(mesh, state, self._init)
                placed = _place_state(mesh, state, shardings(), self._init)
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

    def is_in_files(self, read: Callable[[TrainState | None], TrainState]) -> None:
        """Hold weights in files, which fit. `read` makes the state from them once the target shardings are known."""
        self._now = Unread(read, self._now.state)

    def take_beginning(self) -> Beginning | None:
        """Return the inputs of the first step once: later calls, and a state from a checkpoint, give None."""
        beginning, self._beginning = self._beginning, None
        return beginning


def is_abstract(tree: Any) -> bool:
    """Return True if some leaf is a shape without a value."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def copied(leaf: Any) -> jax.Array:
    """Return a copy that shares no memory with `leaf`."""
    return jnp.array(leaf, copy=True)


def _place_state(mesh: MpmdMesh, state: TrainState, shardings: TrainState, init: Callable[[Any], Any]) -> TrainState:
    """Copy `state` to its ranks. A step may donate the copies: the user's arrays stay valid.

    If `opt_state` has only shapes, `init` makes it on the ranks.
    """
    placed = put(mesh, replace(state, opt_state=()), replace(shardings, opt_state=()))
    if is_abstract(state.opt_state):
        return replace(placed, opt_state=make_on_ranks(init, placed.params, shardings.opt_state))
    return replace(placed, opt_state=put(mesh, state.opt_state, shardings.opt_state))


def put(mesh: MpmdMesh, tree: Any, shardings: Any) -> Any:
    """Copy a tree of values that every process has to its ranks."""
    if not mesh.jax_mesh.is_multi_process:
        return spmd_to_mpmd_reshard(mesh, tree, shardings, donate=False)
    return jax.tree.map(place_on_ranks, tree, shardings)  # every process has the values: nothing is sent


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
