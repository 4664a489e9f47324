"""What the documentation promises of a trainer and its directory, in plain Python: the model of random scripts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxpp_flax.checkpoint import (
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    UnfinishedCheckpointError,
)
from jaxpp_flax.trainers import DataPositionError
from tests.trainers.script_data import Data, Empty, Ending, Happens, Place, PlannedError, Refused, Stream
from tests.trainers.script_program import State

DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError, UnfinishedCheckpointError)
_ERRORS: dict[str, tuple[type[BaseException], ...]] = {
    "raise": (PlannedError,), "ctrl_c": (KeyboardInterrupt,), "sigterm": (SystemExit,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint: what it holds, unless it is damaged."""

    state: State
    place: Place | None
    callbacks: dict[str, Any]
    damaged: bool = False


@dataclass
class Patience:
    """`EarlyStopping` on the loss."""

    patience: int
    best: float = math.inf
    bad: int = 0

    def get(self) -> tuple[float, int]:
        return self.best, self.bad

    def set(self, state: tuple[float, int] | None) -> None:
        self.best, self.bad = (math.inf, 0) if state is None else state

    def see(self, loss: float) -> bool:
        """Whether to stop."""
        self.best, self.bad = (loss, 0) if loss < self.best else (self.best, self.bad + 1)
        return self.bad >= self.patience


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a callback does, at the first step from `step` on that calls its hook."""

    hook: str
    step: int
    what: Ending | str


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The arguments of a `fit`.

    Args:
      drawn: batches that the data has given, if it is the iterator of the `fit` before.
    """

    data: Data
    steps: int | None = None
    epochs: int | None = None
    resume: Any = False
    resume_data: str = "fast_forward"
    eval_every: int | None = None
    evaluates: bool = False
    event: Event | None = None
    stops_early: bool = False
    drawn: int | None = None


@dataclass
class Outcome:
    """What must come: the logged losses by step, the result of `fit`, and an error of one of these types, if any."""

    losses: dict[int, float] = field(default_factory=dict)
    result: dict[str, float] = field(default_factory=dict)
    errors: tuple[type[BaseException], ...] = ()
    warns: bool = False


class Fails(Exception):  # noqa: N818
    """The call raises one of these types."""

    def __init__(self, *types: type[BaseException]):
        super().__init__(types)
        self.types = types


class Run:
    """A trainer and its directory.

    Args:
      disk: of an earlier program.
      every, keep: those of the trainer's checkpoints.
    """

    EVALUATED = (300, 301, 302, 303)

    def __init__(self, disk: dict[int, Saved], *, every: int | None, keep: int | None):
        self.disk, self.save_every, self.keep = disk, every, keep
        self.state = State.first()
        self.place: Place | None = None
        self.patience = Patience(2)
        self.has_patience = False  # whether the callbacks of the last `fit` have it
        self.stream: Stream | None = None
        self.last_of_fit: State | None = None  # saved because the directory stands alone
        self.pending: list[Sequence[int]] = []  # what `accumulate` has summed

    # ------------------------------------------------------------------ single calls

    def check_none_pending(self) -> None:
        if self.pending:
            raise Fails(RuntimeError)

    def update(self) -> float:
        if not self.pending:
            raise Fails(RuntimeError)
        loss = sum(map(self.state.loss, self.pending)) / len(self.pending)
        self.state, self.place, self.pending = self.state.after(*self.pending), None, []
        return loss

    def step_by_hand(self, examples: Sequence[int]) -> float:
        self.check_none_pending()
        loss = self.state.loss(examples)
        self.state, self.place = self.state.after(examples), None
        return loss

    def save(self) -> None:
        if self.state is self.last_of_fit and self.state.step in self.disk:
            return
        if max(self.disk, default=-1) >= self.state.step:
            raise Fails(CheckpointSaveError)
        self.disk[self.state.step] = self.saved()
        if self.keep is not None:
            for step in sorted(self.disk)[: -self.keep]:
                del self.disk[step]

    def saved(self) -> Saved:
        callbacks = {"EarlyStopping": self.patience.get()} if self.has_patience else {}
        return Saved(state=self.state, place=self.place, callbacks=callbacks)

    def restore(self, saved: Saved | None, part: str = "all", *, renamed: bool = False) -> None:
        """`part` is what `only` takes; `renamed` takes the optimizer's copies for the weights."""
        self.check_none_pending()
        if saved is None:
            raise Fails(CheckpointNotFoundError)
        if saved.damaged:
            raise Fails(*DAMAGE)
        there = replace(saved.state, params=saved.state.anchor) if renamed else saved.state
        self.last_of_fit = None
        if part == "all":
            self.state, self.place = there, saved.place
            return
        if part == "params":  # copies follow
            self.state = replace(self.state, params=there.params, anchor=there.params, ema=there.params)
        else:
            self.state = replace(self.state, anchor=there.anchor, trace=there.trace)
        self.place = None

    # ------------------------------------------------------------------ training

    def loop(self, data: Data, steps: int | None, epochs: int | None, left_at: int | None) -> Outcome:
        """`training_steps`, left after so many of them."""
        outcome = Outcome()
        stream = Stream(data, steps=steps, epochs=epochs, start=None, how="fast_forward")
        try:
            self.check_none_pending()
            if self.save_every is not None:
                self._refuse_later()
            self._begin(stream)
            while (examples := self._draw(stream)) is not None:
                loss = self._train(stream, examples)
                outcome.losses[self.state.step] = loss
                self._save_if_due()
                if left_at is not None and stream.given == left_at:
                    return outcome
            outcome.warns = stream.warns
            if self.save_every is not None:
                self._end(preempted=False)
        except Happens as event:
            outcome.errors = _ERRORS[event.args[0]]
        except Fails as failure:
            outcome.errors = failure.types
        return outcome

    def fit(self, call: Fit) -> Outcome:
        outcome = Outcome()
        try:
            self.check_none_pending()
            self._fit(call, outcome)
        except Refused:
            outcome.errors = (DataPositionError,)
        except Empty:
            outcome.errors = (ValueError,)
        except Fails as failure:
            outcome.errors = failure.types
        except Happens as event:
            outcome.errors = _ERRORS[event.args[0]]
            if event.args[0] == "ctrl_c" and self.state.step > 0 and self.state.step not in self.disk:
                self.save()
        return outcome

    def _fit(self, call: Fit, outcome: Outcome) -> None:
        steps, start, kept = call.steps, None, {}
        if not call.resume:
            self._refuse_later()
        else:
            kept = self._resume(call)
            start = self.place
            if steps is not None:
                if self.state.step >= steps:
                    return
                steps -= self.state.step
        if call.stops_early:
            self.patience.set(self.patience.get() if kept is None else kept.get("EarlyStopping"))
        self.has_patience = call.stops_early
        stream = Stream(
            call.data, steps=steps, epochs=call.epochs, start=start, how=call.resume_data, drawn=call.drawn or 0
        )
        self._begin(stream)
        try:
            _Loop(self, call, stream, outcome).run()
        finally:  # a callback may raise after the data has ended
            outcome.warns = stream.warns

    def _resume(self, call: Fit) -> dict[str, Any] | None:
        """What callbacks go on from; None without a checkpoint."""
        aside = 0
        while self.disk:
            latest = max(self.disk)
            if not self.disk[latest].damaged:
                self.restore(self.disk[latest])
                return self.disk[latest].callbacks
            if call.resume != "latest_valid":
                raise Fails(*DAMAGE)
            del self.disk[latest]
            aside += 1
        if aside:
            raise Fails(CheckpointNotFoundError)
        return None

    def _refuse_later(self) -> None:
        if max(self.disk, default=0) > self.state.step:
            raise Fails(CheckpointSaveError)

    def _begin(self, stream: Stream) -> None:
        self.stream, self.place = stream, stream.place

    def _draw(self, stream: Stream) -> tuple[int, ...] | None:
        """The next batch; the place is after it once it is used."""
        examples = None
        try:
            examples = stream.next()
        finally:
            if examples is None:
                self.place = stream.place
        return examples

    def _train(self, stream: Stream, examples: Sequence[int]) -> float:
        loss = self.state.loss(examples)
        self.state, self.place = self.state.after(examples), stream.place
        return loss

    def _save_if_due(self) -> None:
        step = self.state.step
        if self.save_every is not None and step % self.save_every == 0 and step not in self.disk:
            self.save()

    def _end(self, *, preempted: bool) -> None:
        step = self.state.step
        if step > 0 and step not in self.disk:
            self.save()
            if self.save_every is None:
                self.last_of_fit = self.state
        if preempted:
            raise Happens("sigterm")


class _Loop:
    """The loop of `fit`: rows come one step late, at an evaluation, and at the end; after an error without a hook."""

    def __init__(self, run: Run, call: Fit, stream: Stream, outcome: Outcome):
        self.of, self.call, self.stream, self.outcome = run, call, stream, outcome
        self.preempted, self.stopping, self.done = False, False, False
        self.pending: tuple[int, float] | None = None

    def run(self) -> None:
        try:
            self._run()
        except Happens:
            self.outcome.losses |= dict([self.pending] if self.pending else [])  # no way out loses the last row
            raise

    def _run(self) -> None:
        started = False
        while not self.preempted and not self.stopping and (examples := self.of._draw(self.stream)) is not None:
            self.preempted = self.stream.requested
            if not started:
                started = True
                if self.call.stops_early and self.of.patience.bad >= self.of.patience.patience:
                    self.stopping = True
                self._hook("on_fit_start", self.of.state.step)
                if self.stopping or self.preempted:
                    self.of._end(preempted=self.preempted)
                    return
            self._step_ends(self.of._train(self.stream, examples))
        cut_off = self.preempted
        self._deliver(None)
        step, every = self.of.state.step, self.call.eval_every
        if not cut_off and self.call.evaluates and (every is None or step % every):
            self._evaluate()
        self.of._end(preempted=self.preempted)

    def _step_ends(self, loss: float) -> None:
        step, every = self.of.state.step, self.call.eval_every
        self._deliver((step, loss))
        self._hook("on_step", step)
        self._hook("in_step", step)  # Ctrl-C waits for the step's end
        if every is not None and self.call.evaluates and step % every == 0:
            self._deliver(None)
            self._evaluate()
        self.of._save_if_due()

    def _deliver(self, new: tuple[int, float] | None) -> None:
        pending, self.pending = self.pending, new
        if pending is not None:
            self.outcome.losses |= dict([pending])
            self.outcome.result = {"loss": pending[1]}
            self._hook("on_metrics", pending[0])

    def _evaluate(self) -> None:
        loss = self.of.state.loss(Run.EVALUATED)
        self.outcome.result["eval_loss"] = loss
        if self.call.stops_early and self.of.patience.see(loss):
            self.stopping = True
        self._hook("on_evaluate", self.of.state.step)

    def _hook(self, hook: str, step: int) -> None:
        event = self.call.event
        if self.done or event is None or event.hook != hook or step < event.step:
            return
        self.done = True
        if event.what == "stop":
            self.stopping = True
        elif event.what == "sigterm":
            self.preempted = True
        else:
            raise Happens(event.what)
