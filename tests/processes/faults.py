"""The table of faults on `docs/guides/processes.md`. The test of a row looks for what the row says is printed."""

from __future__ import annotations

import re
from functools import cache

from tests.running import ROOT

__all__ = ["COLUMNS", "rows", "says"]

COLUMNS = ("fault", "after", "the others print")


@cache
def rows() -> dict[str, dict[str, str]]:
    """The rows by their faults, each cell by its column."""
    found: dict[str, dict[str, str]] = {}
    inside = False
    for line in (ROOT / "docs/guides/processes.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        inside = tuple(cells) == COLUMNS or (inside and line.startswith("|"))
        if inside and cells[0] != "fault" and not cells[0].startswith("---"):
            found[cells[0]] = dict(zip(COLUMNS, cells, strict=True))
    return found


def says(fault: str) -> re.Pattern[str]:
    """What the row of this fault says is printed; other numbers than its own fit too."""
    text = re.escape(rows()[fault]["the others print"].strip("`"))
    return re.compile(re.sub(r"\d+", r"\\d+", text).replace("\\.\\.\\.", ".*"))
