"""What the other processes say, and how soon they end, when one is killed, stands still, or has no more data."""

from __future__ import annotations

import re
import signal

import pytest

from tests.processes.faults import says
from tests.processes.running import Ended, Processes, start_processes

pytestmark = pytest.mark.processes

# The script's deadline is 10 s; the rest, below the 30 s of the default, is for machines that are busy.
DEADLINE = 28.0


def after_some_steps(processes: Processes, step: int = 33) -> float:
    """Wait until process 1 has trained some steps; the time since the start.

    Well before step 64, after which processes compare their batches: then they wait for that, not for activations.
    """
    return processes.wait_for_output(1, f"step {step}\n")


def others(ended: list[Ended], since: float) -> list[str]:
    """What processes 0 and 2 printed; both ended with an error, in time."""
    for end in (ended[0], ended[2]):
        assert end.code not in (0, None), end.output[-3000:]
        assert end.seconds - since < DEADLINE
    return [ended[0].output, ended[2].output]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_named_with_what_was_awaited(end: signal.Signals):
    with start_processes(3, "run_failure.py") as processes:
        since = after_some_steps(processes)
        processes.processes[1].send_signal(end)
        ended = processes.wait(since + 90)
        outputs = others(ended, since)
    assert ended[1].code == -end  # JAX's preemption service would have it ignore SIGTERM
    for output in outputs:
        assert "process 1" in output, output[-3000:]
        # Steps as the callbacks count them, of which at most four are under way.
        told = [int(step) for step in re.findall(r"in step (\d+)", output)]
        last = max(int(step) for step in re.findall(r"^step (\d+)$", output, re.MULTILINE))
        assert all(last - 4 <= step <= last + 1 for step in told), output[-3000:]
    assert any("microbatch" in output and "stage" in output for output in outputs), outputs[0][-3000:]


def test_of_three_in_a_row_the_last_blames_the_first_and_not_the_one_between():
    # No launcher tells: process 2 hears of the end of process 0 by an error that process 1 passes on.
    with start_processes(3, "run_failure.py") as processes:
        since = after_some_steps(processes)
        processes.processes[0].kill()
        ended = processes.wait(since + 90)
    for end in ended[1:]:
        assert end.code == 69, end.output[-3000:]
        assert "jaxpp_flax: the run has ended: process 0: its connection broke while" in end.output, end.output[-3000:]
        assert says("a killed process, elsewhere").search(end.output)


def test_a_stopped_process_is_named():
    with start_processes(3, "run_failure.py") as processes:
        since = after_some_steps(processes)
        processes.processes[1].send_signal(signal.SIGSTOP)
        ended = processes.wait(since + 90, standing=[1])
        outputs = others(ended, since)
    for output in outputs:
        assert "process 1: no sign of life" in output, output[-3000:]
        assert says("a stopped process").search(output)


def test_process_0_of_a_run_that_we_did_not_start_takes_all_with_it():
    # It serves the coordination there, without which JAX aborts the others.
    with start_processes(2, "run_watched.py") as processes:
        since = processes.wait_for_output(1, "watched\n")
        processes.processes[0].kill()
        ended = processes.wait(since + 90)
    assert ended[1].code == -signal.SIGABRT
    assert says("a killed process 0, after your `jax.distributed.initialize`").search(ended[1].output)


def test_data_that_ends_early_in_one_process_is_told():
    with start_processes(3, "run_failure.py", "7") as processes:
        since = after_some_steps(processes, 5)
        ended = processes.wait(since + 90)
    for end in ended:
        assert end.code not in (0, None), end.output[-3000:]
        assert "data ended" in end.output, end.output[-3000:]
        assert "after step 7" in end.output
