"""The code on the page about assignments runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "assignment.md"


def test_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    out = capsys.readouterr().out
    assert "assignment of 9 blocks to 4 stages, operations and bytes estimated" in out
    assert "no assignment of 9 blocks to 4 stages keeps within memory_limit" in out
    assert '{"name": "after_block_7", "stage": 3' in out
