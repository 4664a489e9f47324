"""What a release states in several files is the same in all of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAPER = "2412.14374"  # JaxPP's, whose design this project follows
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_one():
    citation = (ROOT / "CITATION.cff").read_text()
    [newest, *_] = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert re.findall(r"^version: (.+)$", citation, flags=re.MULTILINE) == [PROJECT["version"]]
    assert newest == PROJECT["version"]


def test_the_date_is_one():
    citation, changelog = (ROOT / "CITATION.cff").read_text(), (ROOT / "CHANGELOG.md").read_text()
    [released] = re.findall(r"^date-released: (\d{4}-\d{2}-\d{2})$", citation, flags=re.MULTILINE)
    assert re.findall(rf"^## \[{re.escape(PROJECT['version'])}\] - (.+)$", changelog, flags=re.MULTILINE) == [released]


def test_the_authors_of_the_paper_are_named_wherever_it_is_cited():
    citing = [path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if PAPER in path.read_text()]
    assert ROOT / "README.md" in citing
    citation = (ROOT / "CITATION.cff").read_text()
    families = re.findall(r"family-names: (\w+)", citation.partition(PAPER)[2])
    assert families == ["Xhebraj", "Lee", "Chen", "Grover"]
    for path in citing:
        [cited, *_] = re.findall(rf"\[([^\]]+)\]\([^)]*{re.escape(PAPER)}\)", path.read_text())
        assert [name for name in families if name not in cited] == [], path
    for path in (ROOT / "jaxpp_flax").rglob("*.py"):
        assert "Xhebraj" not in (text := path.read_text()) or "Xhebraj, Lee, Chen and Grover" in text, path


def test_dockerfiles_copy_what_exists_and_install_extras_that_exist():
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        text = path.read_text()
        copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE) for name in line.split()]
        assert copied
        assert [name for name in copied if not (ROOT / name).exists()] == []
        assert set(re.findall(r"EXTRA=(\w+)", text)) <= PROJECT["optional-dependencies"].keys()


def test_the_source_distribution_needs_no_file_that_git_ignores():
    assert all((ROOT / name).is_file() for name in (PROJECT["readme"], *PROJECT["license-files"]))
