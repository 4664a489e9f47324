"""The rules of the house: what may import what, and the form of the code, read from the source text alone."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.architecture import form_rules as form
from tests.architecture import import_rules as imports
from tests.architecture.source import PACKAGE, Source, package_sources

ROW = "    x = 1\n"
NESTED = "def f(x):\n" + "".join("    " * depth + "if x:\n" for depth in range(1, 6)) + "    " * 6 + "return x\n"

# Each rule with a package that breaks it: the text of each file, and a text of each fault.
RULES: list[tuple[Callable[..., Iterator[str]], Mapping[str, str], list[str]]] = [
    (imports.every_part_has_a_place, {"engine/jit.py": "", "cellar/x.py": ""}, ["cellar has no place"]),
    (
        imports.arrows_point_down,
        {
            "engine/jit.py": "import jaxpp_flax.trainers.trainer",
            "layers/nnx.py": "def f():\n    from ..trainers import trainer\n    from ..engine import jit",
            "trainers/trainer.py": "from jaxpp_flax.engine import jit",
        },
        ["engine/jit.py:1: engine may", "layers/nnx.py:2: layers may import ['engine', 'globs', 'layers']"],
    ),
    (
        imports.arrows_point_down_inside_the_engine,
        {"engine/arrays/mesh.py": "from jaxpp_flax.engine.tracing import ir\nfrom jaxpp_flax.engine import jit"},
        ["engine/arrays/mesh.py:2: engine/arrays may import ('tracing', 'arrays')"],
    ),
    (
        imports.arrows_point_down_inside_the_trainer,
        {
            "trainers/mesh.py": "from jaxpp_flax.trainers import errors\nimport jaxpp_flax.trainers.data.batch",
            "trainers/data/batch.py": "def f():\n    from ..state import holder\n    from ..mesh import batch_spec",
            "trainers/state/holder.py": "from jaxpp_flax.trainers import data",
            "trainers/cellar.py": "",
        },
        [
            "trainers/mesh.py:2: trainers/mesh may import ('errors', 'mesh') of trainers",
            "trainers/data/batch.py:2: trainers/data may import ('errors', 'mesh', 'progress', 'data') of",
            "trainers/cellar.py has no place in the order of trainers",
        ],
    ),
    (
        imports.no_file_imports_itself_in_a_circle,
        {
            "engine/a.py": "from jaxpp_flax.engine import b",
            "engine/b.py": "def f():\n    from .c import x",
            "engine/c.py": "from .a import f",
        },
        [" -> "],
    ),
    (
        imports.the_engine_knows_no_particular_schedule,
        {
            "schedules/__init__.py": "from .task import Task\nfrom .basic import GPipe",
            "schedules/task.py": "",
            "schedules/basic.py": "",
            "engine/jit.py": "from jaxpp_flax.schedules import Task, GPipe\nimport jaxpp_flax.schedules.basic",
        },
        ["engine/jit.py:1: the engine may use", "engine/jit.py:2: the engine may use"],
    ),
    (
        imports.the_engine_predicts_only_what_a_task_writes,
        {
            "engine/summary.py": "from jaxpp_flax.engine.analyses.workspace import workspace",
            "engine/pipeline.py": "from jaxpp_flax.engine.analyses import spec_flow\ndef predict_memory(): ...",
            "planning/model.py": "from jaxpp_flax.engine.analyses.spec_flow import specs_after\ndef predict(): ...",
        },
        ["engine/pipeline.py:1: only ['engine/analyses/workspace.py'] may", "engine/pipeline.py:2: predict_memory"],
    ),
    (
        imports.code_that_computes_knows_processes_by_a_narrow_face,
        {
            "processes/__init__.py": "from jaxpp_flax.processes.group import barrier",
            "engine/passes/place.py": "from jaxpp_flax.processes import barrier",
            "engine/arrays/mesh.py": "from jaxpp_flax.processes import barrier, store",
        },
        ["engine/passes/place.py:1: engine/passes may import nothing", "engine/arrays/mesh.py:1: engine/arrays may"],
    ),
    (
        imports.a_part_knows_no_forbidden_library,
        {
            "schedules/task.py": "import jax.numpy as jnp",
            "mpmd/flax.py": "import flax",
            "mpmd/jit.py": "from flax import nnx",
        },
        ["schedules/task.py:1: schedules must not import jax", "mpmd/jit.py:1: mpmd must not import flax"],
    ),
    (
        imports.private_jax_is_touched_in_one_file,
        {
            "_compat.py": "import jax._src",
            "engine/jit.py": "from jax._src import core\nfrom jaxlib import xla\nx = jax._src.core\nf('jax._src.core')",
        },
        [f"engine/jit.py:{line}: " for line in (1, 2, 3, 4)],
    ),
    (
        imports.words_of_jax_are_read_in_compat,
        {
            "_compat_texts/traces.py": "text.count('transpose(')",
            "engine/jit.py": '"""A context mesh."""\nif "Unknown backend" in str(error):\n    x = f"transpose({x}"',
        },
        ["engine/jit.py:2: 'Unknown backend' is a text of JAX", "engine/jit.py:3: "],
    ),
    (
        imports.nothing_is_unpickled,
        {"checkpoint/reading.py": "import pickle\nnp.load(f, allow_pickle=True)\nnp.load(f, allow_pickle=False)"},
        ["reading.py:1: pickle", "reading.py:2: allow_pickle"],
    ),
    (
        form.names_say_what_they_hold,
        {"engine/jit.py": "found = 1\ndef of(at): ...", "planning/model.py": "found = 1"},
        ["engine/jit.py:1: found says", "engine/jit.py:2: at says"],
    ),
    (form.no_bare_assert, {"engine/jit.py": "x = 1\nassert x"}, ["engine/jit.py:2: assert"]),
    (
        form.files_are_short,
        {"engine/a.py": "x = 1\n" * 400, "engine/b.py": "\n" * 401},
        ["engine/b.py has 401 lines: one idea, one file (at most 400)"],
    ),
    (
        form.functions_are_short,
        {
            "engine/a.py": 'def f():\n    """One\n    two."""\n    # three\n\n' + ROW * 59,
            "engine/b.py": "class A:\n    def f(self):\n" + ("    " + ROW) * 60,
        },
        ["engine/b.py: A.f has 61 lines of code"],
    ),
    (
        form.blocks_are_nested_little,
        {
            "engine/a.py": NESTED,
            "engine/b.py": NESTED.replace("if x:", "def g():", 1),
            "engine/c.py": "def f(x):\n    if x:\n        pass\n" + "    elif x:\n        pass\n" * 5,
        },
        ["engine/a.py: f has 5 blocks inside one another"],
    ),
    (
        form.folders_are_small,
        {f"{folder}/{i}.py": "" for folder, count in (("engine", 12), ("engine/a", 13)) for i in range(count)},
        ["engine/a has 13 files"],
    ),
]  # fmt: skip
IDS = [rule.__name__ for rule, _, _ in RULES]


def test_the_package_is_found():
    assert len(package_sources()) > 100, f"only {len(package_sources())} Python files under {PACKAGE}"


@pytest.mark.parametrize("rule", [rule for rule, _, _ in RULES], ids=IDS)
def test_the_package_keeps_the_rule(rule: Callable[..., Iterator[str]]):
    faults = list(rule(package_sources()))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("rule", "files", "expected"), RULES, ids=IDS)
def test_the_rule_finds_what_breaks_it_and_nothing_else(
    rule: Callable[..., Iterator[str]], files: Mapping[str, str], expected: list[str]
):
    sources = [Source(name, text) for name, text in files.items()]
    limits = "exceptions" in inspect.signature(rule).parameters
    faults = list(rule(sources, form.NONE) if limits else rule(sources))
    wrong = [pair for pair in itertools.zip_longest(faults, expected, fillvalue="?") if pair[1] not in pair[0]]
    assert not wrong, faults


def test_an_exception_may_not_grow_and_is_taken_out_when_it_is_not_needed():
    sources = [Source("long.py", "\n" * 450), Source("short.py", "\n" * 400)]

    def faults(**files: int) -> list[str]:
        return list(form.files_are_short(sources, form.NONE._replace(files={f"{k}.py": v for k, v in files.items()})))

    assert faults(long=450) == []
    assert faults(long=449) == ["long.py has 450 lines: one idea, one file (at most 449)"]
    assert faults(long=450, short=401, gone=500) == [
        f"{name}.py is not above 400 any more: take it out of EXCEPTIONS" for name in ("short", "gone")
    ]


def test_each_library_that_a_module_imports_is_declared():
    """Imports inside of functions are left out: some are of extras."""
    statements = [s for source in package_sources() for s in ast.iter_child_nodes(source.nodes[0])]
    imported = {a.name.split(".")[0] for s in statements if isinstance(s, ast.Import) for a in s.names}
    imported |= {s.module.split(".")[0] for s in statements if isinstance(s, ast.ImportFrom) and s.module}
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[><=]", requirement)[0] for requirement in project["dependencies"]}
    brought = {"orbax": "orbax-checkpoint", "jaxlib": "jax"}
    libraries = imported - {*sys.stdlib_module_names, "jaxpp_flax"}
    assert {"jax", "orbax"} <= libraries
    assert {brought.get(name, name) for name in libraries} <= declared
