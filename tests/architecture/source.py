"""One file of the package as the rules see it: parsed once, whatever the number of rules."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

NAME = "jaxpp_flax"
PACKAGE = Path(__file__).resolve().parents[2] / NAME

Function = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A file: its path inside the package, as in `engine/jit.py`, and its text."""

    name: str
    text: str

    @property
    def folder(self) -> str:
        """The folder inside the package; nothing for files at the top."""
        return self.name.rpartition("/")[0]

    @property
    def part(self) -> str:
        """The part of the package that the file belongs to: a folder, or a module at the top."""
        return self.name.split("/")[0].removesuffix(".py")

    @property
    def module(self) -> str:
        """The dotted name by which others import the file."""
        return f"{NAME}.{self.name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")

    def at(self, line: int) -> str:
        """The place of a fault, as editors find it."""
        return f"{NAME}/{self.name}:{line}"

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, filename=self.name)))

    @cached_property
    def imports(self) -> list[tuple[str, int]]:
        """Dotted names of everything the file imports anywhere, with lines; relative imports made absolute."""
        package = (NAME, *self.name.split("/")[:-1])
        found: list[tuple[str, int]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join([*origin, *([node.module] if node.module else [])])
                found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        return found

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        """Every function with its qualified name, as in `PipelineTrainer.fit`."""

        def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, Function | ast.ClassDef):
                    name = f"{prefix}{child.name}"
                    if isinstance(child, Function):
                        yield name, child
                    yield from below(child, f"{name}.")
                else:
                    yield from below(child, prefix)

        return list(below(self.nodes[0], ""))

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """The numbers of the lines that hold code: neither blank, nor a comment, nor part of a docstring."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.nodes:
            if isinstance(node, Function | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False):
                docstring = node.body[0]
                lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        return frozenset(lines)


@functools.cache
def package_sources() -> tuple[Source, ...]:
    """All files of the package; what rules derive from them is kept for the next rule."""
    return tuple(
        Source(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    )
