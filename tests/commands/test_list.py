"""The list of commands, and the errors that one of them explains without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxpp_flax.__main__ import COMMANDS, main
from jaxpp_flax.commands import explain
from tests.running import run_python

ROOT = Path(__file__).parents[2]


def test_each_module_that_is_a_command_is_listed():
    package = ROOT / "jaxpp_flax"
    folders = {path.parent.name.replace("planning", "plan") for path in package.glob("*/__main__.py")}
    files = [*package.glob("[!_]*.py"), *package.glob("commands/*.py")]
    assert folders | {path.stem for path in files if '__name__ == "__main__"' in path.read_text()} == set(COMMANDS)


def test_the_list_and_an_unknown_command(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == list(COMMANDS)
    assert main(["doktor"]) == 2
    assert "there is no command 'doktor'. Did you mean 'doctor'?" in capsys.readouterr().err


def test_a_command_runs_with_its_arguments_and_status():
    shown = run_python("-m", "jaxpp_flax", "schedules", "show", "gpipe", "--ranks", "2", "--microbatches", "2").stdout
    assert shown.startswith("gpipe: makespan 9")


def test_the_entry_of_each_error_is_shown_whole(capsys: pytest.CaptureFixture[str]):
    page = (ROOT / "docs" / "troubleshooting" / "errors.md").read_text()
    codes = re.findall(r"^### (JPF\d+ \w+)$", page, flags=re.MULTILINE)
    assert explain.main([]) == 0
    assert capsys.readouterr().out.splitlines() == codes
    # Together they are all of the page but its headings of groups, its labels and what stands before the first.
    whole = page[page.index("(jpf") :]
    rest = re.sub(r"^(## .*|\(jpf\d+\)=)$", "", whole, flags=re.MULTILINE)
    assert " ".join(explain.entries().values()).split() == rest.split()


def test_an_entry_is_text_without_addresses(capsys: pytest.CaptureFixture[str]):
    assert explain.main(["jpf102"]) == 0
    shown = capsys.readouterr().out
    assert "JPF102 LossError" in shown
    assert "the loss rule" in shown
    assert ".md" not in shown
    assert explain.main(["LossError"]) == 0
    assert capsys.readouterr().out == shown
    with pytest.raises(SystemExit, match="2"):
        explain.main(["JPF999"])
    assert "there is no error 'JPF999'" in capsys.readouterr().err
