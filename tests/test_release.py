"""What a release states in several files is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_one():
    citation = (ROOT / "CITATION.cff").read_text()
    [newest, *_] = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert re.findall(r"^version: (.+)$", citation, flags=re.MULTILINE) == [PROJECT["version"]]
    assert newest == PROJECT["version"]


def test_dockerfiles_copy_what_exists_and_install_extras_that_exist():
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        text = path.read_text()
        copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE) for name in line.split()]
        assert copied
        assert [name for name in copied if not (ROOT / name).exists()] == []
        assert set(re.findall(r"EXTRA=(\w+)", text)) <= PROJECT["optional-dependencies"].keys()


def test_the_source_distribution_needs_no_file_that_git_ignores():
    assert all((ROOT / name).is_file() for name in (PROJECT["readme"], *PROJECT["license-files"]))
