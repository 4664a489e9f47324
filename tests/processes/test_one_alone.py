"""What every process must call, called by one of them alone: an error that names the call, not a wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes.running import start_processes

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.mark.parametrize(
    ("call", "the_other"),
    [
        ("save", "ends"),
        ("model", "trains"),
        ("save", "evaluates"),
        ("train_step", "trains another shape"),
        ("fit", "does not save"),
    ],
)
def test_one_process_calls_alone(call: str, the_other: str, tmp_path: Path):
    with start_processes(2, "run_one_alone.py", call, the_other, str(tmp_path / "saved")) as processes:
        ended = processes.wait(120.0)
    for end in ended:
        assert end.code not in (0, None), end.output[-3000:]
    said = "\n".join(end.output for end in ended)
    expected = {
        "ends": ["process 1: it ended its program while others wait for it", "trainer.save"],
        "trains": ["process 0: it goes no further while others wait for it: it waits in trainer.model, which every"],
        "does not save": ["process 0: it goes no further while others wait for it: it waits in trainer.save, which"],
        "trains another shape": ["process 1: it goes no further", "a step to train for float32[2, 1, 4]"],
        # Whoever notices first accuses the other.
        "evaluates": [" for trainer.save (from process 1)", " for trainer.evaluate (from process 0)"],
    }
    for words in expected[the_other]:
        assert words in said, said[-4000:]
