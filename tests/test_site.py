"""The documentation site, without building it: pages, links, figures, and the reference's completeness."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jaxpp_flax
from jaxpp_flax.engine.passes import PASSES
from jaxpp_flax.trainers import options
from tests.helpers import python_blocks
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


@pytest.mark.parametrize("page", [*PAGES, *OTHER_PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_word_rank_is_explained_where_a_page_first_uses_it(page: Path):
    """In MPI and PyTorch a rank is a process, and in JAX and LoRA another number."""
    of_others = {
        "comparison.md",
        "finetuning.md",
        "formats.md",
        "lora.md",
        "qlora.md",
    }  # torch's and Megatron's ranks; LoRA's
    _, _, text = page.read_text(encoding="utf-8").partition("\n")  # without the title
    first = re.search(r"\branks?\b", text)
    if first is not None and page.name not in of_others:
        around = text[max(0, first.start() - 150) : first.end() + 150]
        assert "devices" in around, f"{page}: say at {around!r} that a rank is a group of devices"


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


def test_the_pages_that_users_read_have_no_more_words_than_the_limit():
    """Counted as the command in CONTRIBUTING counts, code included: a page that tells more cuts elsewhere."""
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    ((folders, limit),) = re.findall(
        r"`find ((?:docs/\w+ )+)-name '\*\.md' \| xargs wc -w`\s+counts at most ([\d,]+):", contributing
    )
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    counted = sum(words[page] for folder in folders.split() for page in (ROOT / folder).rglob("*.md"))
    assert 0 < counted <= int(limit.replace(",", "")), f"{counted:,} words"


def test_no_line_of_code_is_cut_on_a_page():
    blocks = [
        (page.name, block) for page in PAGES for block in re.findall(r"```.*?\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    assert len(blocks) > 100
    too_long = [(name, line) for name, block in blocks for line in block.splitlines() if len(line) > 88]
    assert too_long == [], "a page shows 88 characters of a line"


def test_a_broken_link_is_found(tmp_path: Path):
    (tmp_path / "there.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text("[a](there.md#a-heading) [b](there.md#no) [c](gone.md) [d](#no) [e](https://example.org/no)\n")
    assert broken_links(page) == ["there.md#no", "gone.md", "#no"]


@pytest.mark.parametrize(
    ("page", "file", "beginning"),
    [
        ("start/first_training", "first_training", ""),
        ("guides/trainer", "model", "# model.py"),
        ("guides/linen", "linen_model", "# linen_model.py"),
    ],
)
def test_a_file_that_a_page_offers_is_what_the_page_shows(page: str, file: str, beginning: str):
    blocks = [block for block in python_blocks(DOCS / f"{page}.md") if block.startswith(beginning)]
    shown = "\n\n".join(block.removeprefix(beginning).strip() for block in blocks)
    offered = (DOCS / page).parent.joinpath(f"{file}.py").read_text(encoding="utf-8")
    assert offered.partition('"""\n\n')[2].strip() == shown
    assert f"]({file}.py)" in (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_the_table_of_passes_is_that_of_the_compiler():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| `\w+` \|$", (DOCS / "internals/engine.md").read_text(), re.MULTILINE)
    assert rows == [(each.name, each.ensures) for each in PASSES.rows]


def test_a_hop_of_the_trainers_walks_stands_in_its_file():
    hops = re.findall(r"`(\w+)(?:\.\w+)?`, `([\w/]+\.py)`(?: \||;)", (DOCS / "internals/trainer.md").read_text())
    assert len(hops) == 22
    for name, file in hops:
        text = (ROOT / "jaxpp_flax" / file).read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), f"{file} has no {name}"


def packages_with_names() -> list[str]:
    """The packages inside jaxpp_flax that say what they export."""
    found = [package.name for package in pkgutil.walk_packages(jaxpp_flax.__path__, "jaxpp_flax.") if package.ispkg]
    return ["jaxpp_flax", *(name for name in found if hasattr(importlib.import_module(name), "__all__"))]


def imports(text: str) -> set[tuple[str, str]]:
    """The pairs (module, name) that programs on a page import from this package; "" for a module itself."""
    found = set()
    for module, several, one_line in re.findall(r"\bfrom (jaxpp_flax[.\w]*) import (?:\(([^)]*)\)|([\w, ]+))", text):
        found |= {(module, name) for name in re.findall(r"(\w+)(?: as \w+)?", several or one_line)}
    for module in re.findall(r"^\W*import (jaxpp_flax[.\w]*)", text, re.MULTILINE):
        found.add((module, ""))
    return found


def is_described(module: str, name: str, modules: tuple[str, ...]) -> bool:
    """Whether the reference has this name of the module, or the module itself, as a page or as another page's name."""
    if module in modules and (not name or name in importlib.import_module(module).__all__):
        return True
    above, _, last = f"{module}.{name}".rstrip(".").rpartition(".")
    return f"{above}.{last}" in modules or (above in modules and last in importlib.import_module(above).__all__)


# Their users are the package and `docs/figures.py`.
INTERNAL = ("jaxpp_flax.engine.", "jaxpp_flax.schedules.tools.")


def test_each_cell_of_the_comparison_has_a_source():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    sources = set(re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == sources
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [^|]", line)]
    cells = [cell for _, *row in rows for cell in row]
    assert len(cells) > 60
    assert [cell for cell in cells if not re.search(r"\]\(|\]\[|`python -m|not looked up", cell)] == []


def test_the_reference_has_every_name_that_a_public_package_exports(public_names: ModuleType):
    shown = set()
    for page in (DOCS / "reference").glob("*.md"):
        shown |= set(re.findall(r"\.\. public-names:: (\S+)", page.read_text(encoding="utf-8")))
    assert shown == set(public_names.MODULES)
    missing = []
    for package in packages_with_names():
        if not package.startswith(INTERNAL):
            names = importlib.import_module(package).__all__
            missing += [f"{package}.{n}" for n in names if public_names.home(package, n) not in public_names.MODULES]
    assert missing == []


# A contributor's example adds to the inside of the package.
@pytest.mark.parametrize(
    "page",
    [page for page in (*PAGES, *OTHER_PAGES) if page.name != "CONTRIBUTING.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_name_that_a_page_imports_is_in_the_reference(page: Path, public_names: ModuleType):
    found = imports(page.read_text(encoding="utf-8"))
    assert [pair for pair in sorted(found) if not is_described(*pair, public_names.MODULES)] == []


def test_an_imported_name_without_an_entry_is_found(public_names: ModuleType):
    text = """
from jaxpp_flax.trainers import Logging, Gone
from jaxpp_flax.trainers.loop import training_loop
from jaxpp_flax.trainers.callbacks import (
    Profile,
    MeasuredStep,
)
from jaxpp_flax import mpmd
import jaxpp_flax.linen as pipeline
+import jaxpp_flax.engine.jit
"""
    bare = {pair for pair in imports(text) if not is_described(*pair, public_names.MODULES)}
    assert bare == {
        ("jaxpp_flax.trainers", "Gone"),
        ("jaxpp_flax.trainers.loop", "training_loop"),
        ("jaxpp_flax.trainers.callbacks", "MeasuredStep"),
        ("jaxpp_flax.engine.jit", ""),
    }


def test_the_types_of_options_are_public(public_names: ModuleType):
    bare = set()
    for name in options.__all__:
        option = getattr(options, name)
        for word in re.findall(r"\w+", " ".join(map(str, option.__annotations__.values()))):
            value = getattr(sys.modules[option.__module__], word, None)
            ours = inspect.isclass(value) and value.__module__.startswith("jaxpp_flax.")
            if ours and public_names.home(value.__module__, word) not in public_names.MODULES:
                bare.add(f"{name}: {value.__module__}.{word}")
    assert bare == set()


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


def test_every_drawing_is_on_a_page():
    shown = {name for page in PAGES for name in re.findall(r"images/(\w+\.svg)\)", page.read_text(encoding="utf-8"))}
    assert shown == {path.name for path in (DOCS / "images").iterdir()}


def test_read_the_docs_installs_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "docs" in extras
    assert "extra_requirements: [docs]" in (ROOT / ".readthedocs.yaml").read_text()
    assert "fail_on_warning: true" in (ROOT / ".readthedocs.yaml").read_text()
