"""The state that a trainer holds: on the default device until a step is compiled, then where that step reads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxpp_flax.checkpoint import abstract_state
from jaxpp_flax.checkpoint.reading import plan_restore
from jaxpp_flax.trainers.loop.process_synchronization import compare_initial_states
from jaxpp_flax.trainers.state.placing import is_abstract, place_state
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.compilation import Backend, copied
from jaxpp_flax.trainers.step.update import Update

__all__ = ["HeldState"]

# Larger parameters are not kept beside the state to find out why a first loss is not finite.
_KEPT_FOR_DIAGNOSIS = 256 << 20


class HeldState:
    """The part of `PipelineTrainer` that holds its `TrainState`, so that a large one is never on one device alone.

    Until the first step is compiled, the parameters are the user's own arrays and the optimizer's state is shapes
    alone; then each leaf is copied, or made, straight on the devices of its ranks. `fit(resume=True)` reads a
    checkpoint straight onto them. Whoever asks for `state` before gets it on the default device.
    """

    _update: Update
    _backend: Backend
    _meter: Any
    _state: TrainState
    _placed: bool = False
    _initial: tuple[Any, Any] | None
    _first_loss_due: bool = True
    _unread: Path | None = None
    """A checkpoint that the state is, and that is read once its place is known; its files have been checked."""

    def _init_state(self, params: Any, rest: Any) -> None:
        self._state = self._update.first_state(params, rest)
        self._initial = (params, rest)  # the user's arrays, until the first loss is seen

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state, the rest of the model's state, and the step: where they are, not copied.

        The next `train_step` reuses their memory: keep `trainer.model` rather than this.
        """
        state = self._with_weights()
        if is_abstract(state.opt_state):
            self._state = replace(state, opt_state=self._update.tx.init(state.params))
        return self._state

    def _with_weights(self) -> TrainState:
        """The state, of which the optimizer's may be shapes alone."""
        if self._unread is not None:
            self._state = plan_restore(self._unread, abstract_state(self._state), check=False).read()
            self._forget_first()
        return self._state

    def _forget_first(self) -> None:
        """The state is no longer the first one."""
        self._unread = self._initial = None
        self._first_loss_due = False

    def _state_for_inference(self) -> TrainState:
        return self._with_weights().for_inference()

    def _place_state(self, compiled: Any) -> None:
        """Bring the state where `compiled` reads it, once."""
        if self._placed:
            return
        mesh, state = self._backend.mesh, self._state
        if mesh is None:
            self._state = jax.tree.map(copied, self.state)
        elif self._unread is not None:
            target = jax.tree.map(_with_sharding, abstract_state(state), compiled.in_shardings[0][0])
            self._state = plan_restore(self._unread, target, check=False).read()
            self._forget_first()
        else:
            compare_initial_states(mesh, state, self._update.tx.init)
            self._state = place_state(mesh, state, compiled.in_shardings[0][0], self._update.tx.init)
        self._placed = True
        if sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._initial)) > _KEPT_FOR_DIAGNOSIS:
            self._initial = None


def _with_sharding(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
