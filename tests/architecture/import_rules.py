"""The folder tree is the architecture: what may import what. Each rule yields its faults, one text a fault."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Sequence

from tests.architecture.source import NAME, Source

# Each part of the package with the parts below it that it may import. A part that is not listed is a fault.
MAY_IMPORT = {
    "_compat": set(),
    "_compat_processes": {"_compat"},
    "_compat_executables": {"_compat"},
    "_compat_hijax": {"_compat_texts"},
    "_compat_texts": set(),
    "_compat_xla": set(),
    "commands": {"error_codes"},
    "counts": set(),
    "globs": set(),
    "messages": set(),
    "error_codes": set(),
    "schedules": {"commands", "counts", "messages", "error_codes"},
    "processes": {"messages", "_compat", "_compat_texts", "error_codes"},
    "engine": {
        "schedules",
        "processes",
        "messages",
        "error_codes",
        "_compat",
        "_compat_executables",
        "_compat_hijax",
        "_compat_texts",
        "_compat_xla",
    },
    "layers": {"engine", "globs"},
    "planning": {"engine", "schedules", "commands", "counts", "globs", "messages", "error_codes", "_compat_xla"},
    "__main__": {"messages"},
    "linen": {"layers"},
    "mpmd": {"engine", "schedules", "messages", "_compat_texts"},
    "checkpoint": {"engine", "processes", "counts", "globs", "messages", "error_codes", "_compat_texts"},
    "pretrained": {"checkpoint", "engine", "processes", "counts", "globs"},
    "trainers": {
        "layers",
        "planning",
        "checkpoint",
        "pretrained",
        "schedules",
        "engine",
        "processes",
        "counts",
        "globs",
        "messages",
        "error_codes",
        "_compat_executables",
        "_compat_texts",
    },
    "verify": {"trainers", "planning", "commands", "checkpoint", "engine", "processes", "error_codes", "_compat_texts"},
    "launch": {"processes", "messages", "error_codes", "_compat", "_compat_processes", "_compat_texts"},
    "doctor": {"launch", "engine", "processes", "_compat"},
    "api": {"engine", "schedules", "messages"},
    "tasks": {"engine", "messages"},
    "__init__": {"trainers", "layers", "schedules", "engine"},
}
# The folders of the engine, from the lowest up: each may import those before it.
ENGINE_FOLDERS = ("tracing", "arrays", "analyses", "program", "passes", "runtime")
# The folders and files of the trainer, from the lowest up: each may import those before it.
TRAINER_PARTS = (
    "errors", "mesh", "progress", "data", "metrics", "state", "model", "stages", "writes", "loss", "step", "callbacks",
    "trackers", "checkpoints", "loop", "options", "objects", "weights", "weight_transfer", "files", "inference",
    "generation", "steps", "accumulation", "trainer", "__init__",
)  # fmt: skip
# The engine knows what a task and a schedule are and in which orders tasks may run, but no particular schedule.
ENGINE_MAY_USE_OF_SCHEDULES = {"task", "schedule", "errors", "order", "residuals", "gathers", "memory"}
# What `planning` predicts is not the engine's, but for one number: `memory_analysis` of a compiled step adds what each
# task is expected to write. Who in the engine reads the two files of this estimate.
READERS_OF_THE_ESTIMATE = {
    "engine.analyses.workspace": {"engine/summary.py"},
    "engine.analyses.spec_flow": {"engine/analyses/workspace.py"},
}
FORBIDDEN_LIBRARIES = {
    "schedules": {"jax", "jaxlib", "flax", "optax", "orbax"},
    "planning": {"flax", "optax", "orbax"},
    "engine": {"flax", "optax", "orbax"},
    "mpmd": {"flax", "optax", "orbax"},
    "tasks": {"flax", "optax", "orbax"},
}
# Imported when it is first used, so that the rest of its part needs no Flax.
MAY_IMPORT_FLAX = {"mpmd/flax.py"}
# Folders that compute know nothing of other processes, or only the names in `processes/__init__.py`.
WITHOUT_PROCESSES = ("engine/tracing", "engine/analyses", "engine/passes", "trainers/model")
WITH_THE_FACE_OF_PROCESSES = (
    "engine/arrays", "engine/program", "trainers/data", "trainers/state", "trainers/loss", "trainers/step",
)  # fmt: skip
LARGEST_FACE = 10
UNPICKLING = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing")
PRIVATE_JAX = ("jax._src", "jaxlib")
FILES_WITH_PRIVATE_JAX = "_compat"
# Words of JAX's name stacks, and of errors of JAX and XLA, by which `_compat*` files decide something.
WORDS_OF_JAX = (
    "transpose(", "rematted_computation", "not found in mesh", "of type auto", "context mesh", "unbound axis name",
    "not supported by dot_general", "unknown backend", "deadline_exceeded", "jaxruntimeerror",
    "xlaruntimeerror",
)  # fmt: skip


def matches(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def every_part_has_a_place(sources: Sequence[Source]) -> Iterator[str]:
    for part in sorted({source.part for source in sources} - MAY_IMPORT.keys()):
        yield f"{part} has no place in the architecture: add it to MAY_IMPORT with what it may import"


def arrows_point_down(sources: Sequence[Source]) -> Iterator[str]:
    parts = {source.part for source in sources}
    for source in sources:
        allowed = MAY_IMPORT.get(source.part, set()) | {source.part}
        for name, line in source.imports:
            root, *rest = name.split(".")
            if root == NAME and rest and rest[0] in parts - allowed:
                yield f"{source.at(line)}: {source.part} may import {sorted(allowed)} of this package, not {name}"


def arrows_point_down_inside_the_engine(sources: Sequence[Source]) -> Iterator[str]:
    folders = [source for source in sources if source.name.startswith("engine/") and source.folder != "engine"]
    return _in_order("engine", ENGINE_FOLDERS, folders)


def arrows_point_down_inside_the_trainer(sources: Sequence[Source]) -> Iterator[str]:
    return _in_order("trainers", TRAINER_PARTS, [source for source in sources if source.part == "trainers"])


def _in_order(part: str, order: Sequence[str], sources: Sequence[Source]) -> Iterator[str]:
    """What the folders and files of a part import of it against their order; and those that have no place in it."""
    for source in sources:
        own = source.name.split("/")[1].removesuffix(".py")
        if own not in order:
            yield f"{source.name} has no place in the order of {part}: {order}"
            continue
        allowed = order[: order.index(own) + 1]
        for name, line in source.imports:
            if name.startswith(f"{NAME}.{part}.") and name.split(".")[2] not in allowed:
                yield f"{source.at(line)}: {part}/{own} may import {allowed} of {part}, not {name}"


def no_file_imports_itself_in_a_circle(sources: Sequence[Source]) -> Iterator[str]:
    """Local imports and those for type checkers included."""
    modules = {source.module: source for source in sources}

    def module_of(name: str) -> str | None:
        return next((known for known in (name, name.rpartition(".")[0]) if known in modules), None)

    below = {
        name: {target for imported, _ in source.imports if (target := module_of(imported)) not in (None, name)}
        for name, source in modules.items()
    }
    try:
        graphlib.TopologicalSorter(below).prepare()
    except graphlib.CycleError as error:
        yield " -> ".join(reversed(error.args[1]))


def the_engine_knows_no_particular_schedule(sources: Sequence[Source]) -> Iterator[str]:
    names = {source.name for source in sources}
    defined = _defining_modules(sources)

    def module_of(name: str) -> str | None:
        """The module of `schedules` that an imported name stands in."""
        root, *rest = name.split(".")
        if root != NAME or rest[:1] != ["schedules"] or len(rest) < 2:
            return None
        # A name such as `validate` may be both a module and a function: both stand in the same module then.
        return rest[1] if f"schedules/{rest[1]}.py" in names else defined[rest[1]]

    for source in sources:
        for name, line in source.imports if source.part == "engine" else ():
            if (module := module_of(name)) is not None and module not in ENGINE_MAY_USE_OF_SCHEDULES:
                allowed = sorted(ENGINE_MAY_USE_OF_SCHEDULES)
                yield f"{source.at(line)}: the engine may use {allowed} of schedules, not {name}"


def the_engine_predicts_only_what_a_task_writes(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if source.part != "engine":
            continue
        for name, line in source.imports:
            for module, readers in READERS_OF_THE_ESTIMATE.items():
                if matches(name, f"{NAME}.{module}") and source.name not in readers:
                    yield f"{source.at(line)}: only {sorted(readers)} may import {name}: predict in `planning`"
        for node in source.nodes:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and "predict" in node.name.lower():
                yield f"{source.at(node.lineno)}: {node.name} predicts: that belongs in `planning`"


def code_that_computes_knows_processes_by_a_narrow_face(sources: Sequence[Source]) -> Iterator[str]:
    """The face is `processes/__init__.py`; transports, checkpoints, the loop and the launcher import the files."""
    whole = f"{NAME}.processes"
    (init,) = [source for source in sources if source.name == "processes/__init__.py"]
    face = {f"{whole}.{name.rpartition('.')[2]}" for name, _ in init.imports if matches(name, whole)}
    if len(face) > LARGEST_FACE:
        yield f"the face of processes has {len(face)} names (at most {LARGEST_FACE}): {sorted(face)}"
    for source in sources:
        folder = "/".join(source.name.split("/")[:2])
        if folder not in WITHOUT_PROCESSES + WITH_THE_FACE_OF_PROCESSES:
            continue
        allowed = face if folder in WITH_THE_FACE_OF_PROCESSES else set[str]()
        for name, line in source.imports:
            if matches(name, whole) and name not in allowed:
                yield f"{source.at(line)}: {folder} may import {sorted(allowed) or 'nothing'} of processes, not {name}"


def _defining_modules(sources: Sequence[Source]) -> dict[str, str]:
    """Which module of `schedules` defines each name that the package re-exports."""
    (init,) = [source for source in sources if source.name == "schedules/__init__.py"]
    return {
        alias.asname or alias.name: node.module.removeprefix(f"{NAME}.schedules.")
        for node in init.nodes
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def a_part_knows_no_forbidden_library(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        forbidden = FORBIDDEN_LIBRARIES.get(source.part, set()) - (
            {"flax"} if source.name in MAY_IMPORT_FLAX else set()
        )
        for name, line in source.imports:
            for library in sorted(library for library in forbidden if matches(name, library)):
                yield f"{source.at(line)}: {source.part} must not import {library}"


def private_jax_is_touched_in_one_file(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if source.name.startswith(FILES_WITH_PRIVATE_JAX):
            continue
        for name, line in source.imports:
            if any(matches(name, private) for private in PRIVATE_JAX):
                yield f"{source.at(line)}: {name} belongs in {FILES_WITH_PRIVATE_JAX}*.py"
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and node.attr == "_src" and ast.unparse(node.value) == "jax":
                yield f"{source.at(node.lineno)}: jax._src belongs in {FILES_WITH_PRIVATE_JAX}*.py"
            if isinstance(node, ast.Constant) and str(node.value).startswith("jax._src"):
                yield f"{source.at(node.lineno)}: {node.value!r} belongs in {FILES_WITH_PRIVATE_JAX}*.py"


def words_of_jax_are_read_in_compat(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        if source.name.startswith("_compat"):
            continue
        docstrings = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
        for node in source.nodes:
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
                continue
            if any(words in node.value.lower() for words in WORDS_OF_JAX):
                yield f"{source.at(node.lineno)}: {node.value!r} is a text of JAX: ask a function of `_compat_texts`"


def nothing_is_unpickled(sources: Sequence[Source]) -> Iterator[str]:
    """What comes over the network, or lies in a checkpoint, may be anybody's."""
    for source in sources:
        for name, line in source.imports:
            if any(matches(name, library) for library in UNPICKLING):
                yield f"{source.at(line)}: {name} runs what it reads"
        for node in source.nodes:
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
                yield f"{source.at(node.value.lineno)}: allow_pickle runs what it reads"
