"""Two runs' checkpoints: the first that differs, with its leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Checkpoints
from jaxpp_flax.verify import VerifyError, bisect
from jaxpp_flax.verify.__main__ import main
from tests.trainers import models as m


def train(directory: Path, num_stages: int, batches: list[Any]) -> None:
    PipelineTrainer(
        m.Layers(), optax.sgd(0.1), m.squared_error, num_stages=num_stages, num_microbatches=2,
        checkpoints=Checkpoints(directory, every=1, keep=10), logging=False, mesh={},
    ).fit(batches, steps=len(batches))  # fmt: skip


def test_runs_of_two_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    batches = [m.make_xy(4, seed=seed) for seed in range(5)]
    train(tmp_path / "two", 2, batches)
    train(tmp_path / "one", 1, batches)
    assert bisect(tmp_path / "two", tmp_path / "one").differs is None
    assert main(["bisect", str(tmp_path / "two"), str(tmp_path / "one")]) == 0
    assert "agree up to their last common checkpoint, of step 5" in capsys.readouterr().out

    train(tmp_path / "other", 2, [*batches[:3], m.make_xy(4, seed=7), batches[4]])
    found = bisect(tmp_path / "two", tmp_path / "other")
    assert (found.equal, found.differs) == (3, 4)
    assert "params/layers/1/kernel" in found.leaves
    assert str(found).startswith("The checkpoint of step 4 is the first that differs; that of step 3 agrees.")
    assert main(["bisect", str(tmp_path / "two"), str(tmp_path / "other")]) == 1


def test_runs_without_a_common_step(tmp_path: Path):
    train(tmp_path / "run", 1, [m.make_xy(4)])
    with pytest.raises(VerifyError, match=r"there is no directory .*/empty\. Give the directories"):
        bisect(tmp_path / "run", tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifyError, match=r"no checkpoint of the same step: .*run has 1 and .*empty has none"):
        bisect(tmp_path / "run", tmp_path / "empty")
