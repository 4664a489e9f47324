"""The states of the callbacks of a `fit`, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_flax.trainers.callbacks.base import Callback, named

__all__ = ["CallbackStates"]


class CallbackStates:
    """The states of the callbacks of the last `fit`, with names that are equal in another run.

    Example:
      >>> from jaxpp_flax.trainers.callbacks import EarlyStopping
      >>> states = CallbackStates()
      >>> states.begin([EarlyStopping(), Callback()], resumed=False)
      >>> states.to_json()
      {'EarlyStopping': {'best': inf, 'bad': 0}}
    """

    def __init__(self) -> None:
        self._callbacks: Sequence[Callback] = ()
        self._restored: Mapping[str, Any] | None = None

    def restored(self, states: Mapping[str, Any] | None) -> None:
        """Note the states from the checkpoint that a run resumes from; None without a checkpoint."""
        self._restored = states

    def begin(self, callbacks: Sequence[Callback], *, resumed: bool) -> None:
        """Reset each callback, or restore its state from the checkpoint; without a checkpoint, keep its state."""
        states = self._restored if resumed else {}
        for name, callback in named(callbacks).items():
            callback.set_state(callback.get_state() if states is None else states.get(name))
        self._callbacks = callbacks

    def to_json(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one."""
        states = {name: callback.get_state() for name, callback in named(self._callbacks).items()}
        return {name: state for name, state in states.items() if state is not None}
