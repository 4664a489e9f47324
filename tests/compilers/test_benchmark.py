"""The benchmark of large models compiles a tiny one; what it measures is not looked at."""

from __future__ import annotations

import pytest

from tests.compilers.machines import ONE_HOST, mesh_of
from tests.running import ROOT, run_python


@pytest.mark.compilers
@pytest.mark.parametrize("machine", ONE_HOST)
def test_a_tiny_llama_compiles(machine: str):
    mesh_of(machine, {"stage": 2, "tensor": 2})  # skips where the compiler is missing
    layout = ["--layout", "tiny", machine, "stage=2,tensor=2", "4"]
    line = run_python(str(ROOT / "benchmarks" / "compilers.py"), *layout, XLA_FLAGS=None).stdout.splitlines()[-1]
    assert line.startswith(f"tiny {machine}")
    assert "compiled in" in line
