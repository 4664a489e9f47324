"""What benchmarks and examples import late, once a command runs, is there: most of them run only in the slow tier."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from tests.running import ROOT


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """The modules of this package that a file imports names from, and these names, at its top and in functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxpp_flax":
            yield from ((str(node.module), alias.name) for alias in node.names)


def exists(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    if hasattr(found, name):
        return True
    # A package may not have imported this module of its own yet.
    return hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None


def test_every_imported_name_exists():
    files = [file for folder in ("benchmarks", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    names = {(file.name, *pair) for file in files for pair in imported(file)}
    assert len(names) > 100
    assert not sorted(name for name in names if not exists(*name[1:]))
