"""What callbacks keep goes through a checkpoint, and another run begins without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Checkpoints
from jaxpp_flax.trainers.callbacks import Callback, EarlyStopping
from tests.checkpoint import program
from tests.trainers.models import squared_error

BATCHES = list(program.batches(4))


def make_trainer(checkpoints: Path | Checkpoints | None, **options: Any) -> PipelineTrainer:
    """It learns nothing: no evaluation is better than the first."""
    return PipelineTrainer(
        program.MLP(2, rngs=nnx.Rngs(0), dropout=0), optax.sgd(0.0), squared_error,
        num_stages=1, num_microbatches=2, logging=False, checkpoints=checkpoints, **options,
    )  # fmt: skip


def fit(trainer: PipelineTrainer, *callbacks: Callback, steps: int = 50, resume: bool = False) -> int:
    """The step at which it ends."""
    trainer.fit(BATCHES, steps=steps, eval_data=BATCHES[:1], eval_every=1, callbacks=callbacks, resume=resume)
    return trainer.step


def test_patience_survives_an_interruption_and_the_end_is_the_end(tmp_path: Path):
    assert fit(make_trainer(None), EarlyStopping(patience=4)) == 5
    assert fit(make_trainer(Checkpoints(tmp_path / "run", every=1)), EarlyStopping(patience=4), steps=3) == 3
    again = make_trainer(Checkpoints(tmp_path / "run", every=1))
    assert fit(again, EarlyStopping(patience=4), resume=True) == 5
    for trainer in (again, make_trainer(Checkpoints(tmp_path / "run", every=1))):
        assert fit(trainer, EarlyStopping(patience=4), resume=True) == 5
        assert trainer.stopping is not None
    assert fit(again, EarlyStopping(patience=6), resume=True) == 7, "more patience goes on"


def test_one_that_is_used_twice_begins_anew(tmp_path: Path):
    callback = EarlyStopping(patience=2)
    assert fit(make_trainer(None), callback) == 3
    assert fit(make_trainer(None), callback) == 3


def test_without_a_checkpoint_it_goes_on_as_it_is(tmp_path: Path):
    trainer, callback = make_trainer(tmp_path / "run"), EarlyStopping(patience=4)
    assert fit(trainer, callback, steps=3, resume=True) == 3
    assert fit(trainer, callback, resume=True) == 5


class Counts(Callback):
    def __init__(self, by: int):
        super().__init__()
        self.by, self.count = by, 0

    def state_name(self) -> str:
        return f"Counts({self.by})"

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = 0 if state is None else state["count"]

    def on_step(self, trainer: Any, record: Any) -> None:
        self.count += self.by


def test_several_of_a_kind_are_told_apart(tmp_path: Path):
    first = make_trainer(Checkpoints(tmp_path / "run", every=2))
    first.fit(BATCHES, steps=2, callbacks=[Counts(1), Counts(10)])
    counts = [Counts(100), Counts(10), Counts(1)]  # in another order
    make_trainer(tmp_path / "run").fit(BATCHES, steps=4, callbacks=counts, resume=True)
    assert [c.count for c in counts] == [200, 40, 4]


@pytest.mark.parametrize("state", [None, {"best": float("inf"), "bad": 0}])
def test_the_state_before_any_evaluation(state: Any):
    callback = EarlyStopping()
    callback.set_state(state)
    assert callback.get_state() == {"best": float("inf"), "bad": 0}
