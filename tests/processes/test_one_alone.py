"""What every process must call, called by one of them alone: an error that names the call, not a wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.processes.faults import says
from tests.processes.running import Ended, start_processes

pytestmark = pytest.mark.processes

# (the call of process 0, what process 1 does instead): what is said of it.
SAID = {
    ("save", "ends"): ["process 1: it ended its program while others wait for it", "trainer.save"],
    ("model", "trains"): [
        "process 0: it goes no further while others wait for it: it waits in trainer.gather_model, which every"
    ],
    # Whoever notices first accuses the other.
    ("save", "evaluates"): [" for trainer.save (from process 1)", " for trainer.evaluate (from process 0)"],
    ("train_step", "trains another shape"): ["process 1: it goes no further", "a step to train for float32[2, 1, 4]"],
    ("fit", "does not save"): [
        "process 0: it goes no further while others wait for it: it waits in trainer.save, which"
    ],
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], list[Ended]]]:
    """All of them side by side: nearly all of their time is the ten seconds after which a wait is a failure."""
    with ExitStack() as stack:
        started = {
            (call, other): stack.enter_context(
                start_processes(2, "run_one_alone.py", call, other, str(tmp_path_factory.mktemp("one_alone") / "saved"))
            )
            for call, other in SAID
        }
        yield {names: processes.wait(120.0) for names, processes in started.items()}


@pytest.mark.parametrize("names", SAID, ids=" while the other ".join)
def test_one_process_calls_alone(names: tuple[str, str], ended: dict[tuple[str, str], list[Ended]]):
    for end in ended[names]:
        assert end.code not in (0, None), end.output[-3000:]
    said = "\n".join(end.output for end in ended[names])
    for words in SAID[names]:
        assert words in said, said[-4000:]
    if names == ("fit", "does not save"):
        assert says("one process alone calls `save`").search(said)
