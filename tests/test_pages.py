"""The code on the pages of docs/ runs, block after block, as a reader would try it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.helpers import python_blocks
from tests.running import ROOT


def run_page(name: str, blocks: int) -> None:
    """Run the page's blocks of Python, of which there are at least so many, in one namespace."""
    found = python_blocks(ROOT / "docs" / name)
    assert len(found) >= blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(found):
        exec(compile(block, f"{name}, block {number}", "exec"), namespace)


def test_the_page_about_the_trainer_runs(capsys: pytest.CaptureFixture[str]):
    run_page("trainer.md", blocks=6)
    out = capsys.readouterr().out
    assert "['Dense_0', 'Dense_1', 'Dense_2']" in out
    assert "'accuracy'" in out


def test_the_page_about_assignments_runs(capsys: pytest.CaptureFixture[str]):
    run_page("assignment.md", blocks=3)
    out = capsys.readouterr().out
    assert "assignment of 9 blocks to 4 stages, operations and bytes estimated" in out
    assert "no assignment of 9 blocks to 4 stages keeps within memory_limit" in out
    assert '{"name": "after_block_7", "stage": 3' in out


def test_the_page_for_programs_of_jaxpp_runs(capsys: pytest.CaptureFixture[str]):
    try:
        run_page("jaxpp.md", blocks=3)
    finally:  # the page puts a stand-in in the place of `jaxpp`
        for name in [name for name in sys.modules if name.partition(".")[0] == "jaxpp"]:
            del sys.modules[name]
    assert capsys.readouterr().out == "(1,) (4,)\n"


def test_the_page_for_programs_of_shardy_runs():
    run_page("mpmd.md", blocks=2)


def test_the_page_about_tasks_runs(capsys: pytest.CaptureFixture[str]):
    run_page("tasks.md", blocks=1)
    out = capsys.readouterr().out
    assert "first(" in out
    assert out.endswith("[4, 5, 6, 7]\n")


@pytest.mark.parametrize("page", ["docs/engine.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str):
    named = set(re.findall(r"`([\w/]+/\w+\.py)", (ROOT / page).read_text(encoding="utf-8")))
    assert named
    tops = (ROOT, ROOT / "jaxpp_flax")
    assert [name for name in named if not any((top / name).exists() for top in tops)] == []
