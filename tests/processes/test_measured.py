"""Several processes measure a step together: each its own ranks, and all get one picture and make one choice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.helpers import slow
from tests.processes.running import run_processes, told

pytestmark = pytest.mark.processes


@pytest.fixture(
    scope="module",
    params=[slow((2, 1, "", "")), slow((2, 2, "", "device_put")), (2, 2, "data", "")],
    ids=str,
)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each process has found: processes, devices of each, the mesh's other axis, the transport."""
    count, devices, axis, transport = request.param
    environment = {"JAXPP_FLAX_TRANSPORT": transport} if transport else None
    outputs = run_processes(count, "run_measured.py", axis, devices=devices, environment=environment)
    return [told(output) for output in outputs]


def test_all_processes_have_one_picture(found: list[dict[str, Any]]):
    first, second = (process["measured"] for process in found)
    assert first == second
    assert first["equal"], "a measured step trains as any other"
    assert [[name for name, _, _ in rank] for rank in first["measured"]] == first["order"]
    assert "measured: makespan" in first["drawn"]
    for rank in first["measured"]:
        assert all(start < end for _, start, end in rank)
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(rank))


def test_the_ranks_share_a_clock(found: list[dict[str, Any]]):
    """A stage begins a microbatch after the stage before has ended it; processes of one host have one clock."""
    ends: dict[str, float] = {}
    for stage, rank in enumerate(found[0]["measured"]["measured"]):
        for name, start, end in rank:
            if f"fwd_{stage}__" in name:
                microbatch = name.split(f"fwd_{stage}__")[1].split(",")[0].rstrip(")]")
                assert start >= ends.get(microbatch, 0.0) - 1e-3  # the resolution of two readings of the clock
                ends[microbatch] = end


def test_all_processes_make_one_plan_and_it_says_the_compiled_bytes(found: list[dict[str, Any]]):
    assert found[0]["planned"] == found[1]["planned"]
    assert "(" in found[0]["planned"]["schedule"]
    assert all(forward > 0 for forward, _ in found[0]["planned"]["costs"][:4])
    assert found[0]["planned"]["planned"] == pytest.approx(found[0]["planned"]["exact"], rel=0.05)
