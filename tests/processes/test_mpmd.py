"""Programs of `mpmd.jit` whose meshes belong to two processes: equal to plain `jax.jit`, or refused in both."""

from __future__ import annotations

import pytest

from tests.processes.running import results_of_cases, start_processes

pytestmark = pytest.mark.processes

NAMES = (
    "one_mesh_each", "other_shapes", "three_meshes", "pipeline", "zero_bubble", "shared_scalars", "other_partitions",
    "arrays_on_meshes", "many_microbatches", "teacher_and_student", "refusals",
)  # fmt: skip
# By device_put, all processes follow one order.
IN_ONE_ORDER = ("three_meshes", "zero_bubble", "other_partitions")


@pytest.mark.parametrize("name", NAMES)
def test_every_process_has_what_plain_jit_gives(name: str):
    found = results_of_cases(2, "run_mpmd.py", names=NAMES, devices=4)
    assert not found[name], found[name]


@pytest.mark.parametrize("name", IN_ONE_ORDER)
def test_by_device_put(name: str):
    found = results_of_cases(2, "run_mpmd.py", names=IN_ONE_ORDER, devices=4, transport="device_put")
    assert not found[name], found[name]


def test_a_killed_process_ends_the_other_with_its_name():
    with start_processes(2, "run_mpmd_failure.py", devices=2) as processes:
        since = processes.wait_for_output(1, "step 5\n")
        processes.processes[1].kill()
        other = processes.wait(since + 40)[0]
    assert other.code == 69, other.output[-3000:]
    assert "jaxpp_flax: the run has ended: process 1: " in other.output, other.output[-3000:]
    assert "Process 0 was waiting for" in other.output, other.output[-3000:]


def test_a_process_with_arguments_of_its_own_is_not_waited_for_forever():
    # Process 0 compiles another program, and waits for process 1, which waits for a value of its next step.
    told = "process 0: it waits for all processes at 'the hash of program 2 (1)', while process 1 runs a program that"
    with start_processes(2, "run_mpmd_failure.py", "3", devices=2) as processes:
        ended = processes.wait(60)
    for end in ended:
        assert end.code not in (0, None), end.output[-3000:]
        assert told in end.output, end.output[-3000:]
