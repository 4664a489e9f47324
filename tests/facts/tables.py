"""Facts about the names of JaxPP and of Shardy:MPMD, and the tables on the pages that are made of them.

`jaxpp.toml` and `mpmd.toml` have one entry for each public name of the peer. After a change to them, write the tables:

    python -m tests.facts.tables --write

Without `--write` the command fails if a page differs from its facts; `test_facts.py` compares both with the package.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERDICTS = {
    "same": "same",
    "differs": "differs",
    "refused": "refused",  # asking for it raises an error that says what to use
    "missing": "not here",
    "ours": "ours alone",
}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What is known of one name of the peer."""

    name: str
    verdict: str
    versions: str = ""  # "25.05-25.12", "26.05-", "25.10"; several with a comma
    parameters: str | None = None  # of the newest version: "x, /, axis=, *, name="; None for what is not called
    older: Mapping[str, str] = field(default_factory=dict)  # parameters of other versions
    note: str = ""  # how it differs; for "same", what is more here
    says: str = ""  # a part of the message of a refusal
    ours: str = ""  # the path of ours, if it is not the module's name of the same spelling; "{name}", "{attribute}"
    test: str = ""  # the test that proves it: "tests/api/test_api.py::test_x"

    @property
    def owner(self) -> str:
        """The class of a method or attribute; empty for a name of the module."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about one peer."""

    page: Path
    modules: tuple[str, ...]  # of ours: the one of the names without `ours`, and others whose names need an entry
    versions: tuple[str, ...]
    names: tuple[Fact, ...]


def read(file: str) -> Facts:
    """Read one file of facts. A key of several names, with ", " between them, stands for each of them."""
    found = tomllib.loads((HERE / file).read_text(encoding="utf-8"))
    names = [
        Fact(name=name, **_for_one(entry, name)) for key, entry in found["names"].items() for name in key.split(", ")
    ]
    versions, modules = tuple(found["versions"]), tuple(found["modules"])
    return Facts(page=ROOT / found["page"], modules=modules, versions=versions, names=tuple(names))


def _for_one(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    ours = entry.get("ours", "").format(name=name, attribute=name.rpartition(".")[2])
    return {**entry, "ours": ours}


def _code(fact: Fact) -> str:
    """The name; of a method without its class."""
    return f"`{fact.name.rpartition('.')[2] if fact.owner else fact.name}`"


def _when(versions: str) -> str:
    """Versions in words: "since 25.05", "25.05 to 25.12", "25.10"."""
    since = re.sub(r"(\S+)-(?=,|$)", r"since \1", versions)
    return re.sub(r"(\S+)-(\S+)", r"\1 to \2", since)


def _merged(found: Iterable[Fact]) -> list[list[Fact]]:
    """Facts that say the same of names of one kind, in the order of the first of each."""
    groups: dict[Any, list[Fact]] = {}
    for fact in found:
        groups.setdefault((fact.owner, fact.versions, fact.verdict, fact.note), []).append(fact)
    return list(groups.values())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _of_names(facts: Facts, found: Iterable[Fact], how: str) -> list[str]:
    """A line for names of which the same is to be said."""
    several = len(facts.versions) > 1
    return _table(
        ["name", *(["in"] if several else []), "ours", how],
        (
            [
                ", ".join(map(_code, group)),
                *([_when(group[0].versions)] if several else []),
                VERDICTS[group[0].verdict],
                group[0].note,
            ]
            for group in _merged(found)
        ),
    )


def tables(facts: Facts) -> dict[str, list[str]]:
    """The lines of each table, by the name in its marker; a table without a row is left out."""
    gone = [fact for fact in facts.names if fact.verdict in ("refused", "missing") and not fact.owner]
    own = [fact for fact in facts.names if fact.verdict == "ours"]
    rest = [fact for fact in facts.names if fact not in gone and fact not in own]
    methods = [replace(fact, versions="") for fact in rest if fact.owner]
    here = sorted((fact for fact in rest if not fact.owner), key=lambda fact: fact.verdict != "same")
    made = {
        "names": _of_names(facts, here, "how"),
        "absent": _of_names(facts, gone, "use, or why not"),
        "methods": _table(
            ["of", "names", "ours", "how"],
            (
                [f"`{group[0].owner}`", ", ".join(map(_code, group)), VERDICTS[group[0].verdict], group[0].note]
                for group in _merged(methods)
            ),
        ),
        "own": _table(["name", "meaning"], ([f"`{fact.name}`", fact.note] for fact in own)),
    }
    return {name: lines for name, lines in made.items() if len(lines) > 2}


def rewritten(facts: Facts, page: str) -> str:
    """The page with the tables of today.

    Raises:
      ValueError: if a table has no place on the page, or a place no table.
    """
    made = tables(facts)
    places = re.findall(r"<!-- facts: (\w+) -->", page)
    if sorted(places) != sorted(made):
        raise ValueError(f"{facts.page.name} has places for the tables {places}, but the facts make {list(made)}")
    for name, lines in made.items():
        place = re.compile(rf"(<!-- facts: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        page = place.sub(lambda match, lines=lines: f"{match[1]}{chr(10).join(lines)}\n{match[2]}", page)
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the pages")
    write = parser.parse_args(arguments).write
    stale = []
    for file in ("jaxpp.toml", "mpmd.toml"):
        facts = read(file)
        before = facts.page.read_text(encoding="utf-8")
        after = rewritten(facts, before)
        if write:
            facts.page.write_text(after, encoding="utf-8")
        elif before != after:
            stale.append(facts.page.name)
    if stale:
        print(f"{', '.join(stale)}: the tables differ from the facts; run `python -m tests.facts.tables --write`")
    return bool(stale)


if __name__ == "__main__":
    raise SystemExit(main())
