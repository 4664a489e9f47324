"""The facts about the peers' names are true of this package, and the pages show them."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jaxpp_flax import mpmd
from jaxpp_flax.api import missing as missing_of_jaxpp
from tests.facts.tables import VERDICTS, Fact, Facts, main, read, rewritten, tables

PEERS = {"jaxpp": read("jaxpp.toml"), "mpmd": read("mpmd.toml")}
ALL = [(facts, fact) for facts in PEERS.values() for fact in facts.names]
each_fact = pytest.mark.parametrize(
    ("facts", "fact"), [pytest.param(*found, id=f"{found[0].page.stem}: {found[1].name}") for found in ALL]
)
ROOT = Path(__file__).parents[2]


def path_of(facts: Facts, fact: Fact) -> str:
    return fact.ours or f"{facts.modules[0]}.{fact.name}"


def found_at(path: str) -> Any:
    """The module, or the attribute of one, at a path; of a class without the attribute, the type of its field.

    Raises:
      AttributeError: if there is none.
    """
    found, so_far = None, ""
    for part in path.split("."):
        so_far = f"{so_far}.{part}" if so_far else part
        fields = fields_of(found)
        if part in fields:
            found = fields[part]
        elif hasattr(found, part):
            found = getattr(found, part)
        else:
            try:
                found = import_module(so_far)
            except ModuleNotFoundError as error:
                raise AttributeError(f"there is no {so_far}") from error
    return found


def fields_of(owner: Any) -> dict[str, Any]:
    """The annotated fields of a class, also those of the classes above it; an object has them without a default."""
    classes = reversed(owner.__mro__) if isinstance(owner, type) else ()
    return {name: kind for one in classes for name, kind in inspect.get_annotations(one).items()}


P = inspect.Parameter
POSITIONAL = (P.POSITIONAL_ONLY, P.POSITIONAL_OR_KEYWORD)
NAMED = (P.POSITIONAL_OR_KEYWORD, P.KEYWORD_ONLY)


def unbound(function: Any, parameters: str, *, method: bool = False) -> set[str]:
    """The peer's parameters that ours does not take by the same position and name, and those that only ours needs.

    Args:
      parameters: as in `Fact`.
      method: leave the first parameter of ours out.
    """
    made = eval(f"lambda {parameters.replace('=', '=None')}: None")
    peer = list(inspect.signature(made).parameters.values())
    ours = list(inspect.signature(function).parameters.values())[method:]
    wrong = {wanted.name for position, wanted in enumerate(peer) if not takes(ours, position, wanted)}
    by_position = {p.name for p in ours[: sum(p.kind in POSITIONAL for p in peer)]}
    needed = {p.name for p in ours if p.default is p.empty and p.kind in (*POSITIONAL, *NAMED)}
    return wrong | (needed - {p.name for p in peer} - by_position)


def takes(ours: list[inspect.Parameter], position: int, wanted: inspect.Parameter) -> bool:
    """Whether a parameter may be given in all ways in which the peer's may, and left out if that may."""
    if wanted.kind not in (*POSITIONAL, *NAMED):
        return any(p.kind is wanted.kind for p in ours)
    there = [p for p in ours[position : position + 1] if p.kind in POSITIONAL]
    named = [p for p in ours if p.name == wanted.name and p.kind in NAMED]
    found = {P.POSITIONAL_ONLY: there, P.KEYWORD_ONLY: named}.get(wanted.kind, named if there == named else [])
    return any(wanted.default is P.empty or p.default is not P.empty for p in found)


@pytest.mark.parametrize(
    ("parameters", "wrong"),
    [
        ("a, b, c=", set()),
        ("a, b, *, c=, d=", set()),
        ("a, b=, c=", {"b"}),  # ours needs b
        ("b, a, c=", {"a", "b"}),
        ("a, b, d=", {"d"}),  # ours takes d by name alone
        ("a, b, c, e", {"e"}),
        ("a", {"b"}),
        ("a, b, *args", {"args"}),
        ("a, x, c=", {"x"}),  # ours calls it b
        ("x, y, /, c=", set()),
        ("x, y=, /, c=", {"y"}),
    ],
)
def test_what_does_not_bind_is_found(parameters: str, wrong: set[str]):
    def ours(a: int, b: int, c: int = 0, *, d: int = 0) -> None:
        del a, b, c, d

    assert unbound(ours, parameters) == wrong


def missing_in(facts: Facts, fact: Fact) -> str:
    """What an entry lacks; empty where it is complete."""
    named = [part for text in (fact.versions, *fact.older) for part in re.split(r", |-", text) if part]
    wrong = {
        "an unknown verdict": fact.verdict not in VERDICTS,
        "no note that says how it differs, what to use, or why it is not here": not fact.note
        and fact.verdict != "same",
        "no part of the refusal's message": bool(fact.says) != (fact.verdict == "refused"),
        "no test that proves it": fact.verdict in ("same", "differs") and not fact.test,
        f"unknown versions {named}": not set(named) <= set(facts.versions),
        "no versions": not named and len(facts.versions) > 1 and fact.verdict != "ours",
        f"no such test {fact.test}": bool(fact.test) and not exists(fact.test),
    }
    return ", ".join(what for what, found in wrong.items() if found)


def test_entries_are_complete():
    found = {fact.name: missing_in(facts, fact) for facts, fact in ALL}
    assert {name: lacks for name, lacks in found.items() if lacks} == {}


def test_what_an_entry_lacks_is_found():
    empty = Fact(name="f", verdict="sane", versions="25.04, 24.01-", test="tests/api/test_api.py::test_no_such")
    assert missing_in(PEERS["jaxpp"], empty) == (
        "an unknown verdict, no note that says how it differs, what to use, or why it is not here, "
        "unknown versions ['25.04', '24.01'], no such test tests/api/test_api.py::test_no_such"
    )
    assert missing_in(PEERS["jaxpp"], Fact(name="f", verdict="same")) == "no test that proves it, no versions"
    assert missing_in(PEERS["mpmd"], Fact(name="f", verdict="refused", note="n")) == "no part of the refusal's message"


@each_fact
def test_the_package_does_as_the_fact_says(facts: Facts, fact: Fact):
    path = path_of(facts, fact)
    if fact.verdict == "refused":
        module, _, attribute = path.rpartition(".") if fact.ours else (facts.modules[0], "", fact.name)
        with pytest.raises(AttributeError, match=re.escape(fact.says)):
            getattr(import_module(module), attribute)
        return
    if fact.verdict == "missing":
        with pytest.raises(AttributeError):
            pytest.fail(f"{path} is here now, as {found_at(path)!r}: give it another verdict")
        return
    ours = found_at(path)
    if fact.verdict in ("same", "differs") and fact.parameters is not None:
        method = inspect.isfunction(ours) and isinstance(found_at(path.rpartition(".")[0]), type)
        wrong = {
            name for text in (fact.parameters, *fact.older.values()) for name in unbound(ours, text, method=method)
        }
        explained = set(re.findall(r"`(\w+)`", fact.note)) if fact.verdict == "differs" else set()
        assert wrong <= explained, "parameters that differ are named in the note, in backticks"


def exists(test: str) -> bool:
    """Whether the test is defined, in its file and its class."""
    file, *names = test.split("::")
    return (ROOT / file).exists() and tuple(names) in cases_in(file)


@cache
def cases_in(file: str) -> set[tuple[str, ...]]:
    """The tests of a file: their names, with that of their class before it."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    classes = [((node.name,), node) for node in tree.body if isinstance(node, ast.ClassDef)]
    return {
        (*owner, node.name)
        for owner, place in [((), tree), *classes]
        for node in place.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("peer", PEERS)
def test_every_public_name_of_ours_has_a_fact(peer: str):
    facts = PEERS[peer]
    names = [fact.name for fact in facts.names]
    assert len(names) == len(set(names))
    paths = {path_of(facts, fact) for fact in facts.names}
    ours = {f"{module}.{name}" for module in facts.modules for name in import_module(module).__all__}
    assert ours - paths == set(), "give each an entry in tests/facts"
    refused = {fact.name for fact in facts.names if fact.verdict == "refused" and not fact.ours}
    if peer == "jaxpp":
        assert refused == missing_of_jaxpp.REMEDIES.keys()
    else:  # some were ours alone
        assert refused < mpmd._REMEDIES.keys()


@pytest.mark.parametrize("peer", PEERS)
def test_the_page_shows_the_facts(peer: str):
    page = PEERS[peer].page.read_text(encoding="utf-8")
    assert rewritten(PEERS[peer], page) == page, "run `python -m tests.facts.tables --write`"
    with pytest.raises(ValueError, match=r"has places for the tables \['names'.*\], but the facts make"):
        rewritten(PEERS[peer], page.replace("<!-- facts: own -->", ""))
    assert rewritten(PEERS[peer], page.replace("| same |", "| ? |")) == page


def test_tables_join_names_of_which_the_same_is_to_be_said():
    says = {"verdict": "differs", "versions": "1-", "note": "how"}
    names = [
        Fact(name="one", **says),
        Fact(name="two", verdict="same", versions="1-2, 4"),
        Fact(name="three", **says),
        Fact(name="two.method", verdict="missing", versions="2", note="why"),
    ]
    made = tables(Facts(page=ROOT / "page.md", modules=("ours",), versions=("1", "2", "4"), names=tuple(names)))
    assert made == {
        "names": [
            "| name | in | ours | how |",
            "| --- | --- | --- | --- |",
            "| `two` | 1 to 2, 4 | same |  |",
            "| `one`, `three` | since 1 | differs | how |",
        ],
        "methods": [
            "| of | names | ours | how |",
            "| --- | --- | --- | --- |",
            "| `two` | `method` | not here | why |",
        ],
    }


def test_the_command_tells_a_page_that_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    written = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: written(self, encoding).replace("| same |", "| ? |"))
    assert main([]) == 1
    assert "jaxpp_names.md, shardy_mpmd_names.md: the tables differ from the facts; run" in capsys.readouterr().out
