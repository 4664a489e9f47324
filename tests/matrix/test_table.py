"""The table in docs/reference/models.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE.parents[1] / "docs" / "reference" / "models.md").read_text()


def test_every_row_names_a_test_that_exists():
    source = "\n".join(path.read_text() for path in HERE.parent.rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", source, re.MULTILINE))
    named = set(re.findall(r"::(test_\w+)", TABLE))
    assert len(named) > 30
    assert named - defined == set()
    assert {name for name in re.findall(r"[\w/]*test_\w+\.py", TABLE) if not _exists(name)} == set()


def test_every_case_exists():
    source = "\n".join(path.read_text() for path in HERE.glob("test_*.py"))
    cases = set(re.findall(r"\[(\w+)\]`", TABLE))
    assert len(cases) > 15
    assert {case for case in cases if not re.search(rf'"{case}"|def {case}\(', source)} == set()


def test_every_row_of_a_table_has_a_test():
    rows = [line for line in TABLE.split("## What is refused")[0].splitlines() if line.startswith("| ")]
    bodies = [row for row in rows if not row.startswith(("| Model |", "| Step |", "| Submesh |"))]
    assert [row for row in bodies if "::test_" not in row and "…[" not in row] == []


def _exists(name: str) -> bool:
    return (HERE / name).exists() or (HERE.parents[1] / name).exists()
