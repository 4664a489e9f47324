"""The documentation site, without building it: pages, links, figures, and the reference's completeness."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jaxpp_flax
from tests.running import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHER_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]


@pytest.fixture(scope="module")
def public_names() -> Iterator[ModuleType]:
    """The extension that writes the reference, with a stand-in for Sphinx where that is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        names = (
            "docutils",
            "sphinx",
            "sphinx.application",
            "sphinx.environment",
            "sphinx.util",
            "sphinx.util.docutils",
        )
        for name in names:
            stand_in = ModuleType(name)
            stand_in.__getattr__ = lambda name: type(name, (), {"getLogger": None})  # type: ignore[method-assign]
            patch.setitem(sys.modules, name, stand_in)
        sys.modules["sphinx.util"].logging = __import__("logging")  # type: ignore[attr-defined]
        patch.syspath_prepend(str(DOCS))
        module = importlib.import_module("_extensions.public_names")
        yield module
        for name in ("_extensions.public_names", "_extensions"):
            patch.delitem(sys.modules, name, raising=False)


def pages_under(page: Path) -> set[Path]:
    """The page and the pages in its tables of contents, at any depth."""
    found = {page}
    for table in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in table.splitlines():
            if line and not line.startswith(":"):
                pages = set(page.parent.glob(f"{line}.md")) - {page}
                assert pages, f"{page}: {line}"
                for each in pages:
                    found |= pages_under(each)
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of the page's headings, as GitHub and MyST make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))
    return named | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links to places inside the repository that do not exist."""
    broken = []
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    ):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        place = Path(os.path.normpath(page.parent / name)) if name else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            broken.append(target)
    return broken


def test_every_page_is_in_the_table_of_contents():
    assert pages_under(DOCS / "index.md") == set(PAGES)


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository(page: Path):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading) [b](there.md#no) [c](gone.md) [d](#no) [e](https://example.org/no)\n")
    assert broken_links(page) == ["there.md#no", "gone.md", "#no"]


def test_the_reference_has_a_page_for_every_public_module(public_names: ModuleType):
    modules = {"jaxpp_flax"}
    for name in (*jaxpp_flax._PACKAGES, "mpmd", "linen", "launch", "processes"):
        if hasattr(importlib.import_module(f"jaxpp_flax.{name}"), "__all__"):
            modules.add(f"jaxpp_flax.{name}")
    shown = set()
    for page in (DOCS / "reference").glob("*.md"):
        shown |= set(re.findall(r"\.\. public-names:: (\S+)", page.read_text(encoding="utf-8")))
    assert shown == modules == set(public_names.MODULES)


def test_every_public_name_has_an_entry_and_a_text(public_names: ModuleType):
    bare = []
    for module in public_names.MODULES:
        for name in public_names.public_names(module):
            entry = "\n".join(public_names.directive(module, name))
            value = getattr(importlib.import_module(module), name)
            if ":: " not in entry and ":py:" not in entry:
                bare.append(f"{module}.{name}")
            if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
                bare.append(f"{module}.{name}")
    assert bare == []


def test_the_drawings_are_those_of_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(DOCS))
    figures = importlib.import_module("figures")
    monkeypatch.delitem(sys.modules, "figures")
    assert figures.main(["--check"]) == 0
    assert {path.name for path in figures.IMAGES.iterdir()} == {f"{draw.__name__}.svg" for draw in figures.FIGURES}
    monkeypatch.setattr(figures, "IMAGES", DOCS)
    assert figures.main(["--check"]) == len(figures.FIGURES)
    assert "bubble.svg" in capsys.readouterr().out


def test_read_the_docs_installs_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "docs" in extras
    assert "extra_requirements: [docs]" in (ROOT / ".readthedocs.yaml").read_text()
    assert "fail_on_warning: true" in (ROOT / ".readthedocs.yaml").read_text()
