"""A loop of the user's own over `training_steps`, with hooks; and the state after a `fit` that trains nothing."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optax
import pytest

from jaxpp_flax import DictTracker, PipelineTrainer
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.trainers import Checkpoints, Evaluate, Logging, LogMetrics, StepRecord, callbacks
from jaxpp_flax.trainers.callbacks import log_metrics
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.loop import training_loop
from jaxpp_flax.trainers.loop.training_loop import TrainingLoop
from jaxpp_flax.trainers.state.sources import Checkpoint
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

DATA = [m.make_batch(4, seed) for seed in range(3)]


@sharing_steps("tracker", "every", "checkpoints")
def make_logging(tracker: DictTracker | None, every: int = 2, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        m.Layers(), optax.sgd(0.1), lambda model, batch: (model(batch["tokens"][:, :4] * 1.0) ** 2).mean(),
        num_stages=1, num_microbatches=2, logging=Logging(tracker=tracker, every=every, progress=False), **options,
    )  # fmt: skip


def make_trainer(directory: Path, tracker: DictTracker | None = None) -> PipelineTrainer:
    return make_logging(tracker, checkpoints=Checkpoints(directory, every=2))


def records_of(tracker: DictTracker) -> dict[str, Any]:
    """Without the rates, which are times."""
    return {name: rows for name, rows in tracker.metrics.items() if not name.endswith("_per_second")}


def test_a_loop_with_callbacks_logs_evaluates_and_saves_as_fit_does(tmp_path: Path):
    fitted, looped = DictTracker(), DictTracker()
    fit, loop = make_trainer(tmp_path / "fit", fitted), make_trainer(tmp_path / "loop", looped)
    fit.fit(DATA, steps=5, eval_data=DATA[:1], eval_every=2)
    steps = loop.training_steps(DATA, steps=5, callbacks=[LogMetrics(), Evaluate(DATA[:1], every=2)])
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5]
    assert {name: list(rows) for name, rows in records_of(fitted).items()} == {
        "loss": [1, 2, 4, 5],  # the first one, each second one, and the last one
        "eval_loss": [2, 4, 5],
    }
    assert records_of(looped) == records_of(fitted)
    assert "tokens_per_second" in looped.metrics
    for step in ("2", "4", "5"):
        saved = [make_trainer(tmp_path / name) for name in ("fit", "loop")]
        for trainer, name in zip(saved, ("fit", "loop"), strict=True):
            trainer.restore(tmp_path / name / step)
        tree_allclose(saved[1].state, saved[0].state, rtol=0, atol=0)
        for item in ("data", "about"):
            expected = read_json(tmp_path / "fit" / step, item)
            assert expected
            assert read_json(tmp_path / "loop" / step, item) == expected


class Events(callbacks.Callback):
    def __init__(self, name: str, events: list[Any]) -> None:
        super().__init__()
        self.name, self.events = name, events

    def on_fit_start(self, trainer: Any) -> None:
        self.events.append(f"{self.name} start")

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        assert any(record.batch is batch for batch in DATA)
        self.events.append((self.name, record.step, float(record.metrics["loss"])))

    def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
        self.events.append(f"{self.name} last step")

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        self.events.append((f"{self.name} end", type(error)))


def test_callbacks_run_before_the_body_and_end_the_last_one_first(tmp_path: Path):
    trainer, events = make_trainer(tmp_path), list[Any]()
    both = [Events("a", events), Events("b", events)]
    for step, metrics in trainer.training_steps(DATA[:2], callbacks=both):
        assert events[-2:] == [(name, step, float(metrics["loss"])) for name in "ab"]
        assert trainer.callbacks[:2] == tuple(both)
    assert events[:2] == ["a start", "b start"]
    assert events[-4:] == ["a last step", "b last step", ("b end", type(None)), ("a end", type(None))]
    assert trainer.callbacks == ()
    for _ in trainer.training_steps(DATA, callbacks=[Events("c", events)]):
        break
    assert events[-2:] == ["c last step", ("c end", GeneratorExit)]


def test_a_step_is_taken_when_its_record_is_asked_for(tmp_path: Path):
    trainer = make_trainer(tmp_path)
    next(trainer.training_steps(DATA))
    assert trainer.step == 1


def test_callbacks_that_did_not_begin_do_not_end(tmp_path: Path):
    class Refuses(Events):
        def on_fit_start(self, trainer: Any) -> None:
            raise ValueError("not yet")

    events: list[Any] = []
    with pytest.raises(ValueError, match="not yet"):
        make_trainer(tmp_path).fit(DATA, callbacks=[Events("a", events), Refuses("b", events), Events("c", events)])
    assert events == ["a start", "a last step", ("a end", ValueError)]


def test_a_callback_that_waits_for_metrics_needs_one_that_logs_them(tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds an? OnMetrics, which waits for `on_metrics`.*LogMetrics\(\)"):
        make_trainer(tmp_path).training_steps(DATA, callbacks=[callbacks.OnMetrics(print)])


def test_the_last_step_is_saved_when_callbacks_end(tmp_path: Path):
    class Looks(callbacks.Callback):
        def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
            seen.append((tmp_path / str(trainer.step)).is_dir())

    seen: list[bool] = []
    make_trainer(tmp_path).fit(DATA, callbacks=[Looks()])
    assert seen == [True]


def rows_of(every: int, end: Callable[[Any, int], None], data: Any = DATA, **options: Any) -> list[int]:
    """The rows of a `fit` that ends with an error, which `end` raises after a step, or the data."""

    class Ends(callbacks.Callback):
        def on_step(self, trainer: Any, record: Any) -> None:
            end(trainer, record.step)

    tracker = DictTracker()
    trainer = make_logging(tracker, every, **options)
    with pytest.raises((OSError, KeyboardInterrupt, SystemExit)):
        trainer.fit(data, steps=9, callbacks=[Ends()])
    return list(tracker["loss"])


def broken_after(number: int) -> Iterator[Any]:
    yield from (DATA * 3)[:number]
    raise OSError("the disk is gone")


def test_no_way_out_of_fit_loses_the_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def break_at_6(trainer: Any, step: int) -> None:
        if step == 6:
            raise OSError("a broken callback")

    def sigterm_at_6(trainer: Any, step: int) -> None:
        if step == 6:
            signal.raise_signal(signal.SIGTERM)

    def nothing(trainer: Any, step: int) -> None:
        pass

    checkpoints = Checkpoints(tmp_path / "run", every=9)
    assert rows_of(2, nothing, broken_after(6)) == [1, 2, 4, 6]
    assert rows_of(4, nothing, broken_after(6)) == [1, 4, 6], "the last step has a row, as after any end"
    assert rows_of(2, break_at_6) == [1, 2, 4, 6]
    assert rows_of(2, sigterm_at_6, checkpoints=checkpoints) == [1, 2, 4, 6]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_step_loses_no_row(times: int, monkeypatch: pytest.MonkeyPatch):
    """After one, the step is finished and has its row; after two, the step before is the last one."""
    finish = PipelineTrainer._finish

    def finishing(self: Any, *arguments: Any) -> Any:
        if self.held.step == 5:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return finish(self, *arguments)

    monkeypatch.setattr(PipelineTrainer, "_finish", finishing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests so that they ignore it
    try:
        assert rows_of(2, lambda trainer, step: None) == [1, 2, 4, 6 if times == 1 else 5]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_loop_of_the_users_own_loses_no_row(tmp_path: Path):
    tracker = DictTracker()
    trainer = make_trainer(tmp_path / "a", tracker)
    for step, _ in trainer.training_steps(DATA, callbacks=[LogMetrics()]):
        if step == 2:
            break
    assert list(tracker["loss"]) == [1, 2]
    trainer = make_trainer(tmp_path / "b", tracker := DictTracker())
    with pytest.raises(OSError, match="the disk is gone"):
        list(trainer.training_steps(broken_after(3), callbacks=[LogMetrics()]))
    assert list(tracker["loss"]) == [1, 2, 3]


class Never:
    """A metric whose device hangs until `released`, or has failed."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked, self.released = error, threading.Event(), threading.Event()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self.asked.set()
        if self.error is not None:
            raise self.error
        self.released.wait()
        return np.zeros(())


def test_metrics_that_do_not_come_neither_hide_the_error_nor_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_metrics, "_PATIENCE", 0.1)
    trainer = make_trainer(tmp_path, DictTracker())
    for metric, reason in (
        (Never(), "TimeoutError: the devices have not computed them after 0.1 s"),
        (Never(RuntimeError("the device is lost\nwith details")), "RuntimeError: the device is lost"),
    ):
        log, error = LogMetrics(), OSError("the disk is gone")
        log.on_fit_start(trainer)
        log.on_step(trainer, StepRecord(3, {"loss": metric}, DATA[0]))
        log.on_last_step(trainer, error)
        assert metric.asked.is_set()
        metric.released.set()
        assert error.__notes__ == [f"The metrics of step 3 are lost: {reason}"]


def test_a_callback_that_fails_is_not_called_again(tmp_path: Path):
    class Breaks(callbacks.Callback):
        def on_metrics(self, trainer: Any, step: int, metrics: Any) -> None:
            steps.append(step)
            if step == 2:
                raise ValueError("a broken callback")

    steps: list[int] = []
    trainer = make_trainer(tmp_path, tracker := DictTracker())
    with pytest.raises(ValueError, match="a broken callback"):
        trainer.fit(DATA, callbacks=[Breaks()])
    assert steps == [1, 2]
    assert list(tracker["loss"]) == [1, 2, 3]


def test_ctrl_c_while_metrics_are_awaited_loses_no_row(tmp_path: Path):
    errors: list[BaseException] = [KeyboardInterrupt()]

    class Interrupted:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            if errors:
                raise errors.pop()
            return np.zeros(())

    trainer, log = make_trainer(tmp_path, tracker := DictTracker()), LogMetrics()
    log.on_fit_start(trainer)
    log.on_step(trainer, StepRecord(1, {"loss": Interrupted()}, DATA[0]))
    with pytest.raises(KeyboardInterrupt) as raised:
        log.on_step(trainer, StepRecord(2, {"loss": np.ones(())}, DATA[1]))
    log.on_last_step(trainer, raised.value)
    assert tracker["loss"] == {1: 0.0, 2: 1.0}


def test_a_callback_that_fails_at_the_end_keeps_nothing_from_its_end(tmp_path: Path):
    class Leaves(callbacks.Callback):
        def on_last_step(self, trainer: Any, error: BaseException | None) -> None:
            raise ValueError("not yet")

    trainer = make_trainer(tmp_path, tracker := DictTracker())
    with pytest.raises(OSError, match="the disk is gone") as raised:
        list(trainer.training_steps(broken_after(3), callbacks=[Leaves(), LogMetrics()]))
    notes = raised.value.__notes__
    assert notes[0] == "Leaves.on_last_step failed as well: ValueError('not yet')"
    assert notes[1].startswith("Training stopped after step 3.")
    assert list(tracker["loss"]) == [1, 2, 3]


@pytest.mark.parametrize("limit", [{"steps": 2}, {"epochs": 1}, {"epochs": 2, "resume_data": "refuse"}])
def test_the_state_after_fit_is_in_memory(limit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where there was nothing to do, or an error before the first step: a property never reads the disk."""
    trained = make_trainer(tmp_path)
    last = trained.fit(DATA[:2])
    resumed, data = make_trainer(tmp_path), DATA[:2]
    if "resume_data" in limit:
        with pytest.raises(ValueError, match="resume_data"):
            resumed.fit(data, resume=True, **{**limit, "resume_data": "unknown"})
    else:
        assert resumed.fit(data, resume=True, **limit) == last
    monkeypatch.setattr(Checkpoint, "read", None)
    tree_allclose(resumed.state, trained.state, rtol=0, atol=0)


def test_the_state_of_a_resumed_run_may_be_read_before_its_first_batch(tmp_path: Path):
    make_trainer(tmp_path).fit(DATA[:2])
    resumed = make_trainer(tmp_path)

    def data() -> Any:
        yield from DATA[:2]
        assert resumed.evaluate(DATA[:1])["loss"] > 0  # a call may read it
        assert int(resumed.state.step) == 2
        yield DATA[2]

    class Looks:
        def __iter__(self) -> Any:
            assert int(resumed.state.step) == 2
            return data()

    resumed.fit(Looks(), steps=3, resume=True)
    assert resumed.step == int(resumed.state.step) == 3


@pytest.mark.parametrize("processes", [1, 2])
def test_after_an_error_a_process_waits_for_no_other_one_to_read_a_checkpoint(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The others may be in the first step: they would wait for this process there, and it for them."""
    make_trainer(tmp_path).fit(DATA[:2])
    resumed, reads, groups = make_trainer(tmp_path), list[Any](), list[Any]()
    read, group = Checkpoint.read, TrainingLoop.stopping_group

    def seen(self: Checkpoint, places: Any) -> Any:
        reads.extend(path for path in places if path.startswith("params/"))
        return read(self, places)

    def of_several(self: TrainingLoop) -> Any:
        groups.append(group(self))  # the loop itself has one process here
        return groups[-1] if len(groups) == 1 else SimpleNamespace(process_count=processes)

    def data() -> Any:
        raise RuntimeError("no batch")
        yield

    monkeypatch.setattr(Checkpoint, "read", seen)
    monkeypatch.setattr(TrainingLoop, "stopping_group", of_several)
    with pytest.raises(RuntimeError, match="no batch"):
        resumed.fit(data(), steps=3, resume=True)
    assert len(groups) == 2
    assert bool(reads) == (processes == 1)
    resumed.restore()
    assert resumed.step == int(resumed.state.step) == 2


@pytest.mark.parametrize("others", [[b"3"], [b"2"], [b"3", b"4"]], ids=str)
def test_processes_that_trained_different_numbers_of_steps_are_named(
    others: list[bytes], monkeypatch: pytest.MonkeyPatch
):
    """Where no process waits for the values of another's last steps, each comes to the end of its own data."""
    told, ended = list[str](), list[int]()

    def exchange(what: str, mine: bytes, *, idle_reason: str) -> list[bytes]:
        told.append(f"{what}: {idle_reason}")
        return [mine, *others]

    monkeypatch.setattr(training_loop, "process_group", lambda: SimpleNamespace(exchange=exchange))
    loop: Any = SimpleNamespace(
        held=SimpleNamespace(is_across=True, memory=np.zeros(1), step=3),
        checkpoints=SimpleNamespace(trained_on=SimpleNamespace(end=ended.append)),
    )
    if others == [b"3"]:
        TrainingLoop._await_same_end(loop)
    else:
        listing = ", ".join(f"process {i}: {int(text)}" for i, text in enumerate([b"3", *others]))
        with pytest.raises(BatchError, match=re.escape(f"different numbers of steps ({listing}): data ended earlier")):
            TrainingLoop._await_same_end(loop)
    assert ended == ([3] if others == [b"3"] else [])
    assert len(told) == 1
    assert "the end of fit: its data ended, or it was stopped, after step 3." in told[0]


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


@pytest.mark.parametrize("every", [4, None])
@pytest.mark.parametrize("where", ["body", "callback", "data", "last"])
def test_sigterm_ends_a_loop_of_the_users_own_as_it_ends_fit(where: str, every: int | None, tmp_path: Path):
    def terminate(at: str) -> None:
        if where == at:
            signal.raise_signal(signal.SIGTERM)

    class Asked(callbacks.Callback):
        def on_step(self, trainer: Any, record: StepRecord) -> None:
            if record.step == 2:
                terminate("callback")

    def data() -> Iterator[Any]:
        yield from DATA[:1]
        terminate("data")
        yield from DATA[1:]

    trainer, seen = make_logging(None, checkpoints=Checkpoints(tmp_path, every=every)), []
    before = signal.getsignal(signal.SIGTERM)

    def loop() -> None:
        for step, _ in trainer.training_steps(data(), callbacks=[Asked()]):
            seen.append(step)
            if step == 2:
                terminate("body")
            if step == 3:
                terminate("last")

    with pytest.raises(SystemExit) as caught:
        loop()
    last = {"body": 3, "last": 3}.get(where, 2)
    assert caught.value.code == 75
    assert steps_in(tmp_path) == [last] == [seen[-1]]
    assert signal.getsignal(signal.SIGTERM) is before
    resumed, whole = make_trainer(tmp_path), make_trainer(tmp_path / "other")
    for trained in (resumed, whole):
        trained.fit(DATA, steps=4, resume=True)
    tree_allclose(resumed.state, whole.state, rtol=0, atol=0)


def test_a_loop_left_after_sigterm_is_saved_and_gets_the_signal_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
    try:
        trainer = make_trainer(tmp_path)
        for step, _ in trainer.training_steps(DATA):
            if step == 1:
                signal.raise_signal(signal.SIGTERM)
                assert got == []
                break
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps_in(tmp_path) == [1]


def test_without_a_deadline_a_loop_leaves_sigterm_alone(tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_logging(None, checkpoints=Checkpoints(tmp_path, preemption_deadline=None))
    for _ in trainer.training_steps(DATA):
        assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps=0"),
        ({"epochs": 1.5}, (TypeError, ValueError), "epochs=1.5"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size=0"),
        ({"remainder": "pad"}, ValueError, "remainder='pad'"),
        ({"callbacks": [print]}, TypeError, "callbacks holds a builtin"),
        ({"data": DATA[0]}, TypeError, "one batch"),
    ],
)
def test_the_call_itself_refuses_arguments_that_do_not_fit(arguments: dict[str, Any], error: Any, message: str):
    trainer = make_logging(None)
    with pytest.raises(error, match=message):
        trainer.training_steps(**{"data": DATA, **arguments})
