"""The folder tree is the architecture: what may import what, read from the source text alone."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "jaxpp_flax"
MAX_LINES = 500

# Each part of the package with the parts below it that it may import. A part that is not listed fails the test.
MAY_IMPORT = {
    "_compat": set(),
    "schedules": set(),
    "processes": {"_compat"},
    "engine": {"schedules", "processes", "_compat"},
    "layers": {"engine"},
    "assignment": {"engine", "schedules"},
    "linen": {"layers", "engine"},
    "mpmd": {"engine", "schedules"},
    "checkpoint": {"engine", "processes"},
    "trainers": {"layers", "assignment", "checkpoint", "schedules", "engine", "processes"},
    "launch": {"processes", "_compat"},
    "doctor": {"launch", "engine", "processes", "_compat"},
    "api": {"engine", "schedules"},
    "__init__": {"trainers", "layers", "schedules", "engine"},
}
# The folders of the engine, from the lowest up: each may import those before it.
ENGINE_FOLDERS = ("tracing", "arrays", "analyses", "program", "passes", "runtime")
# The engine knows what a task and a schedule are and in which orders tasks may run, but no particular schedule.
ENGINE_MAY_USE_OF_SCHEDULES = {"task", "schedule", "errors", "order", "validate"}
FORBIDDEN_LIBRARIES = {
    "schedules": {"jax", "jaxlib", "flax", "optax", "orbax"},
    "engine": {"flax", "optax", "orbax"},
    "mpmd": {"flax", "optax", "orbax"},
}
# Imported when it is first used, so that the rest of its part needs no Flax.
MAY_IMPORT_FLAX = {"mpmd/flax.py"}
# Folders that compute know nothing of other processes, or only the names in `processes/__init__.py`.
WITHOUT_PROCESSES = ("engine/tracing", "engine/analyses", "engine/passes", "trainers/model")
WITH_THE_FACE_OF_PROCESSES = ("engine/arrays", "engine/program", "trainers/data", "trainers/state", "trainers/step")
UNPICKLING = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing")
PRIVATE_JAX = ("jax._src", "jaxlib")
ONLY_FILE_WITH_PRIVATE_JAX = "_compat.py"


@dataclass(frozen=True)
class Source:
    """One file of the package; its text is parsed once for all tests."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def part(self) -> str:
        """The part of the package that the file belongs to: a folder, or a module at the top."""
        parts = self.path.relative_to(PACKAGE).parts
        return parts[0] if len(parts) > 1 else self.path.stem

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text, filename=str(self.path))))

    @cached_property
    def imports(self) -> list[tuple[str, int]]:
        """Dotted names of everything the file imports anywhere, with lines; relative imports made absolute."""
        package = (PACKAGE.name, *self.path.relative_to(PACKAGE).parent.parts)
        found: list[tuple[str, int]] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = package[: len(package) - node.level + 1] if node.level else ()
                base = ".".join([*origin, *([node.module] if node.module else [])])
                found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        return found


SOURCES = [Source(path) for path in sorted(PACKAGE.rglob("*.py"))]


def refuse(faults: Iterator[str]) -> None:
    """Fail with every fault, one a line."""
    found = list(faults)
    assert not found, "\n".join(found)


def matches(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def defining_modules() -> dict[str, str]:
    """Which module of `schedules` defines each name that the package re-exports."""
    (init,) = [source for source in SOURCES if source.name == "schedules/__init__.py"]
    return {
        alias.asname or alias.name: node.module.removeprefix("jaxpp_flax.schedules.")
        for node in init.nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def test_the_package_is_found():
    assert len(SOURCES) > 100, f"only {len(SOURCES)} Python files under {PACKAGE}"


def test_every_part_has_a_place():
    unknown = {source.part for source in SOURCES} - MAY_IMPORT.keys()
    assert not unknown, f"{unknown} have no place in the architecture: add them to MAY_IMPORT with what they may import"


def test_arrows_point_down():
    refuse(
        f"{source.path}:{line}: {source.part} may import {sorted(allowed)} of this package, not {name}"
        for source in SOURCES
        for allowed in [MAY_IMPORT[source.part] | {source.part}]
        for name, line in source.imports
        for root, _, rest in [name.partition(".")]
        for target in [rest.partition(".")[0]]
        if root == PACKAGE.name and ((PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").exists())
        if target not in allowed
    )


def test_arrows_point_down_inside_the_engine():
    refuse(
        f"{source.path}:{line}: engine/{folder} may import {ENGINE_FOLDERS[:level]} of the engine, not {name}"
        for source in SOURCES
        if source.name.startswith("engine/")
        for folder in [source.name.split("/")[1]]
        if folder in ENGINE_FOLDERS
        for level in [ENGINE_FOLDERS.index(folder)]
        for name, line in source.imports
        if name.startswith(f"{PACKAGE.name}.engine.")
        if name.split(".")[2] not in ENGINE_FOLDERS[: level + 1]
    )


def test_no_file_imports_itself_in_a_circle():
    """Local imports and those for type checkers included."""
    modules = {".".join(source.path.relative_to(PACKAGE.parent).with_suffix("").parts): source for source in SOURCES}
    modules = {name.removesuffix(".__init__"): source for name, source in modules.items()}

    def module_of(name: str) -> str | None:
        return next((known for known in (name, name.rpartition(".")[0]) if known in modules), None)

    below = {
        name: {target for imported, _ in source.imports if (target := module_of(imported)) not in (None, name)}
        for name, source in modules.items()
    }
    sorter = graphlib.TopologicalSorter(below)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_the_engine_knows_no_particular_schedule():
    defined = defining_modules()

    def module_of(name: str) -> str | None:
        """The module of `schedules` that an imported name stands in."""
        root, *rest = name.split(".")
        if root != PACKAGE.name or rest[:1] != ["schedules"] or len(rest) < 2:
            return None
        # A name such as `validate` may be both a module and a function: both stand in the same module then.
        return rest[1] if (PACKAGE / "schedules" / f"{rest[1]}.py").exists() else defined[rest[1]]

    refuse(
        f"{source.path}:{line}: the engine may use {sorted(ENGINE_MAY_USE_OF_SCHEDULES)} of schedules, not {name}"
        for source in SOURCES
        if source.part == "engine"
        for name, line in source.imports
        if (module := module_of(name)) is not None and module not in ENGINE_MAY_USE_OF_SCHEDULES
    )


def test_code_that_computes_knows_processes_by_a_narrow_face():
    """The face is `processes/__init__.py`; transports, checkpoints, the loop and the launcher import the files."""
    whole = f"{PACKAGE.name}.processes"
    (init,) = [source for source in SOURCES if source.name == "processes/__init__.py"]
    face = {f"{whole}.{name.rpartition('.')[2]}" for name, _ in init.imports}
    assert len(face) <= 10, f"the face of processes is no longer narrow: {sorted(face)}"
    for folder in (*WITHOUT_PROCESSES, *WITH_THE_FACE_OF_PROCESSES):
        assert (PACKAGE / folder).is_dir(), f"{folder} has moved: name its new place here"
    refuse(
        f"{source.path}:{line}: {folder} may import {sorted(allowed) or 'nothing'} of processes, not {name}"
        for source in SOURCES
        for folder in ["/".join(source.name.split("/")[:2])]
        if folder in WITHOUT_PROCESSES or folder in WITH_THE_FACE_OF_PROCESSES
        for allowed in [face if folder in WITH_THE_FACE_OF_PROCESSES else set[str]()]
        for name, line in source.imports
        if matches(name, whole) and name not in allowed
    )


def test_libraries_that_a_part_must_not_know():
    refuse(
        f"{source.path}:{line}: {source.part} must not import {library}"
        for source in SOURCES
        for allowed in [{"flax"} if source.name in MAY_IMPORT_FLAX else set()]
        for library in FORBIDDEN_LIBRARIES.get(source.part, set()) - allowed
        for name, line in source.imports
        if matches(name, library)
    )


def test_private_jax_is_touched_in_one_file():
    others = [source for source in SOURCES if source.name != ONLY_FILE_WITH_PRIVATE_JAX]
    assert len(others) == len(SOURCES) - 1
    refuse(
        f"{source.path}:{line}: {name} belongs in {ONLY_FILE_WITH_PRIVATE_JAX}"
        for source in others
        for name, line in source.imports
        if any(matches(name, private) for private in PRIVATE_JAX)
    )
    refuse(
        f"{source.path}:{node.lineno}: jax._src belongs in {ONLY_FILE_WITH_PRIVATE_JAX}"
        for source in others
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node.value) == "jax"
    )


def test_nothing_is_unpickled():
    """What comes over the network, or lies in a checkpoint, may be anybody's."""
    refuse(
        f"{source.path}:{line}: {name} runs what it reads"
        for source in SOURCES
        for name, line in source.imports
        if any(matches(name, library) for library in UNPICKLING)
    )
    refuse(
        f"{source.path}:{node.value.lineno}: allow_pickle runs what it reads"
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False"
    )


def test_no_bare_assert():
    refuse(
        f"{source.path}:{node.lineno}: assert: raise an error that says what to change"
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.Assert)
    )


def test_files_are_short():
    refuse(
        f"{source.path} has {lines} lines: one idea, one file (at most {MAX_LINES})"
        for source in SOURCES
        if (lines := len(source.text.splitlines())) > MAX_LINES
    )
