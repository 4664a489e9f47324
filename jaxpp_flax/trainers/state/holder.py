"""The state that a trainer holds: made, described or on disk until a step is compiled, then placed for that step."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.checkpoint import abstract_state
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.reading import plan_restore
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.loop.process_synchronization import compare_initial_states
from jaxpp_flax.trainers.state.initializer import Initializer
from jaxpp_flax.trainers.state.optimizer_memory import ON_DEVICES, OptimizerMemory
from jaxpp_flax.trainers.state.optimizer_state import make_on_ranks
from jaxpp_flax.trainers.state.placement import Ranks, fitting, put_on_ranks
from jaxpp_flax.trainers.state.train_state import (
    WIDENED,
    TrainState,
    abstract_text,
    first_average,
    is_abstract,
    model_part,
    shapes_of,
    target_of,
)


@dataclass(frozen=True)
class Made:
    """The state before a step is compiled: the user's own arrays, and shapes of what does not exist yet."""

    state: TrainState


@dataclass(frozen=True)
class OnDisk:
    """The state is a checkpoint with checked files. The checkpoint is read once the target shardings are known."""

    path: Path
    state: TrainState  # shapes

    def read(self, shardings: TrainState | None = None) -> TrainState:
        """Read the checkpoint's state: to the default device, or to `shardings`."""
        target = self.state if shardings is None else target_of(self.state, shardings)
        return plan_restore(self.path, target, check=False, widen=WIDENED).read()


@dataclass(frozen=True)
class Unread:
    """The weights are in checked files. They are read once the target shardings are known, as a checkpoint is."""

    read: Callable[[TrainState | None], TrainState]  # to these shardings; None: to the default device
    state: TrainState  # in memory, or shapes; with the shapes and dtypes of the result


@dataclass(frozen=True)
class Placed:
    """The state on the devices of the ranks. A step reuses the memory of these arrays.

    With `is_preliminary`, no training step is compiled: leaves may move to other ranks, and what only training needs
    may be shapes.
    """

    state: TrainState
    is_preliminary: bool = False


class StateHolder:
    """Holds the `TrainState` and counts its steps. A large state is never on a single device.

    Until the first step is compiled, the parameters are the user's own arrays, or shapes with an initializer, and the
    optimizer's state has only shapes. Then each leaf is copied, or made, directly on the devices of its ranks. A run
    that resumes reads its checkpoint directly onto these devices. A call that needs values before that (a save, a
    restore, inference) places them on the ranks too, in a preliminary place: see `Ranks.preliminary`.

    Args:
      first: the state before the first step.
      init: makes the optimizer's state from parameters.
      initializer: makes the parameters and the rest of the model's state, if `first` has only their shapes.
      ranks: None without a mesh; the state is then on the default device.
      kept: the memory of the optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxpp_flax.trainers.step.optimizer_update import Update
      >>> update = Update(tx=optax.sgd(0.1, momentum=0.9))
      >>> held = StateHolder(update.first_state({"w": jnp.ones(2)}, {}), update.tx.init)
      >>> is_abstract(held.memory.opt_state), is_abstract(held.whole().opt_state), held.is_placed
      (True, False, False)
    """

    def __init__(
        self,
        first: TrainState,
        init: Callable[[Any], Any],
        *,
        initializer: Initializer | None = None,
        ranks: Ranks | None = None,
        kept: OptimizerMemory = ON_DEVICES,
    ) -> None:
        self.step = 0  # the number of optimizer steps done
        self._now: Made | OnDisk | Unread | Placed = Made(first)
        self._init, self._initializer, self._ranks = init, initializer, ranks
        self.kept = kept
        self._compared = False

    @property
    def memory(self) -> TrainState:
        """The state in memory: shapes and dtypes are correct; values too, where there are arrays."""
        return self._now.state

    @property
    def is_placed(self) -> bool:
        """True if the state is on the devices of the compiled steps."""
        return isinstance(self._now, Placed) and not self._now.is_preliminary

    @property
    def lacks_values(self) -> bool:
        """True if the model is abstract: nothing is known to make its values of, and none were restored."""
        begins = not isinstance(self._now, Unread) and self._initializer is None
        return begins and is_abstract((self.memory.params, self.memory.model_state))

    @property
    def owns_arrays(self) -> bool:
        """True if no array of the state is the user's."""
        return isinstance(self._now, Placed)

    def target(self) -> TrainState:
        """Return the state as shapes with shardings: where each leaf lies, or will lie, on its ranks.

        Before a training step is compiled, the places are preliminary. Without a mesh, shapes have no shardings. No
        value is made or read.
        """
        if self._ranks is None or self.is_placed:
            return self.kept.described(abstract_state(self.memory))
        return target_of(shapes_of(self.memory), fitting(self.memory, self._ranks.preliminary(self.memory)))

    def target_of_model(self, wanted: Callable[[str], bool]) -> TrainState:
        """Return `target()` for a restore of some leaves into an abstract model; leaves with values keep these.

        The optimizer's state and the average are left out unless a path of theirs is `wanted`: they are made later, of
        the restored parameters.
        """
        target, state = self.target(), self.memory
        for name in ("opt_state", "ema"):
            if not any(wanted(f"{name}/{path}") for path in flatten(getattr(target, name))[0]):
                target, state = replace(target, **{name: ()}), replace(state, **{name: ()})
        return jax.tree.map(lambda shape, leaf: shape if is_abstract(leaf) else leaf, target, state)

    def whole(self) -> TrainState:
        """Return all values of the state, with the optimizer's values.

        Raises:
          RuntimeError: if the state is on disk: the caller did not `load` it.
          ModelError: if the model is abstract and has no values yet.
        """
        self._need_in_memory()
        state = self._now.state
        if self._ranks is None:
            state = self._with_values(state)
            if is_abstract(state.ema):
                state = replace(state, ema=first_average(state.params))
            if is_abstract(state.opt_state):
                state = replace(state, opt_state=self.kept.first(self._init, state.params, state.opt_state))
            self._now = replace(self._now, state=state)
        elif not isinstance(self._now, Placed) or is_abstract(state):
            placed = self._on_ranks(self._ranks.mesh, self._ranks.preliminary(state))
            self._now = Placed(placed, is_preliminary=True)
        return self._now.state

    def weights(self) -> TrainState:
        """Return the state; what only training needs may have only shapes.

        Raises:
          RuntimeError, ModelError: as `whole`.
        """
        self._need_in_memory()
        if is_abstract((self._now.state.params, self._now.state.model_state)):
            if self._ranks is None:
                self._now = replace(self._now, state=self._with_values(self._now.state))
            else:
                self._place_weights(self._ranks, self._ranks.preliminary(self._now.state))
        return self._now.state

    def load(self) -> None:
        """Read the state, if it is on disk: to a preliminary place on the ranks, or without ranks to one device."""
        if isinstance(self._now, (OnDisk, Unread)):
            state, ranks = self._now.state, self._ranks
            self.restored(self._now.read(None if ranks is None else fitting(state, ranks.preliminary(state))))

    def place(self, mesh: MpmdMesh | None, shardings: Callable[[], TrainState]) -> None:
        """Place the state for the compiled training step; without a mesh, copy it to the default device.

        Later calls do nothing. `shardings` returns an `MpmdSharding` for each leaf.

        Raises:
          ModelError: if the model is abstract and has no values, or does not fit; nothing is placed then.
        """
        if self.is_placed:
            return
        if mesh is None:
            self.load()
            placed = jax.tree.map(copied, self.whole())
            placed = replace(placed, opt_state=self.kept.on_default_device(placed.opt_state))
        elif isinstance(self._now, (OnDisk, Unread)):
            self.compare(mesh)
            placed = self._now.read(fitting(self._now.state, shardings()))
        else:
            placed = self._on_ranks(mesh, shardings())
        self._now = Placed(placed)

    def place_weights(self, shardings: Callable[[], TrainState]) -> None:
        """Place the parameters and the rest of the model's state for inference, once; the optimizer stays shapes.

        `shardings` returns an `MpmdSharding` for each leaf of `TrainState.for_inference`.
        """
        if self.is_placed:
            return
        self.load()
        if self._ranks is None:
            self.weights()
        else:
            self._place_weights(self._ranks, shardings())

    def advance(self, state: TrainState) -> None:
        """Hold `state`, the result of a step. The step has reused the memory of the state held before."""
        self._now = Placed(state)
        self.step += 1

    def restored(self, state: TrainState) -> None:
        """Replace the held state by `state`, which is on the same devices.

        An `opt_state` or `ema` of `()` is left as it is.
        """
        state = replace(
            state,
            opt_state=self.memory.opt_state if state.opt_state == () else state.opt_state,
            ema=self.memory.ema if state.ema == () else state.ema,
        )
        on_ranks = any(isinstance(leaf, MpmdArray) for leaf in jax.tree.leaves(state))
        if self.is_placed or on_ranks:
            self._now = Placed(state, is_preliminary=not self.is_placed)
        else:
            self._now = Made(state)

    def is_on_disk(self, path: Path) -> None:
        """Hold the checkpoint at `path`, which fits. It is read once the target shardings are known."""
        self._now = OnDisk(path, self.kept.described(shapes_of(self._now.state)))

    def is_in_files(self, read: Callable[[TrainState | None], TrainState]) -> None:
        """Hold weights in files, which fit. `read` makes the state from them once the target shardings are known."""
        self._now = Unread(read, self._now.state)

    # ------------------------------------------------------------------ values

    def make_model_leaves(self, paths: Container[str], shardings: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the first values of some leaves of an abstract model, by the paths of `model_part`.

        Args:
          paths: of the leaves.
          shardings: an `MpmdSharding` for each path; None makes the values on the default device.

        Raises:
          ModelError: if nothing is known to make them of.
        """
        state = self._now.state
        if self._initializer is None:
            raise ModelError(abstract_text(state))
        return self._initializer.make_some(lambda params, rest: flatten(model_part(params, rest))[0], paths, shardings)

    def _need_in_memory(self) -> None:
        """Read weights in files; refuse a checkpoint that `fit` is to read."""
        if isinstance(self._now, Unread):
            self.load()
        if isinstance(self._now, OnDisk):
            raise RuntimeError(
                f"the state is the checkpoint {self._now.path}, which `fit(resume=True)` reads after it has drawn the "
                "first batch. Look at the state after that: in `Callback.on_fit_start`, or when `fit` has ended. After "
                "an error of `fit` with several processes, `trainer.restore()` reads it."
            )

    def _with_values(self, state: TrainState) -> TrainState:
        """Return the state with values of the model on the default device, if it has only shapes."""
        if not is_abstract((state.params, state.model_state)):
            return state
        params, rest = self._need_initializer(state).make()
        return replace(state, params=params, model_state=rest)

    def _need_initializer(self, state: TrainState) -> Initializer:
        if self._initializer is None:
            raise ModelError(abstract_text(state))
        return self._initializer

    def compare(self, mesh: MpmdMesh) -> None:
        """Compare the first states of all processes, once."""
        if not self._compared and isinstance(self._now, (Made, Unread)):
            compare_initial_states(mesh, self._now.state, self._init, self._initializer)
        self._compared = True

    def _place_weights(self, ranks: Ranks, weights: TrainState) -> None:
        """Place the weights as `weights` says; what only training needs may stay shapes."""
        state, mesh = self._now.state, ranks.mesh
        places = replace(ranks.preliminary(state), params=weights.params, model_state=weights.model_state)
        placed = self._weights_on_ranks(mesh, state, places, _only_weights)
        opt_state = state.opt_state
        if isinstance(self._now, Made) and not is_abstract(opt_state):
            opt_state = put_on_ranks(mesh, opt_state, places.opt_state)
        step, scale = put_on_ranks(mesh, (state.step, state.loss_scale), (places.step, places.loss_scale))
        state = replace(placed, opt_state=opt_state, step=step, loss_scale=scale)
        self._now = Placed(state, is_preliminary=True)

    def _on_ranks(self, mesh: MpmdMesh, shardings: TrainState) -> TrainState:
        """Return the state with every leaf on its ranks: made, copied from the user's arrays, or moved."""
        placed = self._weights_on_ranks(mesh, self._now.state, shardings, lambda state: state)
        return self.training_part_on_ranks(mesh, placed, shardings)

    def training_part_on_ranks(self, mesh: MpmdMesh, state: TrainState, shardings: TrainState) -> TrainState:
        """Return a state whose weights are on their ranks with the rest there too.

        Where the optimizer's state or the average have only shapes, they are made from the parameters.
        """
        ema, opt_state = state.ema, state.opt_state
        if is_abstract(ema):
            ema = make_on_ranks(first_average, state.params, shardings.ema)
        else:
            ema = put_on_ranks(mesh, ema, shardings.ema)
        if is_abstract(opt_state):
            opt_state = make_on_ranks(self._init, state.params, shardings.opt_state)
        else:
            opt_state = put_on_ranks(mesh, opt_state, shardings.opt_state)
        step, scale = put_on_ranks(mesh, (state.step, state.loss_scale), (shardings.step, shardings.loss_scale))
        return replace(state, opt_state=opt_state, ema=ema, step=step, loss_scale=scale)

    def _weights_on_ranks(
        self, mesh: MpmdMesh, state: TrainState, shardings: TrainState, part: Callable[[TrainState], TrainState]
    ) -> TrainState:
        """Return the state with the weights on their ranks, if `part` of the state fits there."""
        weights, wanted = (state.params, state.model_state), (shardings.params, shardings.model_state)
        initializer = self._need_initializer(state) if is_abstract(weights) else None
        fitting(part(state), part(shardings))
        self.compare(mesh)
        params, rest = put_on_ranks(mesh, weights, wanted) if initializer is None else initializer.make_on_ranks(wanted)
        return replace(state, params=params, model_state=rest)


def _only_weights(state: TrainState) -> TrainState:
    return replace(state, step=(), opt_state=(), ema=None, loss_scale=None)


def copied(leaf: Any) -> jax.Array:
    """Return a copy that shares no memory with `leaf`."""
    return jnp.array(leaf, copy=True)
