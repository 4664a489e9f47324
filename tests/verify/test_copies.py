"""Copies of one array in two processes: their hashes are compared, and the report invents no numbers."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxpp_flax.verify import Report, copies


def test_copies_that_differ_between_processes_show_no_numbers(monkeypatch: pytest.MonkeyPatch):
    def exchange(group: Any, name: str, own: Any, **_: Any) -> list[Any]:
        return [own, {**own, "params/w (slice(0, 4),)": "another"}]

    monkeypatch.setattr(copies, "exchange_values", exchange)
    own: dict[str, str | None] = {"params/w (slice(0, 4),)": "one", "params/b (slice(0, 4),)": "one"}
    rows = copies._differing_between_processes(own, "after the step")
    report = Report(rows=tuple(rows), facts={"processes": 2})
    assert [row.leaf for row in rows] == ["params/w"]
    assert report.sentence == (
        "The first difference that rounding does not explain: state params/w of the whole step, of which the hashes of "
        "two copies differ (their numbers were not compared). Likely: copies of one array that differ: after the step, "
        "process 1 has another copy than process 0. Process 1 holds it."
    )
    assert re.search(r"WRONG +state +whole step +params/w +hashes$", str(report), re.MULTILINE)
