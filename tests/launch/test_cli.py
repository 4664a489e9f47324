"""The launcher's command line: what it refuses, and with which exit status."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jaxpp_flax.launch import LaunchError, child
from jaxpp_flax.launch.cli import main
from jaxpp_flax.launch.job import Job


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"program": []}, "no program"),
        ({"program": ["absent.py"]}, "there is no file 'absent.py'"),
        ({"num_processes": 0}, "-n 0: at least one process"),
        ({"devices_per_process": 0}, "--devices-per-process 0: at least one device"),
        ({"failure_timeout": 0.0}, "--failure-timeout 0.0: it must be"),
    ],
)
def test_jobs_that_make_no_sense_are_refused(changes: dict[str, object], message: str):
    good: dict[str, object] = {"program": [__file__], "num_processes": 2}
    with pytest.raises(LaunchError, match=message):
        Job(**{**good, **changes})  # type: ignore[arg-type]


def test_errors_of_the_command_line(capsys: pytest.CaptureFixture[str]):
    assert main(["-n", "2", "absent.py"]) == 2
    assert "error: there is no file 'absent.py' to run." in capsys.readouterr().err
    assert main(["-n", "2", "-m", "nowhere_xyz.train"]) == 2
    assert "error: there is no module 'nowhere_xyz' to run, neither in " in capsys.readouterr().err
    assert main(["-n", "2", "--cluster", __file__]) == 2
    assert "-n and --cluster exclude each other" in capsys.readouterr().err
    assert main([__file__]) == 2
    assert (
        "nothing says how many processes to start. Give their number, as in `-n 4 train.py`" in capsys.readouterr().err
    )
    assert main(["-n", "0", __file__]) == 2
    assert "-n 0: at least one process is needed. Give" in capsys.readouterr().err
    assert main(["--address", "192.0.2.1", "-n", "2", __file__]) == 2
    assert "--address 192.0.2.1: this machine cannot listen there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-restarts", "3", "--grace", "9", "--no-fork", __file__], "--grace, --max-restarts, --no-fork and --cl"),
        (["--devices-per-process", "2", __file__], "--devices-per-process and --cluster exclude each other"),
        (["--ray", "--hosts", "2", __file__], "--ray, --hosts and --cluster exclude each other"),
        (["--failure-timeout", "0", __file__], "--failure-timeout 0.0: it must be"),
        ([], "no program: give a script"),
        (["absent.py"], "there is no file 'absent.py' to run"),
        (["-m", "nowhere_xyz"], "there is no module 'nowhere_xyz' to run"),
    ],
)
def test_what_a_cluster_does_not_take_is_refused_before_it_connects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
):
    monkeypatch.setattr(child, "main", lambda *a, **k: None)
    assert main(["--cluster", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_connection_that_fails_has_another_status_than_wrong_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """For scripts that start a run again: the place may be free then."""

    def connect(options: object) -> None:
        raise LaunchError("another process of this host is process 1")

    monkeypatch.setattr(child, "connect_program", connect)
    with pytest.raises(SystemExit) as ended:
        main(["--cluster", __file__])
    assert ended.value.code == "error: another process of this host is process 1"  # Python's exit status is 1
    # An error of the program itself is none of the options.
    monkeypatch.setattr(child, "connect_program", lambda options: None)
    (tmp_path / "script.py").write_text("from jaxpp_flax.launch import LaunchError\nraise LaunchError('mine')\n")
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(LaunchError, match="mine"):
        main(["--cluster", str(tmp_path / "script.py")])
