"""`python -m jaxpp_flax.doctor`: what it finds, what it calls wrong, and its measurement between processes."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import jax
import pytest

from jaxpp_flax import doctor
from jaxpp_flax.doctor import Finding
from jaxpp_flax.processes import process_group
from tests.launch.running import QUICK, started

pytestmark = pytest.mark.processes


def wrong(findings: list[Finding]) -> list[str]:
    return [finding.subject for finding in findings if finding.remedy]


def test_it_finds_what_is_installed_here():
    found = {finding.subject: finding.text for finding in doctor.examine(process_group())}
    assert found["jax"].startswith(f"{jax.__version__} (tested: 0.10.2 to ")
    assert found["backend"] == "cpu"
    assert found["devices of this process"] == "8 × cpu"


def test_each_version_stands_beside_the_tested_ones():
    found = {finding.subject: finding.text for finding in doctor.versions()}
    for package, (oldest, newest) in doctor.TESTED_VERSIONS.items():
        tested = oldest if oldest == newest else f"{oldest} to {newest}"
        assert found[package].startswith(f"{importlib.metadata.version(package)} (tested: {tested}")


def test_a_missing_package_is_wrong(monkeypatch: pytest.MonkeyPatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "optax":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    [finding] = [finding for finding in doctor.versions() if finding.remedy]
    assert finding == Finding("optax", "not installed", "pip install optax")


def test_a_proxy_in_the_way_is_wrong():
    assert wrong(doctor.known_faults({"HTTPS_PROXY": "http://proxy:3128"})) == ["proxy"]
    assert not wrong(doctor.known_faults({"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}))


def test_without_a_backend_the_report_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(*_: object) -> None:
        raise RuntimeError("unable to initialize backend 'foo'")

    for name in ("local_devices", "devices", "default_backend"):
        monkeypatch.setattr(doctor.jax, name, fail)
    assert doctor.main([]) == 1
    assert "no backend: unable to initialize" in capsys.readouterr().out


def test_something_wrong_gives_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--no-processes"]) == 0
    assert "all is well" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "known_faults", lambda _: [Finding("proxy", "in the way", "remove it")])
    assert doctor.main(["--no-processes"]) == 1
    assert "✗ proxy: in the way. To do: remove it" in capsys.readouterr().out


def test_processes_that_cannot_talk_are_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "run", lambda *_, **__: 1)
    assert wrong(doctor.measure_here()) == ["two processes"]


def test_it_measures_between_two_processes_of_its_own(tmp_path: Path):
    with started(tmp_path, ["-m", "jaxpp_flax.doctor"]) as run:
        assert run.finish() == 0, run.stdout + run.stderr
        for size in ("4 KiB", "64 MiB"):
            assert f"{size} between processes 0 and 1" in run.stdout
        run.check_nothing_is_left()


def test_the_processes_of_its_own_use_no_accelerator(tmp_path: Path):
    """A machine may have one, which the doctor itself holds."""
    code = "from jaxpp_flax import doctor\nprint(*doctor.measure_here(), sep='\\n')\n"
    (tmp_path / "script.py").write_text(code)
    with started(tmp_path, ["script.py"], JAX_PLATFORMS="tpu") as run:  # not there either
        assert run.finish() == 0, run.stderr
    assert "✓ 64 MiB between processes 0 and 1: " in run.stdout, run.stdout


def test_it_measures_between_launched_processes(tmp_path: Path):
    with started(tmp_path, [*QUICK, "-n", "3", "-m", "jaxpp_flax.doctor"]) as run:
        assert run.finish() == 0, run.stdout + run.stderr
        assert run.stdout.count("4 KiB between processes 0 and 1") == 1  # one report, of process 0
        assert "4 KiB between processes 0 and 2" in run.stdout
        assert "3, with 3 devices in all" in run.stdout
