"""The interface of callbacks: a loop calls their hooks at its start, after its steps and at its end.

`fit` and `training_steps` call the hooks of all callbacks, in the order of the list `callbacks=`:

1. `on_fit_start`, before the first step;
2. `on_step` after each step; `on_metrics` and `on_evaluate` when such values are ready;
3. `on_last_step`, when no step follows, for any reason;
4. `on_fit_end`, in reverse order.

The states of callbacks go into checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.counts import check_count
from jaxpp_flax.messages import warn_user
from jaxpp_flax.processes.failures import PREEMPTED_STATUS

__all__ = ["Callback", "CallbackStates", "StepRecord", "end_callbacks", "has_failed", "named", "overrides"]


@dataclass(frozen=True)
class StepRecord:
    """A step that was dispatched to the devices.

    Args:
      step: the number of the step, from 1.
      metrics: the metrics of the step, at least `loss`; the values may not be ready yet.
      batch: the batch of the step: the whole batch, or this process's rows.
      global_batch_size: the number of examples in the whole batch, if `batch` has only this process's rows.
    """

    step: int
    metrics: Mapping[str, Any]
    batch: Any
    global_batch_size: int | None = None


class Callback:
    """The base class of callbacks: override the hooks that you need.

    Args:
      every: steps between two calls of `on_step` and `on_metrics`.

    Raises:
      ValueError: if `every` is below 1.

    Example:
      >>> class Remember(Callback):
      ...     def on_metrics(self, trainer, step, metrics):
      ...         self.last = (step, metrics["loss"])
      >>> Remember(every=10).wants(20)
      True

      Save on a condition of your own. Every process gets equal metrics of an evaluation, so all of them save:

      >>> class SaveGood(Callback):
      ...     def on_evaluate(self, trainer, step, metrics):
      ...         if metrics["loss"] < 0.5:
      ...             trainer.save(f"good/{step}")
    """

    def __init__(self, *, every: int = 1) -> None:
        self.every = check_count(f"{type(self).__name__}: every", every)

    def wants(self, step: int) -> bool:
        """Return True if the hooks run at `step`."""
        return step % self.every == 0

    def state_name(self) -> str:
        """Return the name of this state in checkpoints. Callbacks of one `fit` with a state need different names."""
        return type(self).__name__

    def get_state(self) -> Any:
        """Return this callback's state for a checkpoint, as values that JSON can hold; None for no state."""
        return None

    def set_state(self, state: Any) -> None:
        """Restore a state from `get_state`, or reset it if `state` is None.

        Every loop calls this before `on_fit_start`: with None unless it resumes, so a callback that is used again
        begins anew; after `resume=` with the state of the checkpoint, or None if that has none.
        """

    def on_fit_start(self, trainer: Any) -> None:
        """Called after the step is compiled, before it first runs; `trainer.stop` here ends the loop without a step."""

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        """Called after a step was dispatched and the metrics of the step before it were logged.

        `trainer.state` is the state after `record.step`; the devices may still be computing it.
        """

    def on_metrics(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called with the metrics of `step` on the host, one step late, so that devices never wait for metrics.

        After an error, Ctrl-C or a `break`, it is not called for steps whose metrics it has not had yet.
        """

    def on_evaluate(self, trainer: Any, step: int, metrics: Mapping[str, Any]) -> None:
        """Called after an evaluation at `step`."""

    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        """Called after the last step: here the trainer logs the last row, evaluates and saves.

        Args:
          error: the exception that ends the loop, also `KeyboardInterrupt` after Ctrl-C, `SystemExit` after SIGTERM and
            `GeneratorExit` after a `break`. None at the end of the data, or if `trainer.stop` was called.
        """

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        """Called at the end if `on_fit_start` was called, in reverse order of the callbacks.

        If this or `on_last_step` raises, the loop ends with this error. If the loop ends with an error already, the new
        one becomes a note of it.
        """


def has_failed(error: BaseException | None) -> bool:
    """Return True if `error` means that the loop failed: a `break`, `sys.exit()` and the exit after SIGTERM do not.

    Example:
      >>> has_failed(ValueError()), has_failed(SystemExit(1)), has_failed(SystemExit(0)), has_failed(None)
      (True, True, False, False)
    """
    if isinstance(error, SystemExit):
        return error.code not in (None, 0, PREEMPTED_STATUS)
    return error is not None and not isinstance(error, GeneratorExit)


def end_callbacks(callbacks: Sequence[Callback], trainer: Any, error: BaseException | None = None) -> None:
    """Call `on_last_step` of each callback, then `on_fit_end`; an error keeps no other callback from its end.

    Call it outside of any handler: Orbax takes an error that is being handled for one of the save that it makes.

    Args:
      error: the error that ends the loop. The errors of callbacks become its notes.

    Raises:
      BaseException: `error`, or the first error of a callback if there was none before.

    Example:
      >>> class Fails(Callback):
      ...     def on_fit_end(self, trainer, error):
      ...         raise OSError("no space left")
      >>> first = ValueError("a bad batch")
      >>> try:
      ...     end_callbacks([Fails()], None, first)
      ... except ValueError as error:
      ...     print(error.__notes__)
      ["Fails.on_fit_end failed as well: OSError('no space left')"]
    """
    calls = [(callback, "on_last_step") for callback in callbacks]
    for callback, hook in [*calls, *((callback, "on_fit_end") for callback in reversed(callbacks))]:
        failed = _failure(getattr(callback, hook), trainer, error)
        if failed is None:
            continue
        if error is not None and isinstance(failed, Exception):
            error.add_note(f"{type(callback).__name__}.{hook} failed as well: {failed!r}")
        else:
            failed.__context__ = failed.__context__ or error
            error = failed
    try:
        if error is not None:
            raise error
    finally:
        error = failed = None  # else the error would hold itself, by its traceback and this frame


def _failure(call: Callable[..., None], trainer: Any, error: BaseException | None) -> BaseException | None:
    """Return the error of a call, if any."""
    try:
        call(trainer, error)
    except BaseException as failed:
        return failed
    return None


def overrides(callback: Callback, hook: str) -> bool:
    """Return True if a callback's class defines this hook itself."""
    return getattr(type(callback), hook) is not getattr(Callback, hook)


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks that may have a state by the names of their states, in whatever order they are passed.

    Raises:
      TypeError: for what is no callback.
      ValueError: if two of them have the same name; a checkpoint could not tell their states apart.

    Example:
      >>> from jaxpp_flax.trainers.callbacks.stop_conditions import EarlyStopping
      >>> list(named([EarlyStopping("accuracy", mode="max"), Callback(), EarlyStopping("loss")]))
      ['EarlyStopping(accuracy)', 'EarlyStopping(loss)']
    """
    found: dict[str, Callback] = {}
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"callbacks holds a {type(callback).__name__}; subclass jaxpp_flax.trainers.Callback, or wrap a "
                "function: OnMetrics(function, every=10)."
            )
        if not overrides(callback, "get_state"):
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
    """The states of the callbacks of the last loop, by the names of these callbacks.

    Example:
      >>> from jaxpp_flax.trainers.callbacks.stop_conditions import EarlyStopping
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
            begins = f" These callbacks begin without a state: {', '.join(anew)}." if anew else ""
            warn_user(
                f"the checkpoint has the states of callbacks that this `fit` does not have; these are left out: "
                f"{', '.join(left)}.{begins}",
            )
        self._callbacks = callbacks

    def to_json(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one; before a loop has begun, those of the run it resumes."""
        if not self._callbacks and self._restored:
            return {**self._restored}
        # Copies: the checkpoint is written later, and a callback may return an object that it changes.
        states = {name: copy.deepcopy(callback.get_state()) for name, callback in named(self._callbacks).items()}
        return {name: state for name, state in states.items() if state is not None}
