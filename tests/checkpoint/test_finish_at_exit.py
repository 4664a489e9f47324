"""A save in the background is whole when `fit` ends, however it ends, and when the program ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError, finish_at_exit
from jaxpp_flax.trainers import Checkpoints
from jaxpp_flax.trainers.callbacks import Callback
from tests.checkpoint import at_commit, program
from tests.helpers import slow
from tests.running import PATIENCE, run_python

SLOW = 0.3  # seconds: longer than `fit` takes to end, if it does not wait
BATCHES = list(program.batches(4))


def only_after(end: threading.Event, then: Callable[[], object] = at_commit.hook) -> Callable[[], None]:
    """The end of a save that comes a while after an event, however slow the machine is."""

    def slowly() -> None:
        assert end.wait(PATIENCE)
        time.sleep(SLOW)
        then()

    return slowly


class EndsAfter(Callback):
    def __init__(self, step: int, error: BaseException):
        super().__init__()
        self.step, self.error, self.end = step, error, threading.Event()

    def on_step(self, trainer: Any, record: Any) -> None:
        if record.step == self.step:
            self.end.set()
            raise self.error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), slow(ValueError("a callback")), slow(SystemExit(3))], ids=repr)
def test_a_save_outlives_the_error_that_ends_fit(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ends = EndsAfter(3, error)
    monkeypatch.setattr(at_commit, "hook", only_after(ends.end))
    trainer = program.make_trainer(Checkpoints(tmp_path / "run", every=2), stages=1)
    with pytest.raises(type(error)):
        trainer.fit(BATCHES, callbacks=[ends])
    interrupted = isinstance(error, KeyboardInterrupt)  # then the last step is saved as well
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == (["2", "3"] if interrupted else ["2"])


def test_a_save_outlives_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    end = threading.Event()

    def data() -> Any:
        yield from BATCHES[:3]
        end.set()
        raise OSError("the disk of the data is gone")

    monkeypatch.setattr(at_commit, "hook", only_after(end))
    trainer = program.make_trainer(Checkpoints(tmp_path / "run", every=3), stages=1)
    with pytest.raises(OSError, match="the disk of the data"):
        trainer.fit(data())
    assert trainer.checkpoints.store is not None
    assert trainer.checkpoints.store.steps() == (3,)


def test_a_save_that_fails_meanwhile_is_told_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise RuntimeError("on purpose")

    ends = EndsAfter(3, ValueError("a callback"))
    monkeypatch.setattr(at_commit, "hook", only_after(ends.end, fails))
    trainer = program.make_trainer(Checkpoints(tmp_path / "run", every=2), stages=1)
    with pytest.raises(ValueError, match="a callback") as raised:
        trainer.fit(BATCHES, callbacks=[ends])
    assert "The save under way failed as well" in raised.value.__notes__[0]
    assert "on purpose" in raised.value.__notes__[0]


class Slow:
    """Writes until a moment."""

    def __init__(self, seconds: float, error: Exception | None = None):
        self.end, self.error = time.monotonic() + seconds, error

    def is_writing(self) -> bool:
        return time.monotonic() < self.end

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def test_what_the_end_of_a_program_tells(capsys: pytest.CaptureFixture[str]):
    finish_at_exit._finish(None)
    finish_at_exit._finish(Slow(0.0))
    assert capsys.readouterr().err == ""
    finish_at_exit._finish(Slow(0.1, CheckpointSaveError("no space left")))
    told = capsys.readouterr().err
    assert "the program ends when the checkpoint that is being written is complete" in told
    assert "is lost: no space left" in told


def test_a_python_that_cannot_is_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("threading._register_atexit")
    with pytest.warns(UserWarning, match="cannot finish a background save at the end"):
        finish_at_exit.finish_at_exit(Slow(0.0))


SCRIPT = """
import sys, time
from tests.checkpoint import at_commit, program

at_commit.hook = lambda: time.sleep(1.0)
trainer = program.make_trainer(sys.argv[1], stages=1)
trainer.train_step(next(program.batches()))
trainer.save(wait=False)
{end}
"""


@pytest.mark.processes
@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(7)", 7)])
def test_the_end_of_a_program_waits(end: str, status: int, tmp_path: Path):
    """A minute is more than any of these takes, and far less than a program that hangs."""
    ended = run_python("-c", SCRIPT.format(end=end), str(tmp_path / "run"), status=status, timeout=60)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"], ended.stderr
