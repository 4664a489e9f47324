"""The code on the page about the trainer runs, block after block."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "trainer.md"


def test_the_page_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    namespace: dict[str, object] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)
    out = capsys.readouterr().out
    assert "['Dense_0', 'Dense_1', 'Dense_2']" in out
    assert "'accuracy'" in out
