"""A callback: a small class with hooks that `fit` calls during training. Its state goes into checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_flax.counts import is_whole

__all__ = ["Callback", "CallbackStates", "end_callbacks", "named"]


class Callback:
    """Hooks into `fit`; override the hooks you need.

    Args:
      every: steps between two calls of the hooks of a step (`on_step`, `on_metrics`).

    Raises:
      ValueError: if `every` is below 1.

    Example:
      >>> class Remember(Callback):
      ...     def on_metrics(self, trainer, step, metrics):
      ...         self.last = (step, metrics["loss"])
      >>> Remember(every=10).wants(20)
      True
    """

    def __init__(self, *, every: int = 1) -> None:
        self.every = self._checked_count("every", every)

    def _checked_count(self, name: str, value: Any) -> int:
        """Return an argument that counts steps; refuse all but whole numbers of at least 1."""
        if not is_whole(value) or value < 1:
            raise ValueError(f"{type(self).__name__}({name}={value!r}): it must be a whole number of at least 1.")
        return int(value)

    def wants(self, step: int) -> bool:
        """Return True if the hooks run at `step`."""
        return step % self.every == 0

    def state_name(self) -> str:
        """Return the name of the state in checkpoints: another one for each callback of a `fit` that has a state."""
        return type(self).__name__

    def get_state(self) -> Any:
        """Return this callback's state for a checkpoint, as JSON; None for no state."""
        return None

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, or begin again with None. `fit` calls this before `on_fit_start`."""

    def on_fit_start(self, trainer: Any) -> None:
        """Called before the first step; `trainer.stop` here ends `fit` without a step."""

    def on_step(self, trainer: Any, step: int) -> None:
        """Called once `step` was dispatched, and the metrics of the step before are logged.

        `trainer.state` is the state after `step`; nothing has waited for it.
        """

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called with the metrics of `step` on the host, one step late, so that devices never wait for metrics.

        After an error, Ctrl-C or a `break` it is not called for the steps that are left.
        """

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation at `step`."""

    def on_fit_end(self, trainer: Any) -> None:
        """Called after the last step, and after an error or interruption too; the last callback comes first.

        An error here ends `fit` if there was none before; otherwise it becomes a note of the first error.
        """


def end_callbacks(callbacks: Sequence[Callback], trainer: Any, error: BaseException | None = None) -> None:
    """Call `on_fit_end` of each callback, the last one first; an error keeps no other callback from its end.

    Args:
      error: the error that ends the run and is being handled. The errors of callbacks become its notes.

    Raises:
      Exception: the first error of a callback, if there was none before.

    Example:
      >>> class Fails(Callback):
      ...     def on_fit_end(self, trainer):
      ...         raise OSError("no space left")
      >>> first = ValueError("a bad batch")
      >>> end_callbacks([Fails()], None, first)
      >>> first.__notes__
      ["Fails.on_fit_end failed as well: OSError('no space left')"]
    """
    for index, callback in reversed(list(enumerate(callbacks))):
        try:
            callback.on_fit_end(trainer)
        except BaseException as failed:
            if error is None or not isinstance(failed, Exception):
                # The others end inside this handler: `FailureCheck` tells them there that the run has failed.
                end_callbacks(callbacks[:index], trainer, failed)
                raise
            error.add_note(f"{type(callback).__name__}.on_fit_end failed as well: {failed!r}")


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks that may have a state by the names of their states, in whatever order they are passed.

    Raises:
      ValueError: if two of them have the same name; a checkpoint could not tell their states apart.

    Example:
      >>> from jaxpp_flax.trainers.callbacks.stopping import EarlyStopping
      >>> list(named([EarlyStopping("accuracy", mode="max"), Callback(), EarlyStopping("loss")]))
      ['EarlyStopping(accuracy)', 'EarlyStopping(loss)']
    """
    found: dict[str, Callback] = {}
    for callback in callbacks:
        if type(callback).get_state is Callback.get_state:
            continue
        name = callback.state_name()
        if name in found:
            raise ValueError(
                f"two callbacks have a state named {name!r}, which a checkpoint could not tell apart: {found[name]!r} "
                f"and {callback!r}. Leave one out, or give them different names: `state_name()` of a subclass."
            )
        found[name] = callback
    return found


class CallbackStates:
    """The states of the callbacks of the last `fit`, by the names of these callbacks.

    Example:
      >>> from jaxpp_flax.trainers.callbacks.stopping import EarlyStopping
      >>> states = CallbackStates()
      >>> states.begin([EarlyStopping(), Callback()], resumed=False)
      >>> states.to_json()
      {'EarlyStopping(loss)': {'best': inf, 'bad': 0}}
    """

    def __init__(self) -> None:
        self._callbacks: Sequence[Callback] = ()
        self._restored: Mapping[str, Any] | None = None

    def restored(self, states: Mapping[str, Any] | None) -> None:
        """Note the states from the checkpoint that a run resumes from; None without a checkpoint."""
        self._restored = states

    def begin(self, callbacks: Sequence[Callback], *, resumed: bool) -> None:
        """Reset each callback, or restore its state from the checkpoint; without a checkpoint, keep its state.

        A state in the checkpoint that none of the callbacks has is left out, with a warning.

        Raises:
          ValueError: as `named`.
        """
        states, own = self._restored if resumed else {}, named(callbacks)
        names = {id(callback): name for name, callback in own.items()}
        for callback in callbacks:
            callback.set_state(callback.get_state() if states is None else states.get(names.get(id(callback), "")))
        if left := [name for name in states or () if name not in own]:
            anew = [name for name, of in own.items() if name not in (states or ()) and of.get_state() is not None]
            begins = f" These callbacks begin anew: {', '.join(anew)}." if anew else ""
            warnings.warn(
                f"the checkpoint has the states of callbacks that this `fit` does not have, and they are left out: "
                f"{', '.join(left)}.{begins}",
                stacklevel=2,
            )
        self._callbacks = callbacks

    def to_json(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one."""
        states = {name: callback.get_state() for name, callback in named(self._callbacks).items()}
        return {name: state for name, state in states.items() if state is not None}
