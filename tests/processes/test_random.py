"""Random programs on several processes end, with right values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import slow
from tests.processes.running import run_processes

pytestmark = pytest.mark.processes

# (processes, devices of each): so many ranks.
LAYOUTS = [(2, 1), (3, 1), (4, 1), (2, 2)]
DEFAULT = [(3, 1), (2, 2)]
PLAIN = ["gpipe", "1f1b", "zero_bubble"]
SEVERAL_STAGES = ["interleaved_1f1b", "interleaved_gpipe"]


@st.composite
def programs(draw: Any, ranks: int) -> dict[str, Any]:
    """What `run_random.py` runs."""
    schedule = draw(st.sampled_from(PLAIN + SEVERAL_STAGES))
    stages = ranks * (2 if schedule in SEVERAL_STAGES else 1)
    groups = draw(st.integers(1, 3))
    pairs = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1)).filter(lambda p: p[0] < p[1])
    return {
        "schedule": schedule,
        # Interleaved schedules take a multiple of the ranks.
        "microbatches": groups * ranks if schedule in SEVERAL_STAGES else draw(st.integers(1, 9)),
        "widths": draw(st.lists(st.integers(1, 24), min_size=stages + 1, max_size=stages + 1)),
        "rows": draw(st.sampled_from([1, 2, 5, 16])),
        "skips": draw(st.lists(pairs, max_size=3, unique=True)),
        "uses_shared": sorted(draw(st.sets(st.integers(0, stages - 1), max_size=3))),
        "bfloat16": draw(st.booleans()),
        "clip": draw(st.booleans()),
        "donate": draw(st.booleans()),
        "steps": draw(st.sampled_from([1, 2, 5])),
        "seed": draw(st.integers(0, 1 << 20)),
    }


def run(count: int, devices: int, number: int, folder: Path, seconds: float) -> None:
    """`number` programs in one start of the processes."""

    @settings(max_examples=1, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(programs(count * devices), min_size=number, max_size=number))
    def one_start(drawn: list[dict[str, Any]]) -> None:
        file = folder / "programs.json"
        file.write_text(json.dumps(drawn))
        for output in run_processes(count, "run_random.py", str(file), devices=devices, timeout=seconds):
            assert f"{number} programs right" in output

    one_start()


@pytest.mark.parametrize(("count", "devices"), [of if of in DEFAULT else slow(*of) for of in LAYOUTS])
def test_random_programs(count: int, devices: int, tmp_path: Path):
    run(count, devices, 3, tmp_path, 240.0)


@pytest.mark.soak
@pytest.mark.parametrize(("count", "devices"), LAYOUTS)
def test_many_random_programs(count: int, devices: int, tmp_path: Path):
    run(count, devices, 50, tmp_path, 1500.0)
