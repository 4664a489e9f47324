"""The folder tree is the architecture: what may import what, read from the source text alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jaxpp_flax"
MAX_LINES = 500

# Each part of the package with the parts below it that it may import. A part that is not listed fails the test.
MAY_IMPORT = {
    "schedules": set(),
    "engine": {"schedules"},
    "layers": {"engine", "schedules"},
    "linen": {"layers", "engine"},
    "mpmd": {"engine", "schedules"},
    "checkpoint": {"engine"},
    "trainers": {"layers", "checkpoint", "schedules", "engine"},
    "launch": {"engine", "schedules"},
    "doctor": {"launch", "engine", "schedules"},
    "api": {"engine", "schedules"},
    "__init__": {"trainers", "layers", "checkpoint", "schedules", "engine"},
}
# The engine knows what a task and a schedule are and in which orders tasks may run, but no particular schedule.
ENGINE_MAY_USE_OF_SCHEDULES = {"task", "schedule", "errors", "order", "validate"}
FORBIDDEN_LIBRARIES = {
    "schedules": {"jax", "jaxlib", "flax", "optax", "orbax"},
    "engine": {"flax", "optax", "orbax"},
    "mpmd": {"flax", "optax", "orbax"},
}
# Imported when it is first used, so that the rest of its part needs no Flax.
MAY_IMPORT_FLAX = {"mpmd/flax.py"}
UNPICKLING = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing")
PRIVATE_JAX = ("jax._src", "jaxlib")
ONLY_FILE_WITH_PRIVATE_JAX = "engine/_compat.py"

FILES = sorted(PACKAGE.rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: a folder, or a module at the top."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Dotted names of everything a file imports anywhere in it, with lines; relative imports made absolute."""
    package = (PACKAGE.name, *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*origin, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def matches(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def defining_modules() -> dict[str, str]:
    """Which module of `schedules` defines each name that the package re-exports."""
    init = PACKAGE / "schedules" / "__init__.py"
    return {
        alias.asname or alias.name: node.module.removeprefix("jaxpp_flax.schedules.")
        for node in ast.walk(parse(init))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def test_the_package_is_found():
    assert FILES, f"no Python files under {PACKAGE}"


@every_file
def test_arrows_point_down(path: Path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} has no place in the architecture: add it to MAY_IMPORT with what it may import"
    allowed = MAY_IMPORT[part] | {part}
    for name, line in imports(path, parse(path)):
        root, _, rest = name.partition(".")
        if root != PACKAGE.name:
            continue
        target = rest.partition(".")[0]
        if (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").exists():
            assert target in allowed, f"{path}:{line}: {part} may import {sorted(allowed)} of this package, not {name}"


@every_file
def test_the_engine_knows_no_particular_schedule(path: Path):
    if part_of(path) != "engine":
        pytest.skip("not part of the engine")
    for name, line in imports(path, parse(path)):
        root, *rest = name.split(".")
        if root != PACKAGE.name or rest[:1] != ["schedules"] or len(rest) < 2:
            continue
        module = rest[1] if (PACKAGE / "schedules" / f"{rest[1]}.py").exists() else defining_modules().get(rest[1])
        # A name such as `validate` may be both a module and a function: both stand in the same module then.
        assert module in ENGINE_MAY_USE_OF_SCHEDULES, (
            f"{path}:{line}: the engine may use {sorted(ENGINE_MAY_USE_OF_SCHEDULES)} of schedules, not {name}"
        )


@every_file
def test_libraries_that_a_part_must_not_know(path: Path):
    allowed = {"flax"} if path.relative_to(PACKAGE).as_posix() in MAY_IMPORT_FLAX else set()
    for name, line in imports(path, parse(path)):
        for library in FORBIDDEN_LIBRARIES.get(part_of(path), set()) - allowed:
            assert not matches(name, library), f"{path}:{line}: {part_of(path)} must not import {library}"


@every_file
def test_private_jax_is_touched_in_one_file(path: Path):
    if path.relative_to(PACKAGE).as_posix() == ONLY_FILE_WITH_PRIVATE_JAX:
        pytest.skip("the file for it")
    tree = parse(path)
    for name, line in imports(path, tree):
        assert not any(matches(name, private) for private in PRIVATE_JAX), (
            f"{path}:{line}: {name} belongs in {ONLY_FILE_WITH_PRIVATE_JAX}"
        )
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node.value) == "jax"
        assert not private, f"{path}:{getattr(node, 'lineno', 0)}: jax._src belongs in {ONLY_FILE_WITH_PRIVATE_JAX}"


@every_file
def test_nothing_is_unpickled(path: Path):
    """What comes over the network, or lies in a checkpoint, may be anybody's."""
    tree = parse(path)
    for name, line in imports(path, tree):
        assert not any(matches(name, library) for library in UNPICKLING), f"{path}:{line}: {name} runs what it reads"
    for node in ast.walk(tree):
        allowed = isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
        assert not allowed, f"{path}:{getattr(node, 'lineno', 0)}: allow_pickle runs what it reads"


@every_file
def test_no_bare_assert(path: Path):
    lines = [node.lineno for node in ast.walk(parse(path)) if isinstance(node, ast.Assert)]
    assert not lines, f"{path}: assert on lines {lines}: raise an error that says what to change"


@every_file
def test_files_are_short(path: Path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines: one idea, one file (at most {MAX_LINES})"
