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

from jaxpp_flax.api.missing import REMEDIES
from tests.facts.tables import VERDICTS, Fact, Facts, main, read, rewritten

PEERS = {"jaxpp": read("jaxpp.toml"), "mpmd": read("mpmd.toml")}
ALL = [(facts, fact) for facts in PEERS.values() for fact in facts.names]
each_fact = pytest.mark.parametrize(
    ("facts", "fact"), [pytest.param(*found, id=f"{found[0].page.stem}: {found[1].name}") for found in ALL]
)
ROOT = Path(__file__).parents[2]


def path_of(facts: Facts, fact: Fact) -> str:
    return fact.ours or f"{facts.module}.{fact.name}"


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


# What JaxPP's classes are called here.
CLASSES = {"TraceableFunction": "MpmdFunction", "GlobalMpmdFunction": "Compiled"}


def renamed(path: str) -> str:
    return ".".join(CLASSES.get(part, part) for part in path.split("."))


def unbound(function: Any, parameters: str, *, method: bool = False) -> set[str]:
    """The peer's parameters that ours does not take by the same position and name, and those that only ours needs.

    Args:
      parameters: as in `Fact`: "=" where one may be left out, "*" before those that are given by name alone.
      method: leave the first parameter of ours out.
    """
    ours = list(inspect.signature(function).parameters.values())[method:]
    by_name = {p.name: p for p in ours}
    positions = [p.name for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names, wrong, by_keyword = set(), set(), False
    for position, item in enumerate(filter(None, parameters.split(", "))):
        name, optional = item.strip("*="), item.endswith("=")
        by_keyword |= item == "*"
        if item == "*":
            continue
        names.add(name)
        mine = by_name.get(name)
        if item.startswith("*"):
            kind = inspect.Parameter.VAR_KEYWORD if item.startswith("**") else inspect.Parameter.VAR_POSITIONAL
            fits = any(p.kind is kind for p in ours)
        else:
            fits = (
                mine is not None
                and mine.kind not in (mine.POSITIONAL_ONLY, mine.VAR_POSITIONAL, mine.VAR_KEYWORD)
                and not (optional and mine.default is mine.empty)
                and (by_keyword or positions[position : position + 1] == [name])
            )
        if not fits:
            wrong.add(name)
    needed = {p.name for p in ours if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    by_position = positions[: len(parameters.partition("*")[0].split(", "))] if parameters else []
    return wrong | (needed - names - set(by_position))


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
        "no part of the refusal's message": bool(fact.says) != (fact.verdict in ("refused", "type")),
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
    assert missing_in(PEERS["mpmd"], Fact(name="f", verdict="type", note="n")) == "no part of the refusal's message"


@each_fact
def test_the_package_does_as_the_fact_says(facts: Facts, fact: Fact):
    path = renamed(path_of(facts, fact))
    if fact.verdict == "refused":
        with pytest.raises(AttributeError, match=re.escape(fact.says)):
            getattr(import_module(facts.module), fact.name)
        return
    if fact.verdict == "missing":
        with pytest.raises(AttributeError):
            pytest.fail(f"{path} is here now, as {found_at(path)!r}: give it another verdict")
        return
    ours = found_at(path)
    if fact.verdict == "type":
        assert isinstance(ours, type)
        with pytest.raises(NotImplementedError, match=re.escape(fact.says)):
            ours()
    for name in fact.holds.split():
        assert hasattr(ours, name), name
    if fact.verdict in ("same", "differs") and fact.parameters is not None:
        method = bool(fact.owner) and inspect.isfunction(ours)
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
    assert set(import_module(facts.module).__all__) <= set(names)
    if peer == "jaxpp":
        assert {fact.name for fact in facts.names if fact.verdict == "refused"} == set(REMEDIES)


@pytest.mark.parametrize("peer", PEERS)
def test_the_page_shows_the_facts(peer: str):
    page = PEERS[peer].page.read_text(encoding="utf-8")
    assert rewritten(PEERS[peer], page) == page, "run `python -m tests.facts.tables --write`"
    with pytest.raises(ValueError, match=r"has places for the tables \['names'.*\], but the facts make"):
        rewritten(PEERS[peer], page.replace("<!-- facts: own -->", ""))
    assert rewritten(PEERS[peer], page.replace("| same |", "| ? |")) == page


def test_the_command_tells_a_page_that_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    written = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: written(self, encoding).replace("| same |", "| ? |"))
    assert main([]) == 1
    assert "jaxpp.md, mpmd.md: the tables differ from the facts; run" in capsys.readouterr().out
