"""Reading and writing weights of some hundred MB holds about one leaf beside the weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.running import ROOT, run_python


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak of a process")
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_the_host_holds_one_leaf_beside_the_weights(tmp_path: Path, cut: str):
    done = run_python(str(ROOT / "tests" / "pretrained" / "measure_memory.py"), str(tmp_path), cut)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] > 380e6
    # A slice is half a leaf, and the copy in the order of the other side is another half. The rest is the allocator's.
    assert {name: over for name, over in found["over"].items() if over > 4 * found["leaf"]} == {}
