"""The benchmarks run, on sizes too small to mean anything; what they measure is not looked at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.running import ROOT, run_python

TINY = ["--stages", "2", "--microbatches", "4", "--blocks", "4", "--width", "8", "--length", "4", "--batch", "1"]

# JaxPP is not on the package index. It has the interface of `jaxpp_flax.api`, which stands in for it here.
STAND_IN = "from jaxpp_flax.api import *\n"


def result_of(command: str, folder: Path, *flags: str) -> dict[str, Any]:
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    flags = flags if command == "scale" else (*TINY, *flags)
    run_python(
        str(ROOT / "benchmarks" / f"{command}.py"), *flags, "--json", str(folder / "rows.json"),
        XLA_FLAGS=None, PYTHONPATH=os.pathsep.join(path for path in paths if path),
    )  # fmt: skip
    return json.loads((folder / "rows.json").read_text())


def rows_of(command: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    return result_of(command, folder, *flags)["rows"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["dispatch", "compile_time", "step"])
def test_a_peer_that_can_be_imported_takes_part(command: str, tmp_path: Path):
    (tmp_path / "jaxpp").mkdir()
    (tmp_path / "jaxpp" / "__init__.py").touch()
    (tmp_path / "jaxpp" / "api.py").write_text(STAND_IN)
    flags = [] if command == "compile_time" else ["--repeats", "1"]
    names = [str(row["contestant"]) for row in rows_of(command, tmp_path, *flags)]
    assert names[0].startswith("plain jax.jit")
    assert any(name.startswith("JaxPP") for name in names)


@pytest.mark.slow
def test_a_linen_model_starts_and_trains_under_every_schedule(tmp_path: Path):
    plain, hand, *rows = rows_of("linen", tmp_path, "--repeats", "1", "--vocabulary", "16")
    assert [row["contestant"] for row in rows] == ["1F1B", "GPipe", "zero-bubble", "interleaved"]
    assert (plain["over plain"], hand["over by hand"]) == (1.0, 1.0)
    # Two blocks of 16 arrays, and what enters a stage: activations, or residuals and cotangents, and accumulators.
    assert all(row["arrays of a task"] > 16 for row in rows)
    assert all(row["compilations"] <= row["executables"] for row in rows)


@pytest.mark.slow
def test_starts_are_measured_in_processes_of_their_own(tmp_path: Path):
    flags = ("--repeats", "1", "--vocabulary", "16", "--different", "--cache", str(tmp_path / "cache"))
    rows = rows_of("start", tmp_path, *flags)
    assert [row["contestant"] for row in rows] == ["plain jax.jit", "1F1B", "interleaved"]
    assert rows[0]["over plain"] == 1.0
    assert any((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_memory_finds_what_is_predicted(tmp_path: Path):
    rows = rows_of("memory", tmp_path)
    assert [row["schedule"] for row in rows] == ["1f1b", "zero_bubble", "interleaved_1f1b", "gpipe"]
    # Counts of bytes, not a measurement: they agree exactly.
    assert {row["live over predicted, worst device"] for row in rows} == {1.0}


@pytest.mark.slow
def test_fsdp_counts_collectives(tmp_path: Path):
    rows = rows_of("fsdp", tmp_path, "--repeats", "1", "--batch", "2")
    assert [row["fsdp"] for row in rows] == ["microbatch", "step"]
    assert rows[1]["all-gathers"] == rows[1]["reduce-scatters"] == 4 * 8 < rows[0]["all-gathers"]


@pytest.mark.slow
def test_balance_compares_every_way_with_even_stages(tmp_path: Path):
    rows = rows_of("balance", tmp_path, "--repeats", "1", "--vocabulary", "32")
    assert (rows[0]["assignment"], rows[0]["over even"]) == ("even", 1.0)
    assert all(row["blocks in stages"].count("+") == 1 for row in rows)


@pytest.mark.slow
def test_scale_counts_tasks_and_bytes(tmp_path: Path):
    (row,) = rows_of("scale", tmp_path, "--ranks", "2", "--microbatches", "4")
    # 16 runs and 8 transfers; what is freed by itself depends on the residuals that this JAX chooses.
    assert row["tasks"] == 16
    assert row["instructions"] in (32, 36)


@pytest.mark.slow
def test_fit_takes_part_beside_the_bare_step(tmp_path: Path):
    rows = rows_of("host_cost", tmp_path, "--repeats", "2")
    assert [row["contestant"] for row in rows] == ["the compiled step", "fit", "fit, all metrics"]
    # What is measured is more work, which the counts of calls see and times may not.
    assert 0 < rows[0]["calls per step"] < rows[1]["calls per step"] < rows[2]["calls per step"]
    assert rows[1]["instructions"] < rows[2]["instructions"]


@pytest.mark.slow
def test_offload_predicts_live_bytes_and_changes_no_bit(tmp_path: Path):
    rows = rows_of("offload", tmp_path, "--repeats", "1", "--batch", "2", "--schedule", "gpipe")
    assert [row["residuals"] for row in rows][:2] == ["keep", "offload"]
    for row in rows:
        assert row["device MB predicted, fullest device"] == row["live"]
        assert row["host MB predicted, fullest device"] == row["live "]
        assert row["weights differ by"] == 0 or "recompute" in row["residuals"]
    # A recomputed value may be fused otherwise: float32 rounding of the last bits.
    assert max(row["weights differ by"] for row in rows) < 1e-5
    assert rows[1]["live "] > 0


@pytest.mark.slow
def test_an_optimizer_on_the_host_changes_no_bit(tmp_path: Path):
    device, host = rows_of("optimizer_memory", tmp_path, "--repeats", "1", "--width", "64")
    assert host["weights differ by"] == device["host MB"] == 0
    # Adam's two moments move; one counter stays.
    assert host["host MB"] == pytest.approx(2 / 3 * device["device MB between steps, fullest rank"], rel=1e-3)
    assert host["device MB between steps, fullest rank"] < 0.34 * device["device MB between steps, fullest rank"]


@pytest.mark.slow
def test_residuals_keep_their_promises(tmp_path: Path):
    run_python(str(ROOT / "benchmarks" / "residuals.py"), "--microbatches", "16", "--json", str(tmp_path / "rows.json"))
    found = json.loads((tmp_path / "rows.json").read_text())
    assert not found["failures"]
    assert {row["limit"] for row in found["rows"]} == {1.0, 0.8, 0.6, 0.5, 0.4}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="its naps are C++")
def test_ranks_hold_the_bytes_that_a_plan_predicts(tmp_path: Path):
    flags = ("--layouts", "3", "--repeats", "1", "--json", str(tmp_path / "rows.json"))
    run_python(str(ROOT / "benchmarks" / "quote_inside.py"), *flags, XLA_FLAGS=None)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    # Counts of bytes, not a measurement: they agree exactly.
    assert [(row["layouts"], row["bytes exact"]) for row in rows] == [(1, 1.0)] * 3


@pytest.mark.slow
@pytest.mark.processes
def test_processes_take_turns_with_one(tmp_path: Path):
    found = result_of("processes", tmp_path, "--repeats", "1", "--rounds", "1")
    assert [len(times) for times in found["rounds"]] == [2]
    assert {size: sorted(of) for size, of in found["wire"].items()} == {
        size: ["bare", "ours"] for size in ("4 KiB", "1 MiB", "64 MiB")
    }


@pytest.mark.slow
def test_differences_are_those_that_the_page_tells(tmp_path: Path):
    rows = rows_of("differences", tmp_path, "--steps", "1")
    apart = {(row["model"], row["optimizer"], row["microbatches"]): row["apart"] for row in rows}
    key_biases = "attention with key biases"
    # Three classes of the page: rounding (1e-6), rounding over itself (1e-3 to 1e-1), and another step (about 1).
    assert all(of < 1e-4 for (model, *_), of in apart.items() if model in ("LayerNorm", "top 1 of 8 experts"))
    assert apart[key_biases, "sgd", 4] < 1e-4 < apart[key_biases, "adam", 4] < 0.3 < apart["BatchNorm", "sgd", 4]
    assert apart["BatchNorm", "sgd", 1] < 1e-6


@pytest.mark.slow
def test_weights_cross_devices_once(tmp_path: Path):
    flags = ("--width", "16", "--layers", "4", "--repeats", "1", "--json", str(tmp_path / "rows.json"))
    run_python(str(ROOT / "benchmarks" / "weights.py"), *flags, XLA_FLAGS=None)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["peak above the sampler, in leaves"] for row in rows] == [1.0] * 4


@pytest.mark.slow
def test_a_new_mixture_of_lengths_costs_less_than_its_compilation(tmp_path: Path):
    [row] = rows_of("lengths", tmp_path, "--patterns", "--stages", "2", "--microbatches", "4", "--repeats", "3")
    assert row["first"] > row["more for a pattern"], "the first step compiles"


@pytest.mark.slow
def test_texts_of_several_lengths_cost_less_than_their_padding(tmp_path: Path):
    flags = ("--functions", "48", "--lengths", "32,64,128", "--tokens", "256", "--repeats", "1")
    rows = {row["batches"]: row for row in rows_of("lengths", tmp_path, *flags)}
    assert set(rows) == {"padded", "as drawn", "whole", "whole, one size", "grouped"}
    # Counts of the padded shapes, not a measurement.
    assert rows["grouped"]["predicted"] > 1.15 * rows["padded"]["predicted"]
    assert rows["grouped"]["padding"] < rows["padded"]["padding"]
