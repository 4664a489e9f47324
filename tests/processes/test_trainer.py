"""`PipelineTrainer` as several processes gives, in each of them, what it gives as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import slow, tree_allclose
from tests.processes.running import run_processes, start_processes, told

pytestmark = pytest.mark.processes


def found(output: str) -> Any:
    """What a process has printed, with arrays for lists."""
    return {key: np.asarray(value) if isinstance(value, list) else value for key, value in told(output).items()}


@pytest.mark.parametrize(
    ("count", "devices", "arguments"),
    [slow(2, 1, ()), slow(3, 1, ()), slow(2, 2, ()), (4, 1, ("data",))],
    ids=["2", "3", "2 with 2 devices", "2x2"],
)
def test_losses_metrics_and_weights(count: int, devices: int, arguments: tuple[str, ...]):
    with start_processes(1, "run_trainer.py", *arguments, devices=count * devices) as one:
        outputs = run_processes(count, "run_trainer.py", *arguments, devices=devices)
        (alone,) = one.wait(240.0)
    assert alone.code == 0, alone.output
    expected = found(alone.output)
    assert len(expected["losses"]) == 7
    assert expected.pop("read") == {"x": True, "y": True}
    for process, output in enumerate(outputs):
        actual = found(output)
        first, last = process < count // 2, process >= count // 2
        if "data" in arguments:  # two ranks, each of two processes, and two stages on each
            assert actual.pop("read") == {"x": first, "y": last}
        else:
            assert actual.pop("read") == {"x": process == 0, "y": process == count - 1}
        # The same programs in the same order; collectives between processes may add in another one.
        tree_allclose(actual["losses"], expected["losses"], rtol=1e-6)
        # Ten steps of Adam behind BatchNorm magnify that.
        tree_allclose(actual, expected, rtol=1e-6 if not arguments else 1e-4)


def test_a_first_loss_that_is_not_finite_ends_all_processes():
    """Process 0 has the inputs and process 1 the targets alone; both say the same."""
    first, second = run_processes(2, "run_not_finite.py")
    said = [line for line in first.splitlines() if ": the loss of step 1 is nan. " in line]
    assert said == [line for line in second.splitlines() if ": the loss of step 1 is nan. " in line]
    assert [line.partition(":")[0] for line in said] == ["block", "leaf", "loss"]
    assert all("jax.debug_nans" in line for line in said)


def test_each_process_makes_what_its_ranks_hold(tmp_path: Path):
    """Also: saved before the first step, restored into an abstract model, and evaluated first."""
    first, second = run_processes(2, "run_made_on_ranks.py", str(tmp_path))
    losses = [line for line in first.splitlines() if line.startswith("losses ")]
    assert losses == [line for line in second.splitlines() if line.startswith("losses ")]
    for output in (first, second):
        (said,) = [line for line in output.splitlines() if line.startswith("differing: ")]
        assert "different values of the initial state" in said
        assert "the program of the model's factory" in said
