"""How commands end: 0 well, 1 for the answer no, 2 for a user's error, which is one line or the user's own lines."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from jaxpp_flax.commands.exit_status import exit_status
from jaxpp_flax.commands.output import check_output
from jaxpp_flax.planning.__main__ import main as plan
from jaxpp_flax.verify.__main__ import main as verify
from jaxpp_flax.verify.parting import main as bisect

SCRIPT = """
import sys

def number(**options):
    return 3

def needs(rate, **options):
    return rate

def fails(**options):
    return undefined

def refuses(**options):
    raise ValueError("no data here")

def ends(**options):
    sys.exit(1)

def pair(**options):
    return {}, 2
"""
COMMANDS = {
    "verify": lambda script: verify([script]),
    "plan choose": lambda script: plan(["choose", script]),
    "plan quote": lambda script: plan(["quote", script, "--hardware", "h100-sxm", "--devices", "8"]),
}
# For each: the function, a word of the last line, and whether the user's own lines are shown.
WRONG = {
    "a return value": ("train.py:number", "a batch, got int", False),
    "a pair of others": ("train.py:pair", "a batch, got (dict, int)", False),
    "arguments that nobody gives": ("train.py:needs", "rate", False),
    "no such function": ("train.py:other", "has no function 'other'", False),
    "no function": ("train.py", "such as train.py:make", False),
    "no such file": ("missing.py:make", "no such file", False),
    "no Python": ("text.py:make", "text.py is no Python file", False),
    "no script": ("text.txt:make", "such as train.py:make", False),
    "a file that ends": ("ends.py:make", "ended by itself, with the exit status 1", False),
    "a function that ends": ("train.py:ends", "ended by itself, with the exit status 1", False),
    "an error in the function": ("train.py:fails", "NameError: name 'undefined' is not defined", True),
    "a user's own refusal": ("train.py:refuses", "ValueError: no data here", True),
    "an error in the file": ("imports.py:make", "No module named 'nowhere_xyz'", True),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_file_function_or_return_value(
    command: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    files = {"train.py": SCRIPT, "text.py": "no python", "text.txt": "", "ends.py": "raise SystemExit(1)"}
    for name, text in {**files, "imports.py": "import nowhere_xyz"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    target, words, has_lines = WRONG[wrong]
    try:
        status = COMMANDS[command](target)
    except SystemExit as end:
        status = end.code
    shown = capsys.readouterr().err
    assert status == 2
    assert words in shown.splitlines()[-1]
    assert ("Traceback" in shown) == has_lines
    assert "jaxpp_flax/planning" not in shown


def test_runs_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bisect([str(tmp_path), str(tmp_path / "other")]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no directory {tmp_path / 'other'}.")
    assert bisect([str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: the runs have no checkpoint of the same step")


MANY = """
import optax
from jaxpp_flax import PipelineTrainer
from tests.trainers import models as m

def make(**options):
    trainer = PipelineTrainer(m.Layers(), optax.sgd(0.1), m.squared_error, num_stages=512, num_microbatches=2)
    return trainer, m.make_xy(4)
"""


@pytest.mark.parametrize("command", ["verify", "plan choose"])
def test_too_few_devices_are_named_without_a_traceback(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text(MANY)
    monkeypatch.chdir(tmp_path)
    assert COMMANDS[command]("train.py:make") == 2
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("error: 512 ranks (groups of devices) need at least as many devices")
    assert "XLA_FLAGS=--xla_force_host_platform_device_count=512 makes virtual devices" in first
    assert (second, third.partition(":")[0]) == ("  at train.py, line 7, in make", "JPF103")


@pytest.mark.parametrize(
    ("command", "option"),
    [("verify", "--report"), ("plan choose", "--save"), ("plan quote", "--save"), ("plan quote", "--json")],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "train.py").write_text("raise RuntimeError('the work has begun')")
    main = {"verify": verify, "plan choose": plan, "plan quote": plan}[command]
    words = [*command.split()[1:], f"{tmp_path}/train.py:make", option, f"{tmp_path}/no/x"]
    quoted = ["--hardware", "h100-sxm", "--devices", "8"] if command == "plan quote" else []
    assert main([*words, *quoted]) == 2
    shown = capsys.readouterr().err
    assert shown == f"error: {option} {tmp_path}/no/x: there is no directory {tmp_path}/no. Make it first.\n"


def test_outputs_that_are_no_file_or_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    check_output("--save", tmp_path / "plan.json")
    with pytest.raises(ValueError, match="this is a directory"):
        check_output("--save", tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match="you may not write there"):
        check_output("--save", tmp_path / "plan.json")


def test_an_error_of_the_system_is_told_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert exit_status(lambda: len((tmp_path / "none").read_text())) == 2
    assert exit_status(lambda: len(tmp_path.read_text())) == 2
    assert (
        capsys.readouterr().err == f"error: there is no file '{tmp_path}/none'.\nerror: '{tmp_path}': is a directory.\n"
    )


def test_an_error_that_is_no_users_shows_its_lines(capsys: pytest.CaptureFixture[str]):
    assert exit_status(lambda: {}["missing"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_the_command_of_the_module_ends_with_the_status(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["plan", "choose", "missing.py:make"])
    monkeypatch.delitem(sys.modules, "jaxpp_flax.planning.__main__")
    with pytest.raises(SystemExit, match="2"):
        runpy.run_module("jaxpp_flax.planning", run_name="__main__")


def test_a_missing_package_is_one_line(capsys: pytest.CaptureFixture[str]):
    def command() -> int:
        raise ModuleNotFoundError("libtpu is missing: pip install it.")

    assert exit_status(command) == 2
    assert capsys.readouterr().err == "error: libtpu is missing: pip install it.\n"
