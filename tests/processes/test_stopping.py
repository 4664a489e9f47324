"""What one of several processes decides, or is told, ends `fit` in all of them after the same step."""

from __future__ import annotations

import pytest

from tests.processes.running import run_processes, said_of_cases

pytestmark = pytest.mark.processes

# A decision after a step holds four steps later, which no process has begun; at an evaluation all are together.
EXPECTED = {
    "one process": "7",
    "its reason": "a clock",
    "again": "16",
    "both": "22",
    "at an evaluation": "(4, 'process 0 has seen enough')",
    "early stopping": "2",
    "before the first step": "(0, 'process 1 does not begin')",
    "interrupted": "step 7, Step 7 is saved in it: fit(..., resume=True) goes on from the latest checkpoint., "
    "as if never: True",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What both processes printed of all cases."""
    return run_processes(2, "run_stopping.py", str(tmp_path_factory.mktemp("stopping")))


@pytest.mark.parametrize("name", EXPECTED)
def test_all_processes_end_after_the_same_step(outputs: list[str], name: str):
    assert [said_of_cases(output)[name] for output in outputs] == [EXPECTED[name]] * 2


def test_ctrl_c_in_all_of_them(outputs: list[str]):
    """The first signal counts, which may come to one of them a step earlier."""
    first, second = (said_of_cases(output)["both interrupted"] for output in outputs)
    assert first == second
    assert "is saved in it" in first
    assert first.endswith("as if never: True")
