"""The form of the code: what is short can be read. Each rule yields its faults, one text a fault."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.architecture.source import Function, Source

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # of code: docstrings, comments and blank lines are not counted
MAX_NESTING = 4
MAX_FOLDER_FILES = 12
NAMES_OF_NOTHING = {"found", "made", "known", "at", "of", "here", "there"}
PARTS_WITH_SPELT_NAMES = {"engine", "schedules", "tasks", "mpmd", "api"}

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match)


class Exceptions(NamedTuple):
    """What is above a limit today, with its figure: it may become smaller, and is then taken out, but never larger."""

    files: dict[str, int]
    functions: dict[str, int]
    nesting: dict[str, int]
    folders: dict[str, int]


NONE = Exceptions({}, {}, {}, {})

# Nothing is above a limit. Add nothing: cut the file, the function or the folder.
EXCEPTIONS = NONE


def files_are_short(sources: Sequence[Source], exceptions: Exceptions = EXCEPTIONS) -> Iterator[str]:
    lines = {source.name: len(source.text.splitlines()) for source in sources}
    return _above(lines, MAX_FILE_LINES, exceptions.files, "lines: one idea, one file")


def functions_are_short(sources: Sequence[Source], exceptions: Exceptions = EXCEPTIONS) -> Iterator[str]:
    def length(source: Source, function: Function) -> int:
        return len(source.code_lines.intersection(range(function.lineno, (function.end_lineno or 0) + 1)))

    lengths = {
        f"{source.name}: {name}": length(source, function) for source in sources for name, function in source.functions
    }
    return _above(lengths, MAX_FUNCTION_LINES, exceptions.functions, "lines of code: one step, one function")


def blocks_are_nested_little(sources: Sequence[Source], exceptions: Exceptions = EXCEPTIONS) -> Iterator[str]:
    depths = {f"{source.name}: {name}": _nesting(function) for source in sources for name, function in source.functions}
    return _above(depths, MAX_NESTING, exceptions.nesting, "blocks inside one another: return early, or cut")


def folders_are_small(sources: Sequence[Source], exceptions: Exceptions = EXCEPTIONS) -> Iterator[str]:
    files = Counter(source.folder for source in sources)
    return _above(files, MAX_FOLDER_FILES, exceptions.folders, "files: one folder, one chapter")


def names_say_what_they_hold(sources: Sequence[Source]) -> Iterator[str]:
    """A getter or a constructor may be called `of`."""
    for source in sources:
        for node in source.nodes if source.part in PARTS_WITH_SPELT_NAMES else ():
            if not isinstance(node, ast.Name | ast.arg):
                continue
            name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node.ctx, ast.Store) else ""
            if name.strip("_") in NAMES_OF_NOTHING:
                yield f"{source.at(node.lineno)}: {name} says only that there is something: name the thing"


def no_bare_assert(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Assert):
                yield f"{source.at(node.lineno)}: assert: raise an error that says what to change"


def _above(figures: dict[str, int], limit: int, exceptions: dict[str, int], what: str) -> Iterator[str]:
    """What is above the limit and no exception, above its exception's figure, or an exception without need."""
    for name, figure in figures.items():
        allowed = exceptions.get(name, limit)
        if figure > allowed:
            yield f"{name} has {figure} {what} (at most {allowed})"
    for name in exceptions:
        if figures.get(name, 0) <= limit:
            yield f"{name} is not above {limit} any more: take it out of EXCEPTIONS"


def _nesting(node: ast.AST, depth: int = 0) -> int:
    """How many blocks stand inside one another at most; a function or class inside another one begins anew."""
    deepest = depth
    for field, value in ast.iter_fields(node):
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        # `elif` is written as an `if` that is all of the `else`.
        chained = isinstance(node, ast.If) and field == "orelse" and len(children) == 1
        for child in children:
            if not isinstance(child, Function | ast.ClassDef):
                inner = isinstance(child, BLOCKS) and not (chained and isinstance(child, ast.If))
                deepest = max(deepest, _nesting(child, depth + inner))
    return deepest
