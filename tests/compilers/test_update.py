"""The update on described machines: gradients are reduced once, new parameters take over the memory of the old."""

from __future__ import annotations

from functools import cache

import pytest

from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.planning.compilers.tasks import read_task
from tests.compilers.machines import ONE_HOST
from tests.compilers.small import PARAMETER_BYTES, around_loop, compiled_for, moved, of_loop, told

pytestmark = pytest.mark.compilers

LOSS = 4  # bytes


@cache
def trained(machine: str) -> CompiledPipeline:
    """Adam, on two stages of two shards of the batch."""
    return compiled_for(machine, {"data": 2})


@pytest.mark.parametrize("machine", ONE_HOST)
def test_gradients_are_reduced_over_data_once_in_a_step(machine: str):
    """The loss goes with them: beside a collective, NVIDIA's compiler lets a backward hold every activation."""
    report = told(trained(machine))
    assert not any(task.exchanges for task in of_loop(report))
    assert [len(task.exchanges) for task in around_loop(report) if task.exchanges] == [1, 1]
    assert moved(around_loop(report)) == {("all-reduce", ("data",)): 2 * PARAMETER_BYTES + LOSS}


@pytest.mark.parametrize("machine", ONE_HOST)
def test_parameters_and_moments_are_donated_and_not_copied(machine: str):
    """NVIDIA's compiler may copy an accumulator in front of its all-reduce: no result takes over its memory."""
    compiled = trained(machine)
    aliased = [0, 0]
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        if task.stage is None:
            read = read_task(executable)
            assert not {c.argument for c in read.text.copies if c.what == "argument"}.intersection(read.text.aliased)
            aliased[task.rank] += read.memory.alias_size_in_bytes
    # Parameters and two moments; and Adam's counter, whose few bytes may be padded.
    for nbytes in aliased:
        assert 0 <= nbytes - 3 * PARAMETER_BYTES <= 4096
