"""Microbatches of several shapes as several processes: steps of plain JAX, and shapes that differ are named at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes, start_processes

pytestmark = pytest.mark.processes

SETS = 50


@pytest.mark.parametrize("case", ["few", slow("more")])
def test_steps_are_those_of_plain_jax(case: str):
    for output in run_processes(2, "run_lengths.py", case, devices=2):
        assert "all done" in output
        if case == "few":
            assert "size: global_batch_size=4 with Microbatches: these may have another number of examples" in output
            assert "shapes: the processes of this run have different values of the shapes of the Micro" in output
            assert "same: microbatch 1.\n  process 0: ['mask'] bool[4, 4], ['tokens'] int32[4, 4]\n  pro" in output


def test_a_process_that_draws_other_shapes_is_named_at_once():
    with start_processes(2, "run_lengths.py", "differs", devices=2) as processes:
        ended = processes.wait(180.0)
    for end in ended:
        assert end.code not in (0, None), end.output[-3000:]
        told = end.output.partition("differs now\n")[2]
        assert "the shapes of the Microbatches for training" in told, end.output[-3000:]
        assert "  process 1: ['mask'] bool[2, 8], ['tokens'] int32[2, 8]\n" in told, end.output[-3000:]
    # Neither process waits for a deadline: the later one sees both shapes, and the other ends within a second.
    assert abs(ended[0].seconds - ended[1].seconds) < 10


def test_a_run_with_own_examples_goes_on_after_a_break(tmp_path: Path):
    for output in run_processes(2, "run_lengths.py", "resume", str(tmp_path), devices=2):
        assert "all done" in output


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))  # a fifth of the 1,000 sets of tests/trainers/test_random_lengths.py
def test_random_sets_of_lengths(seed: int):
    for output in run_processes(2, "run_lengths.py", "random", str(SETS), str(seed), devices=2, timeout=3000.0):
        assert f"{SETS} sets right" in output
