"""Ctrl-C at any moment of `fit` leaves a state that is whole, and says how to go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Checkpoints
from jaxpp_flax.trainers.callbacks import Callback, log_metrics
from jaxpp_flax.trainers.callbacks.ctrl_c import STEPS_AHEAD, Interruption
from jaxpp_flax.trainers.state.placement import to_ordinary
from tests.checkpoint import program
from tests.helpers import tree_allclose
from tests.trainers.sharing import sharing_steps

BATCHES = list(program.batches(4))


@sharing_steps("checkpoints")
def make_trainer(checkpoints: Path | Checkpoints | None) -> PipelineTrainer:
    return program.make_trainer(checkpoints, stages=1)


@pytest.fixture(autouse=True)
def heeds_ctrl_c() -> Iterator[None]:
    """A shell starts programs in the background so that they ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def interrupted_within(trainer: PipelineTrainer, step: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C when the step has taken the state's memory, and nothing has its results yet."""
    finish = trainer._finish

    def finishing(*arguments: Any) -> Any:
        if trainer.step == step - 1:
            interrupt(times)
        return finish(*arguments)

    monkeypatch.setitem(vars(trainer), "_finish", finishing)


class InterruptsAfter(Callback):
    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step == 2:
            interrupt()


def notes_of(trainer: PipelineTrainer, *callbacks: Callback, within_step: bool = False) -> str:
    with pytest.raises(KeyboardInterrupt) as raised:
        trainer.fit(BATCHES, callbacks=callbacks)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if within_step:
        names = [entry.name for entry in raised.traceback]
        assert names[-1] == "fit", "the traceback goes on into the loop"
        assert len(names) < 5
    return "\n".join(raised.value.__notes__)


@pytest.fixture(scope="module")
def uninterrupted() -> Any:
    trainer = make_trainer(None)
    trainer.fit(BATCHES)
    return to_ordinary(trainer.state)


@pytest.mark.parametrize("within", [True, False], ids=["within_a_step", "between_steps"])
def test_the_step_is_finished_and_saved(within: bool, tmp_path: Path, monkeypatch: Any, uninterrupted: Any, capfd: Any):
    trainer = make_trainer(tmp_path / "run")
    if within:
        interrupted_within(trainer, 2, monkeypatch)
    notes = notes_of(trainer, *([] if within else [InterruptsAfter()]), within_step=within)
    assert trainer.step == 2
    assert f"Step 2 is saved in {tmp_path / 'run'}: fit(..., resume=True) goes on" in notes
    assert ("Ctrl-C ends the run after this step" in capfd.readouterr().err) == within
    monkeypatch.undo()
    trainer.fit(BATCHES, steps=4, resume=True)
    tree_allclose(to_ordinary(trainer.state), uninterrupted, rtol=0, atol=0)


def test_with_several_processes_the_notice_and_stop_say_when_all_of_them_end(capfd: Any):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruption(raises=False) as interruption, interruption.step():
        signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert interruption.requested
    assert f"Ctrl-C ends the run in all processes within {STEPS_AHEAD} steps;" in capfd.readouterr().err
    assert {4: "up to four steps later"}[STEPS_AHEAD] in (PipelineTrainer.stop.__doc__ or "")


def test_without_a_directory_the_state_in_memory_goes_on(monkeypatch: Any, uninterrupted: Any):
    trainer = make_trainer(None)
    interrupted_within(trainer, 2, monkeypatch)
    assert "The state in memory is that of step 2: fit goes on from it" in notes_of(trainer)
    monkeypatch.undo()
    trainer.fit(BATCHES[2:])
    tree_allclose(to_ordinary(trainer.state), uninterrupted, rtol=0, atol=0)


def test_a_second_one_ends_at_once(tmp_path: Path, monkeypatch: Any, uninterrupted: Any):
    trainer = make_trainer(Checkpoints(tmp_path / "run", every=1))
    interrupted_within(trainer, 3, monkeypatch, times=2)
    assert "Step 3 was interrupted, and its state is lost: fit(..., resume=True) goes on" in notes_of(trainer)
    monkeypatch.undo()
    trainer.fit(BATCHES, steps=4, resume=True)
    tree_allclose(to_ordinary(trainer.state), uninterrupted, rtol=0, atol=0)


@pytest.mark.parametrize("every", [None, 2])
def test_a_loop_of_the_user_s_own_saves_when_a_save_is_due_alone(every: int | None, tmp_path: Path):
    def batches() -> Iterator[Any]:
        yield from BATCHES[:3]
        interrupt()

    trainer = make_trainer(Checkpoints(tmp_path / "run", every=every))
    with pytest.raises(KeyboardInterrupt):
        for _ in trainer.training_steps(batches()):
            pass
    assert trainer.step == 3
    assert [path.name for path in (tmp_path / "run").glob("[0-9]*")] == ([] if every is None else ["2"])


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_one_after_the_step_waits_for_nothing(times: int, monkeypatch: Any):
    waits: list[float] = []
    fetch = log_metrics._fetch_within
    monkeypatch.setattr(log_metrics, "_fetch_within", lambda seconds, of: waits.append(seconds) or fetch(seconds, of))
    trainer = make_trainer(None)
    interrupted_within(trainer, 2, monkeypatch)
    notes_of(trainer, *([] if times == 1 else [InterruptsAfter()]))
    assert waits == [log_metrics._PATIENCE if times == 1 else log_metrics._AT_ONCE]


def test_a_program_that_ignores_it_is_left_alone():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = make_trainer(None)
    trainer.fit(BATCHES[:3], callbacks=[InterruptsAfter()])
    assert trainer.step == 3
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_of_the_users_own_is_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        make_trainer(None).fit(BATCHES[:3], callbacks=[InterruptsAfter()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]
