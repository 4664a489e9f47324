"""A conversion changes few lines, and the page shows exactly those; that of the first model is README's."""

from __future__ import annotations

import difflib
import re

import pytest

from tests.examples.models.comparing import MODELS, NAMES

PAGE = MODELS.parents[1] / "docs" / "start" / "own_model.md"
MAX_CHANGED = 10
SHOWN = NAMES[1:]


def diff_of(name: str) -> list[str]:
    """The unified diff of the converted file, one line of context."""
    files = [f"{name}.py", f"{name}_pipelined.py"]
    old, new = ((MODELS / file).read_text(encoding="utf-8").splitlines() for file in files)
    return list(difflib.unified_diff(old, new, *files, n=1, lineterm=""))


@pytest.mark.parametrize("name", NAMES)
def test_at_most_ten_lines_are_added_and_removed(name: str):
    changed = [line for line in diff_of(name)[2:] if line[0] in "+-"]
    assert 0 < len(changed) <= MAX_CHANGED
    assert any("jaxpp_flax" in line for line in changed)
    assert "jaxpp_flax" not in (MODELS / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_diff(name: str):
    shown = re.findall(r"```diff\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    wanted = "\n".join(line.rstrip() for line in diff_of(name))
    assert wanted in shown, f"put this into {PAGE.name}:\n```diff\n{wanted}\n```"


def test_the_page_shows_no_other_diffs():
    assert PAGE.read_text(encoding="utf-8").count("```diff\n") == len(SHOWN)
