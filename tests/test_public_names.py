"""The package's public names come from their modules when they are first used, and not before."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import jaxpp_flax
from tests.running import run_python


def loaded_after(program: str) -> set[str]:
    """Which of the larger libraries a program has imported at its end."""
    report = "import sys; print(*sys.modules.keys() & {'jax', 'flax', 'optax', 'orbax', 'rich'})"
    return set(run_python("-c", f"{program}\n{report}").stdout.split())


def test_type_checkers_see_the_names_that_python_finds():
    tree = ast.parse(Path(jaxpp_flax.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == {name: f"jaxpp_flax.{home}" for name, home in jaxpp_flax._HOME.items()}
    assert sorted(seen) == sorted(jaxpp_flax.__all__)


@pytest.mark.parametrize("name", jaxpp_flax.__all__)
def test_a_name_is_the_one_of_its_module(name: str):
    home = import_module(f"jaxpp_flax.{jaxpp_flax._HOME[name]}")
    assert getattr(jaxpp_flax, name) is getattr(home, name)
    assert name in dir(jaxpp_flax)


def test_the_modules_are_attributes_without_an_import_of_their_own():
    """Other tests have imported some: ask what finds those that no one has."""
    for name in ("doctor", "launch", "linen", "mpmd", "tasks", "trainers"):
        assert jaxpp_flax.__getattr__(name) is import_module(f"jaxpp_flax.{name}")
        assert name in dir(jaxpp_flax)


def test_a_name_that_does_not_exist():
    with pytest.raises(AttributeError, match="'jaxpp_flax' has no attribute 'PipelineTrainr'"):
        _ = jaxpp_flax.PipelineTrainr  # type: ignore[attr-defined]
    assert not hasattr(jaxpp_flax, "__wrapped__"), "which tools ask every module for"
    with pytest.raises(ImportError, match="PipelineTrainr"):
        exec("from jaxpp_flax import PipelineTrainr")


@pytest.mark.processes
def test_nothing_is_imported_before_it_is_used():
    assert loaded_after("import jaxpp_flax") == set()
    assert loaded_after("import jaxpp_flax.schedules") == set()
    assert "flax" not in loaded_after("import jaxpp_flax.launch.cli, jaxpp_flax.launch.child")
    assert loaded_after("from jaxpp_flax import mpmd_jit_with_loop") == {"jax"}
    assert {"jax", "flax", "optax"} <= loaded_after("from jaxpp_flax import *\nPipelineTrainer")


@pytest.mark.processes
def test_the_packages_are_attributes_too():
    parts = ("checkpoint", "doctor", "engine", "launch", "layers", "linen", "mpmd", "planning", "schedules", "trainers")
    loaded_after(f"import jaxpp_flax\n{'; '.join(f'jaxpp_flax.{part}' for part in parts)}")
