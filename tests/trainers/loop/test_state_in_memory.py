"""Copies of the state in memory: the lives of a run, one after another in this process, as a launcher would start them.

Each life has a new trainer, and nothing of the one before but the file in memory and the directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpp_flax.checkpoint import CheckpointSaveError
from jaxpp_flax.checkpoint.memory.slots import Slots
from jaxpp_flax.checkpoint.reading import read_json
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers import Callback, Checkpoints
from jaxpp_flax.trainers.loop import state_in_memory
from tests.checkpoint.program import batches, make_trainer


class Killed(BaseException):
    """As if the process was killed there."""


class Counted(Callback):
    """Has a state, and ends the life after a step, before the copies of that step or after them."""

    def __init__(self, kill_at: int | None = None):
        super().__init__()
        self.seen, self.kill_at = list[int](), kill_at

    def get_state(self) -> Any:
        return {"seen": self.seen}

    def set_state(self, state: Any) -> None:
        self.seen = [] if state is None else list(state["seen"])

    def on_step(self, trainer: Any, record: Any) -> None:
        self.seen.append(record.step)
        if record.step == self.kill_at:
            raise Killed


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    file, group = os.memfd_create("slots"), process_group()
    monkeypatch.setattr(group, "memory_file", file)
    monkeypatch.setattr(group, "run_id", "this run")
    monkeypatch.setattr(group, "attempt", 0)
    yield Slots(file)
    os.close(file)


def live(
    directory: Path, *, kill_at: int | None = None, steps: int = 7, memory_every: int | None = 1, every: int = 100,
    run: str = "this run", **options: Any,
) -> tuple[Any, Counted, list[str]]:  # fmt: skip
    """Return the trainer, the callback and the messages of another life of the run."""
    group, counted, said = process_group(), Counted(kill_at), list[str]()
    group.attempt += 1
    group.run_id = run
    kept = Checkpoints(directory, every=every, memory_every=memory_every, asynchronous=False)
    trainer = make_trainer(kept, **options)
    trainer.loop.display.message = lambda text: said.append(str(text))
    try:
        trainer.fit(batches(), steps=steps, callbacks=[counted])
    except Killed:
        assert kill_at is not None
    return trainer, counted, said


def weights(trainer: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves((trainer.state.params, trainer.state.opt_state))]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    trainer = make_trainer(Checkpoints(tmp_path_factory.mktemp("undisturbed")))
    trainer.fit(batches(), steps=7)
    return weights(trainer)


def check_same(trainer: Any, expected: list[np.ndarray]) -> None:
    """The same to the last bit."""
    for mine, other in zip(weights(trainer), expected, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize(("every", "kept"), [(1, 4), (2, 4), (3, 3)])
def test_the_next_life_goes_on_from_the_last_copy(
    tmp_path: Path, slots: Slots, undisturbed: list[np.ndarray], every: int, kept: int
):
    live(tmp_path, kill_at=5, memory_every=every)
    trainer, counted, said = live(tmp_path, memory_every=every)
    assert f"resumed from the copy of step {kept} in memory; there is no checkpoint" in said
    assert counted.seen == [1, 2, 3, 4, 5, 6, 7]  # from memory until `kept`, then the steps of this life
    assert trainer.data.position.batches == 7
    check_same(trainer, undisturbed)


def test_a_life_after_another_and_another_layout(tmp_path: Path, slots: Slots, undisturbed: list[np.ndarray]):
    # The same bits with 2 stages and with 1: the weights of a step do not depend on the layout here.
    live(tmp_path, kill_at=3)
    _, _, said = live(tmp_path, kill_at=5, stages=1)
    assert "resumed from the copy of step 2 in memory; there is no checkpoint" in said
    trainer, _, said = live(tmp_path)
    assert "resumed from the copy of step 4 in memory; there is no checkpoint" in said
    for mine, other in zip(weights(trainer), undisturbed, strict=True):
        # One stage sums in another order: an ulp of float32 for each of seven steps.
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("damage", ["mark", "bit"])
def test_of_a_damaged_copy_the_one_before_is_used(
    tmp_path: Path, slots: Slots, undisturbed: list[np.ndarray], damage: str
):
    live(tmp_path, kill_at=5)
    newest = max(slots.heads().items(), key=lambda of: of[1].serial)[0]
    slot = slots.reserve(newest, 1000)
    slot[0 if damage == "mark" else 5000] ^= 1
    trainer, _, said = live(tmp_path)
    assert "resumed from the copy of step 3 in memory; there is no checkpoint" in said
    told = "a copy of the state in memory, by process 0, is damaged, and not used"
    assert (told in said) == (damage == "bit")  # without its mark it is one that a killed process did not finish
    check_same(trainer, undisturbed)


@pytest.mark.parametrize("byte", [0, 5000])  # of the mark, and of the values
def test_without_a_whole_copy_the_checkpoint_is_used(
    tmp_path: Path, slots: Slots, undisturbed: list[np.ndarray], byte: int
):
    live(tmp_path, kill_at=5, every=2)
    for number in slots.heads():
        slots.reserve(number, 1000)[byte] ^= 1
    trainer, _, said = live(tmp_path, every=2)
    assert any("resumed from" in line and line.endswith("/4, step 4") for line in said), said
    told = "the copies in memory are not used: of no step are those of all processes left"
    assert (told in said) == (byte > 0)
    check_same(trainer, undisturbed)


@pytest.mark.parametrize(("memory_every", "kept"), [(4, "/6, step 6"), (5, "copy of step 5")])
def test_the_newer_of_checkpoint_and_copy_is_used(
    tmp_path: Path, slots: Slots, undisturbed: list[np.ndarray], memory_every: int, kept: str
):
    every = {4: 3, 5: 4}[memory_every]  # checkpoints of steps 3 and 6, or of 4; copies of 4, or of 5
    live(tmp_path, kill_at=7, memory_every=memory_every, every=every)
    trainer, _, said = live(tmp_path, memory_every=memory_every, every=every)
    assert any("resumed from" in line and kept in line for line in said), said
    check_same(trainer, undisturbed)


@pytest.mark.parametrize("other", ["run", "directory", "model"])
def test_what_is_not_of_this_run_and_trainer_is_not_taken(tmp_path: Path, slots: Slots, other: str):
    live(tmp_path / "a", kill_at=5)
    _, counted, said = live(
        tmp_path / ("b" if other == "directory" else "a"), steps=1, run="other run" if other == "run" else "this run",
        depth=3 if other == "model" else 2,
    )  # fmt: skip
    assert not any(line.startswith("resumed") for line in said)
    told = "the copy of step 4 in memory has other leaves than this trainer, and is not used"
    assert (told in said) == (other == "model")
    assert counted.seen == [1]


def test_a_copy_of_the_last_step_is_saved_as_a_checkpoint(tmp_path: Path, slots: Slots, undisturbed: list[np.ndarray]):
    # A life that ends between the copy of the last step and its save; then a life with nothing to train.
    save = "jaxpp_flax.trainers.loop.save.Save.save_last"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, lambda _: None)
        live(tmp_path)
    assert not (tmp_path / "7").exists()
    trainer, _, said = live(tmp_path)
    assert "nothing to do: step 7 of 7 is done" in said
    assert (tmp_path / "7").exists()
    assert trainer.checkpoints.metrics()["loss"] > 0
    assert read_json(tmp_path / "7", "callbacks") == {"Counted": {"seen": [1, 2, 3, 4, 5, 6, 7]}}
    check_same(trainer, undisturbed)


def test_a_save_that_was_due_and_did_not_end_is_made_up_for(tmp_path: Path, slots: Slots):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpp_flax.trainers.checkpoints.Checkpointing.save", lambda *_, **__: None)
        live(tmp_path, kill_at=6, every=4)
    live(tmp_path, every=4, kill_at=7)  # from the copy of step 5
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["6"]


def test_a_copy_that_is_not_finite_is_not_used(tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch):
    live(tmp_path, kill_at=5)
    monkeypatch.setattr("jaxpp_flax.checkpoint.memory.copies.StateCopy.nonfinite", lambda *_: "params/a")
    _, counted, said = live(tmp_path, steps=1)
    assert "the copy of step 4 in memory is not used: params/a holds a value that is not finite" in said
    assert counted.seen == [1]


def test_a_step_that_the_last_evaluation_follows_is_copied_after_it(tmp_path: Path, slots: Slots):
    group = process_group()
    group.attempt = 1
    trainer = make_trainer(Checkpoints(tmp_path, memory_every=1))
    trainer.fit(batches(), steps=3, eval_data=[next(batches())])
    steps = {Slots(group.memory_file).head(number).serial for number in (0, 1)}  # type: ignore[arg-type, union-attr]
    assert steps == {1, 2}


def test_the_last_copy_of_all_processes_is_not_overwritten(tmp_path: Path, slots: Slots):
    trainer, _, _ = live(tmp_path, kill_at=3)
    memory = state_in_memory.StateInMemory(trainer.checkpoints, 1, process_group().memory_file or -1)
    memory.copy_if_due()
    before = slots.heads()

    def check() -> None:
        raise TimeoutError

    # Another process that has not written this copy yet.
    memory._group = SimpleNamespace(process_count=2, process_index=0, check=check, waiting=lambda _: nullcontext())  # type: ignore[assignment]
    with pytest.raises(TimeoutError):
        memory.copy_if_due()
    assert slots.heads() == before


def test_too_little_memory_is_refused_before_the_first_step(
    tmp_path: Path, slots: Slots, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(state_in_memory, "free_bytes", lambda: 1000)
    with pytest.raises(CheckpointSaveError, match=r"memory_every=1\) keeps two .* memory: \d+ kB, and 1 kB are free"):
        live(tmp_path)
    assert slots.heads() == {}


def test_without_a_launcher_that_starts_again_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_group(), "attempt", 0)
    monkeypatch.setattr(process_group(), "run_id", "")
    _, _, said = live(tmp_path, steps=1, run="")
    assert sum(line.startswith("Checkpoints(memory_every=1) has no effect here") for line in said) == 1


def test_a_loop_of_the_users_own_is_told(tmp_path: Path, slots: Slots):
    trainer, said = make_trainer(Checkpoints(tmp_path, every=10, memory_every=1)), list[str]()
    trainer.loop.display.message = lambda text: said.append(str(text))
    next(trainer.training_steps(batches(), steps=1))
    assert said[0] == "Checkpoints(memory_every=) has no effect on training_steps: fit alone makes copies"
    assert slots.heads() == {}


@pytest.mark.parametrize("value", [0, 1.5, "1"])
def test_the_option_is_checked(value: Any):
    with pytest.raises(ValueError, match="memory_every"):
        Checkpoints("run", memory_every=value)
