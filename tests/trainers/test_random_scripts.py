"""Random trainer scripts: whatever a script does in whatever order, the trainer and its directory do as documented.

A failure prints the script. The model is in `script_model.py`, the data in `script_data.py`, the program of which NumPy
knows every bit in `script_program.py`.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint import save as save_tree
from jaxpp_flax.trainers import Checkpoints, DictTracker, MicrobatchStateWarning
from jaxpp_flax.trainers.callbacks import Callback, EarlyStopping
from jaxpp_flax.trainers.callbacks.sigterm import PREEMPTED_STATUS
from tests.helpers import slow
from tests.trainers import script_program
from tests.trainers.script_damage import DAMAGES, damage
from tests.trainers.script_data import Data, happen
from tests.trainers.script_model import DAMAGE, Event, Fails, Fit, Outcome, Run, Saved
from tests.trainers.script_moves import SETTINGS, Does, continuations, data_sets, fits, limits
from tests.trainers.script_program import State, features_of
from tests.trainers.sharing import sharing_steps

# The state of its model hashes the microbatches in their order.
pytestmark = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning")
make_trainer = sharing_steps("checkpoints", "tracker")(script_program.make_trainer)


class Scripts(RuleBasedStateMachine):
    """A trainer, its directory, and the model of both."""

    @initialize(options=SETTINGS)
    def begin(self, options: dict[str, Any]) -> None:
        self.handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores Ctrl-C
        self.top = Path(tempfile.mkdtemp(prefix="jaxpp_flax_scripts_"))
        self.directory = self.top / "run"
        self.elsewhere: list[tuple[Path, Saved | None]] = []
        self._start({}, options)

    def _start(self, disk: dict[int, Saved], options: dict[str, Any]) -> None:
        saves = options["saves"]
        self.run = Run(disk, every=saves["every"], keep=saves["keep"])
        self.tracker = DictTracker()
        checkpoints = Checkpoints(self.directory, **saves)
        self.trainer = make_trainer(checkpoints, stages=options["stages"], tracker=self.tracker)
        self.early = EarlyStopping(patience=self.run.patience.patience)
        self.held: tuple[Data, Any] | None = None  # the iterator of the `fit` before
        self.writing = False  # a save that no call has waited for
        self.has_restored = False

    def teardown(self) -> None:
        if hasattr(self, "trainer"):
            if sys.exc_info()[0] is None:  # else what is wrong has been found
                self._look()
                self._read_all()
            signal.signal(signal.SIGINT, self.handler)
            shutil.rmtree(self.top, ignore_errors=True)

    # ------------------------------------------------------------------ training

    @rule(data=st.data())
    def go_on(self, data: Any) -> None:
        self._fit(data.draw(continuations(self.run)))

    @rule(data=st.data(), resume=st.sampled_from([True, "latest_valid", False]))
    def fit(self, data: Any, resume: Any) -> None:
        self._fit(data.draw(fits(self.run, resume, self.held[0] if self.held else None)))

    def _fit(self, call: Fit) -> None:
        self.tracker.metrics.clear()
        self._interrupt_within(call.event)
        callbacks: list[Callback] = [self.early] if call.stops_early else []
        callbacks += [] if call.event is None else [Does(call.event)]
        evaluated = [features_of(Run.EVALUATED)] if call.evaluates else None
        given = self.held[1] if call.drawn is not None and self.held else call.data.build()
        before = self.run.stream
        expected = self.run.fit(call)
        result = self._expect(
            expected,
            lambda: self.trainer.fit(
                given, steps=call.steps, epochs=call.epochs, resume=call.resume, resume_data=call.resume_data,  # type: ignore[arg-type]
                eval_data=evaluated, eval_every=call.eval_every if call.evaluates else None, callbacks=callbacks,
            ),
        )  # fmt: skip
        assert self.tracker.metrics.get("loss", {}) == expected.losses
        if call.resume and not expected.losses and not expected.errors:  # no step: with the metrics of the checkpoint
            assert result.items() >= expected.result.items()
        else:
            assert result == (None if expected.errors else expected.result)
        self.writing = False
        self._interrupt_within(None)
        if self.run.stream is not before:
            self.held = (call.data, given) if call.data.runs_once and call.data.event is None else None

    @rule(data=st.data(), left_at=st.none() | st.integers(1, 5))
    def loop(self, data: Any, left_at: int | None) -> None:
        source = data.draw(data_sets(["raise", "ctrl_c"]))
        more, epochs = data.draw(limits(source.runs_once))
        steps = None if more is None else max(1, more)
        found: dict[int, float] = {}

        def train() -> None:
            for number, (step, metrics) in enumerate(
                self.trainer.training_steps(source.build(), steps=steps, epochs=epochs), 1
            ):
                found[step] = float(metrics["loss"])
                if number == left_at:
                    break

        self.held = None
        expected = self.run.loop(source, steps, epochs, left_at)
        self._expect(expected, train)
        assert found == expected.losses
        self.writing = False

    @rule(first=st.integers(100, 120), size=st.sampled_from([4, 8]))
    def step_by_hand(self, first: int, size: int) -> None:
        examples, losses = range(first, first + size), list[float]()
        expected = self._model(lambda: losses.append(self.run.step_by_hand(examples)))
        metrics = self._expect(expected, lambda: self.trainer.train_step(features_of(examples)))
        assert losses == ([] if metrics is None else [float(metrics["loss"])])

    @precondition(lambda self: len(self.run.pending) < 4)
    @rule(first=st.integers(130, 150), size=st.sampled_from([4, 8]))
    def accumulate(self, first: int, size: int) -> None:
        examples = range(first, first + size)
        assert float(self.trainer.accumulate(features_of(examples))["loss"]) == self.run.state.loss(examples)
        self.run.pending.append(examples)

    @precondition(lambda self: len(self.run.pending) != 3)  # a third is no whole number over a power of two
    @rule()
    def update(self) -> None:
        losses = list[float]()
        expected = self._model(lambda: losses.append(self.run.update()))
        metrics = self._expect(expected, self.trainer.update)
        assert losses == ([] if metrics is None else [float(metrics["loss"])])

    @rule()
    def zero_grad(self) -> None:
        self.trainer.zero_grad()
        self.run.pending = []

    # ------------------------------------------------------------------ what changes nothing

    @rule(how=st.sampled_from(["evaluate", "predict", "look"]))
    def inspect(self, how: str) -> None:
        batch, state = features_of(Run.EVALUATED), self.run.state
        if how == "evaluate":
            assert self.trainer.evaluate([batch])["loss"] == state.loss(Run.EVALUATED)
        elif how == "predict":
            assert np.array_equal(np.asarray(self.trainer.predict(batch)), state.predicted(Run.EVALUATED))
        else:  # before the first step, too, which makes the whole state
            self._look()

    def _look(self) -> None:
        assert State.of(self.trainer.state).differences(self.run.state) == []

    @invariant()
    def nothing_else_has_changed(self) -> None:
        if not hasattr(self, "trainer"):
            return
        assert self.trainer.step == self.run.state.step
        if self.trainer.held.places is not None:
            self._look()
        if not self.writing:
            steps = sorted(int(path.name) for path in self.directory.glob("*") if path.name.isdigit())
            assert steps == sorted(self.run.disk), f"{steps}, expected {sorted(self.run.disk)}"

    # ------------------------------------------------------------------ checkpoints

    @rule(wait=st.booleans())
    def save(self, wait: bool) -> None:
        self._expect(self._model(self.run.save), lambda: self.trainer.save(wait=wait))
        self.writing = not wait

    @rule(weights=st.booleans())
    def save_elsewhere(self, weights: bool) -> None:
        """The whole run, or its weights alone."""
        path = self.top / f"elsewhere_{len(self.elsewhere)}"
        if weights:
            save_tree(path, {"params": self.trainer.state.params})
        else:
            self.trainer.save(path)
        self.elsewhere.append((path, self.run.saved(), weights))

    @rule(
        data=st.data(), part=st.sampled_from(["all", "all", "params", "opt_state"]), renamed=st.booleans(),
        missing=st.sampled_from(["error", "keep"]),
    )  # fmt: skip
    def restore(self, data: Any, part: str, renamed: bool, missing: Any) -> None:
        where: Any = data.draw(st.sampled_from(["latest", *sorted(self.run.disk), 77, *range(-len(self.elsewhere), 0)]))
        renamed = renamed and part != "opt_state"
        weights = False
        if where == "latest":
            saved = self.run.disk.get(max(self.run.disk, default=-1))
        elif where < 0:
            where, saved, weights = self.elsewhere[where]
        else:
            saved = self.run.disk.get(where)
        only = None if part == "all" else f"{part}/*"
        rename = {"params": "opt_state/anchor"} if renamed else None

        def restored() -> None:
            self.run.check_none_pending()
            if weights and (part == "opt_state" or renamed or (part == "all" and missing == "error")):
                raise Fails(CheckpointMismatchError)
            self.run.restore(saved, "params" if weights else part, renamed=renamed)

        self._expect(
            self._model(restored),
            lambda: self.trainer.restore(where, only=only, rename=rename, missing=missing),
        )
        self.has_restored = True

    @precondition(lambda self: self.run.disk)
    @rule(data=st.data(), how=st.sampled_from(DAMAGES))
    def damage(self, data: Any, how: str) -> None:
        self._wait()
        if self.has_restored:
            self._look()  # before the first step, it is only now that the values are read
        step = data.draw(st.sampled_from(sorted(self.run.disk)))
        if how == "empty":
            (self.directory / "60").mkdir(exist_ok=True)
            self.run.disk[60] = replace(self.run.disk[step], damaged=True)
        elif how == "remove":
            shutil.rmtree(self.directory / str(step))
            del self.run.disk[step]
        elif not self.run.disk[step].damaged:
            damage(self.directory / str(step), how, data.draw(st.integers(0, 99)))
            self.run.disk[step] = replace(self.run.disk[step], damaged=True)
            errors = (RuntimeError,) if self.run.pending else DAMAGE
            self._expect(Outcome(errors=errors), lambda: self.trainer.restore(step))

    @rule(options=SETTINGS)
    def start_again(self, options: dict[str, Any]) -> None:
        """The program ends, which waits for what is being written, and starts again."""
        self._wait()
        self._start(self.run.disk, options)

    # ------------------------------------------------------------------ inside

    def _interrupt_within(self, event: Event | None) -> None:
        """Ctrl-C once a step has taken the state's memory, and before anything has its results."""
        trainer = self.trainer
        waits = event is not None and event.hook == "in_step"

        def finish(*arguments: Any) -> Any:
            nonlocal waits
            if waits and event is not None and trainer.step + 1 >= event.step:
                waits = False
                happen("ctrl_c")
            return type(trainer)._finish(trainer, *arguments)

        vars(trainer)["_finish"] = finish

    def _wait(self) -> None:
        self.trainer.checkpoints.store.wait()  # type: ignore[union-attr]
        self.writing = False

    def _model(self, call: Callable[[], None]) -> Outcome:
        try:
            call()
        except Fails as failure:
            return Outcome(errors=failure.types)
        return Outcome()

    def _expect(self, expected: Outcome, call: Callable[[], Any]) -> Any:
        """Make the call, which must end as the model does; what it returns."""
        error: BaseException | None = None
        result = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.simplefilter("ignore", MicrobatchStateWarning)
            try:
                result = call()
            except BaseException as raised:
                error = raised
        right = isinstance(error, expected.errors) if expected.errors else error is None
        names = " or ".join(of.__name__ for of in expected.errors) or "no error"
        if not right:
            raise AssertionError(f"expected {names}, got {error!r}") from error
        if isinstance(error, SystemExit):
            assert error.code == PREEMPTED_STATUS
        # A run without `EarlyStopping` may resume one that had it.
        left_out = (
            "the checkpoint has the states of callbacks that this `fit` does not have",
            "the metrics of the checkpoint of step",  # a damaged file of an old step, which no one needs
        )
        texts = [text for warning in caught if not (text := str(warning.message)).startswith(left_out)]
        assert [text for text in texts if "data ended after" not in text] == []
        assert bool(texts) == expected.warns
        return result

    def _read_all(self) -> None:
        """Every whole checkpoint holds what the model says: read by a new trainer of another layout."""
        self._wait()
        reader = make_trainer(None, stages=1)
        for step, saved in self.run.disk.items():
            if not saved.damaged:
                reader.restore(self.directory / str(step))
                assert State.of(reader.state).differences(saved.state) == []


def run_scripts(count: int, *, number: int | None = None, **options: Any) -> None:
    """Check so many scripts: always the same ones, or those of a seed."""
    machine = Scripts if number is None else seed(number)(type("Scripts", (Scripts,), {}))
    run_state_machine_as_test(machine, settings=settings(max_examples=count, stateful_step_count=10, **options))


def test_random_scripts():
    run_scripts(8)


def data_begins_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("jaxpp_flax.trainers.data.source.DataSource.seek", lambda *_: None)


def damage_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("jaxpp_flax.checkpoint.reading.check_files", lambda _: None)


def run_scripts_of_several_seeds() -> None:
    """Scripts differ between runs: Hypothesis draws on constants of the loaded modules. 60 may all miss a damage."""
    for number in range(5):
        run_scripts(60, number=number, phases=[Phase.generate])


@pytest.mark.parametrize("sabotage", [data_begins_anew, slow(damage_goes_unnoticed)])
def test_a_wrong_trainer_is_found(sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_scripts_of_several_seeds()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("number", range(50))
def test_many_random_scripts(number: int):
    run_scripts(12, number=number)
    jax.clear_caches()
