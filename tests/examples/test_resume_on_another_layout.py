"""Killed on four stages, finished on two, loaded into the plain model."""

import re

import pytest

from tests.examples.running import run_example


@pytest.mark.slow
def test_the_loss_of_the_plain_model_is_that_of_the_pipeline():
    output = run_example("resume_on_another_layout.py")
    assert "killed (status -9); checkpoints of steps [15, 20]" in output
    losses = [float(text) for text in re.findall(r"held-out loss (\d\.\d{6})", output)]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)
    assert losses[0] < 0.05
