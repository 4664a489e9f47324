"""A damaged latest checkpoint does not end a run for ever."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.trainers import Checkpoints
from tests.checkpoint import program
from tests.checkpoint.test_resuming_in_one_process import BATCHES, losses_of, make_trainer
from tests.helpers import slow
from tests.launch.running import launched


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Checkpoints of the steps 2, 4 and 6, and the losses of 8 steps."""
    directory = tmp_path_factory.mktemp("run") / "ckpt"
    losses_of(make_trainer(Checkpoints(directory, every=2)), steps=6)
    return directory, losses_of(make_trainer(None), steps=8)


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def cut_off(step: Path) -> None:
    largest = max((path for path in (step / "state").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:3])


def without_metadata(step: Path) -> None:
    (step / "state" / "_METADATA").unlink()


def data_damaged(step: Path) -> None:
    for file in (step / "data").iterdir():
        file.write_text("{")


def without_data(step: Path) -> None:
    shutil.rmtree(step / "data")


@pytest.mark.parametrize(
    ("damage", "placed"),
    [
        (empty, False), (cut_off, True), (without_metadata, False), (data_damaged, False), (without_data, False),
        slow(empty, True), slow(cut_off, False), slow(without_metadata, True), slow(data_damaged, True),
    ],
)  # fmt: skip
def test_the_newest_whole_one_is_taken(damage: Any, placed: bool, run: Any, tmp_path: Path):
    directory, losses = run
    here = Path(shutil.copytree(directory, tmp_path / "copy"))
    damage(here / "6")
    damage(here / "4")
    trainer = make_trainer(Checkpoints(here, every=2))
    if placed:
        trainer.train_step(BATCHES[5])
    with pytest.raises(
        (CorruptCheckpointError, CheckpointNotFoundError), match=r'resume="latest_valid"\) renames .*6 and continues'
    ):
        trainer.fit(BATCHES, steps=8, resume=True)
    assert (here / "6").is_dir()
    resumed = losses_of(trainer, steps=8, resume="latest_valid")
    assert resumed == {step: loss for step, loss in losses.items() if step > 2}
    assert sorted(path.name for path in here.iterdir()) == ["2", "4", "4.damaged", "6", "6.damaged", "8"]


def test_none_is_left(run: Any, tmp_path: Path):
    here = Path(shutil.copytree(run[0], tmp_path / "copy"))
    (here / "6.damaged").mkdir()
    for step in (2, 4, 6):
        empty(here / str(step))
    with pytest.raises(
        CheckpointNotFoundError, match=r"no complete checkpoint: the damaged ones are 6.damaged_2, 4.damaged, 2.damaged"
    ):
        make_trainer(here).fit(BATCHES, steps=8, resume="latest_valid")


def test_a_rename_is_told_without_logging(run: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    here = Path(shutil.copytree(run[0], tmp_path / "copy"))
    cut_off(here / "6")
    make_trainer(here, logging=False).fit(BATCHES, steps=6, resume="latest_valid")
    assert f"It is now {here / '6.damaged'}." in capfd.readouterr().err


OF_TENSORSTORE = "RESOURCE_EXHAUSTED: Failed to open: 'manifest.ocdbt': Too many open files"


@pytest.mark.parametrize("resume", [True, "latest_valid"])
@pytest.mark.parametrize(
    ("reader", "error"),
    [
        ("format.orbax_io.pytree_handler", TimeoutError("the storage answers late")),
        ("reading.ocp.JsonCheckpointHandler.restore", PermissionError("no right to read")),
        ("format.integrity.needed_bytes", ValueError(OF_TENSORSTORE)),
        ("reading.pytree_handler", RuntimeError("out of memory")),
    ],
)
def test_what_may_pass_is_no_damage(
    reader: str, error: Exception, resume: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = Path(shutil.copytree(run[0], tmp_path / "copy"))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    trainer = make_trainer(Checkpoints(here, every=2))
    monkeypatch.setattr(f"jaxpp_flax.checkpoint.{reader}", fail)
    with pytest.raises(type(error), match=str(error)) as caught:
        trainer.fit(BATCHES, steps=8, resume=resume)
    monkeypatch.undo()
    assert caught.value is error
    assert sorted(path.name for path in here.iterdir()) == ["2", "4", "6"]
    assert losses_of(trainer, steps=8, resume=resume) == {step: loss for step, loss in run[1].items() if step > 6}


def test_other_values_are_refused(tmp_path: Path):
    for resume in ("latest", 0, 2.0, None):
        with pytest.raises(ValueError, match=r'resume=.*: it must be True, False, "latest_valid" or the step'):
            program.make_trainer(tmp_path / "run").fit(BATCHES, steps=1, resume=resume)  # type: ignore[arg-type]


# Process 1 alone cannot read the newest checkpoint: the disk is shared, and the fault is not.
UNREADABLE_IN_ONE = """
import itertools, jax
from jaxpp_flax.checkpoint import CorruptCheckpointError, reading
from tests.checkpoint.program import batches, make_trainer
from jaxpp_flax.trainers import Checkpoints

make_trainer(Checkpoints("run", every=2)).fit(itertools.islice(batches(), 4), steps=4)
stock = reading.read_metadata

def read(tree):
    if jax.process_index() == 1 and tree.parent.name == "4":
        raise ERROR
    return stock(tree)

reading.read_metadata = read
trainer = make_trainer(Checkpoints("run", every=2))
trainer.fit(itertools.islice(batches(), 6), steps=6, resume="latest_valid")
print("went on to step", trainer.step)
"""


@pytest.mark.processes
def test_all_processes_leave_what_one_cannot_read(tmp_path: Path):
    script = UNREADABLE_IN_ONE.replace("ERROR", "CorruptCheckpointError('the disk of process 1 broke.')")
    with launched(tmp_path, script, "-n", "2") as run:
        assert run.finish() == 0, run.stderr
        assert run.stdout.count("went on to step 6") == 2
        assert run.stderr.count("4.damaged.") == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2", "4", "4.damaged", "6"]


@pytest.mark.processes
def test_no_process_sets_aside_what_one_could_not_read_in_time(tmp_path: Path):
    script = UNREADABLE_IN_ONE.replace("ERROR", "TimeoutError('the storage answers late')")
    script = (
        script.replace("trainer.fit(", "fit = lambda: trainer.fit(")
        + """
try:
    fit()
except Exception as error:
    print("raised", type(error).__name__, str(error))
"""
    )
    with launched(tmp_path, script, "-n", "2") as run:
        run.finish()
        assert "raised TimeoutError the storage answers late" in run.stdout, run.stderr
        assert "raised OSError in process 1: the storage answers late" in run.stdout, run.stderr
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["2", "4"]
