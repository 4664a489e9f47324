"""The kit of `benchmarks/accelerator.py`: it runs every part on CPU, keeps its deadlines, and refuses at the start."""

from __future__ import annotations

import importlib
import io
import json
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.running import ROOT, run_python, wait_for

KIT = str(ROOT / "benchmarks" / "accelerator.py")
NAMES = ("accelerator", "device.plan", "device.preparation", "device.timeline", "workload")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The modules of the kit, which are imported from the folder of the benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in (*NAMES, "device"):
            sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_part_runs_on_the_cpu(tmp_path: Path):
    file = tmp_path / "figures.json"
    done = run_python(KIT, "--platform", "cpu", "--json", str(file), XLA_FLAGS=None, PYTHONPATH=None)
    found = json.loads(file.read_text())
    assert [part["state"] for part in found["parts"]] == ["done"] * len(found["parts"]), done.stdout
    # In the order of their worth.
    assert [*dict.fromkeys(part["section"][0] for part in found["parts"])] == ["1", "3", "4", "5", "2", "6", "7", "8"]
    (_, trained, beside) = [row for part in found["parts"] if part["part"] == "four stages" for row in rows_of(part)]
    assert trained["falls"]
    assert beside["largest of all steps"] < 1e-5
    (verified,) = [row for part in found["parts"] if part["part"] == "verify" for row in rows_of(part)]
    assert verified["agrees"]
    # All that the parts print stands beside it.
    assert "all is well" in file.with_suffix(".log").read_text()


def rows_of(part: dict) -> list[dict]:
    return [row for result in part["results"] for row in result["rows"]]


def test_a_part_is_cut_off_with_all_that_it_started_and_its_results_stay(modules: dict, tmp_path: Path):
    program = tmp_path / "hangs.py"
    program.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], process_group=0)\n"
        'print(\'{"rows": [{"child": %d}]}\' % child.pid, flush=True)\n'
        "child.wait()\n"
    )
    part = modules["device.plan"].Part(section="1 runs", name="hangs", command=(str(program),), weight=1)
    told: list[dict] = []
    start = time.monotonic()
    # Starting Python twice takes a tenth of a second; on a busy machine, less than these.
    state = modules["accelerator"].run_part(part, 5.0, os.environ, io.StringIO(), told.append)
    assert state == "cut off after 5 s"
    assert time.monotonic() - start < 60
    (child,) = [row["child"] for row in told[0]["rows"]]
    wait_for(lambda: not is_alive(child), "the end of what the part had started")


def is_alive(process: int) -> bool:
    """False for a zombie too, whose parent was killed and that nobody waits for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_time_that_a_part_leaves_is_for_the_others(modules: dict):
    share = modules["accelerator"].share
    assert share(60, 1, 5) == 20  # its sixth, doubled
    assert share(60, 1, 0) == 60  # the last one has the rest
    assert modules["accelerator"].shown({"a": "1F1B", "ms": 1.23456, "of": ""}) == "1F1B: ms 1.235"


def test_a_machine_without_the_device_is_refused(tmp_path: Path):
    file = tmp_path / "figures.json"
    done = run_python(KIT, "--platform", "tpu", "--json", str(file), status=2, JAX_PLATFORMS=None)
    assert "accelerator: --platform tpu: " in done.stderr
    assert not file.exists()


def test_all_missing_packages_are_named_with_the_command_that_fetches_them(modules: dict, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *of: None if name in ('optax', 'rich') else find(name, *of)\n"
    )
    preparation = modules["device.preparation"]
    told = r"missing: optax, rich\..* download .* optax rich`.*--wheels"
    with pytest.raises(preparation.RefusedError, match=told):
        preparation.examined("cpu", {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"})


def test_wheels_are_used_for_what_is_missing_alone(modules: dict, tmp_path: Path):
    pytest.importorskip("pip")
    for name in ("surely_absent", "numpy"):
        with zipfile.ZipFile(tmp_path / f"{name}-9.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "carried = True\n")
            wheel.writestr(f"{name}-9.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
            wheel.writestr(
                f"{name}-9.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-9.0.dist-info/RECORD", "")
    site = tmp_path / "site"
    assert modules["device.preparation"].install_wheels(tmp_path, site) == ["surely_absent"]
    assert (site / "surely_absent.py").exists()
    assert not (site / "numpy.py").exists()


def test_idle_time_and_hidden_copies_of_a_step(modules: dict):
    kernels = [(0.0, 20e3), (10e3, 40e3), (60e3, 100e3)]
    found = modules["device.timeline"].described(kernels, [(30e3, 50e3)])
    # Busy for 90 of 100 µs; of a copy of 20 µs, a kernel runs beside 10.
    assert found["idle"] == pytest.approx(0.1)
    assert found["longest gap µs"] == pytest.approx(10)
    assert found["copies hidden"] == pytest.approx(0.5)
