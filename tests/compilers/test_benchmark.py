"""The benchmarks of compilers compile tiny models; what they measure is not looked at."""

from __future__ import annotations

import json
from pathlib import Path

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


@pytest.mark.compilers
def test_a_quote_beside_the_compiler(tmp_path: Path):
    mesh_of("tpu-v5p:2x2x1", {"stage": 2, "fsdp": 2})  # skips where the compiler is missing
    flags = ["--tiny", "--only", "v5p,stage=2", "--json", str(tmp_path / "rows.json")]
    run_python(str(ROOT / "benchmarks" / "quote_beside_compiler.py"), *flags, XLA_FLAGS=None)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["compiler"].keys() >= {"seconds", "scheduler", "bytes"}
    assert all(value >= 0 for terms in (row["quote"], row["compiler"]) for value in terms.values())
