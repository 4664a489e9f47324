"""Random train steps give what plain `jax.jit` gives.

`check(draw(seed))` runs one program again; a failure names its seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from tests.fuzz.programs import STORED, Program, arguments, draw, draw_storage, specs, step_of
from tests.helpers import slow_but, tree_allclose

pytestmark = pytest.mark.usefixtures("verified")

Setting = Callable[[], AbstractContextManager[Any]]
# Around calls of both, which must change the same in both; a mesh around the pipeline changes nothing.
SETTINGS: list[Setting] = [
    nullcontext,
    lambda: jax.enable_x64(True),
    lambda: jax.default_matmul_precision("float32"),
    lambda: jax.threefry_partitionable(False),
    lambda: jax.debug_nans(True),
]
MESHES: list[Callable[[MpmdMesh], Any]] = [
    lambda mesh: nullcontext(),
    lambda mesh: jax.set_mesh(mesh.jax_mesh),
    lambda mesh: jax.set_mesh(mesh.unstack[-1]),
    lambda mesh: jax.set_mesh(Mesh(np.array(jax.devices()[5:8]), ("other",))),
]


def nudged(params: Any, seed: int) -> Any:
    """Every number moved to one of its neighbours: what that changes, rounding may change as well."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: np.nextafter(x, np.float32(np.inf) * rng.choice([-1, 1], x.shape).astype(np.float32)), params
    )


def allowed(program: Program, expected: Any, moved: Any) -> Any:
    """Per leaf: the rounding of the program's dtypes, or ten times what moving every parameter by one place does."""

    def one(want: Any, other: Any) -> float:
        if not jnp.issubdtype(want.dtype, jnp.inexact):
            return 0.0
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        want, other = np.asarray(want, wide), np.asarray(other, wide)
        return max(program.rounding, 10 * float(np.abs(want - other).max() / (np.abs(want).max() + 1e-30)))

    return jax.tree.map(one, expected, moved)


# JAX 0.12 lowers no `reduce_scatter`, the transpose of a tiled `all_gather`, whose mesh has Explicit axes beside it.
JAX_REFUSES = "Length of sharding.spec (2) must be equal to aval's ndim (0)"


def run_plain(program: Program, step: Any, settings: list[Setting], params: Any) -> list[Any]:
    """What every step returns under `jax.jit` on one device, or on one rank's devices where collectives ask for it."""
    mesh = program.mesh().unstack[0]
    _, state, batch = arguments(program)
    history: list[Any] = []
    with jax.set_mesh(mesh) if program.submesh else nullcontext():
        if program.collective:
            batch = jax.device_put(batch, NamedSharding(mesh, specs(program)[1]))
        for setting in settings:
            with setting():
                params, state, results = step(params, state, batch, None)
            history.append((params, state, results))
    return jax.tree.map(np.asarray, history)


def run_pipelined(program: Program, settings: list[Setting], meshes: list[Callable[[MpmdMesh], Any]]) -> list[Any]:
    """What every step returns as a pipeline."""
    mesh, (params, state, batch) = program.mesh(), arguments(program)
    of_params, of_batch = specs(program)
    step = mpmd_jit_with_loop(
        step_of(program), mesh, in_specs=(of_params, None, of_batch), static_argnums=3, donate_argnums=program.donate,
        residuals=program.residuals, fsdp=program.fsdp,
    )  # fmt: skip
    schedule, history = program.make_schedule(), []
    for setting, ambient in zip(settings, meshes, strict=True):
        with setting(), ambient(mesh):
            params, state, results = step(params, state, batch, schedule)
        history.append(jax.tree.map(np.asarray, (params, state, results)))  # copied: the next step may take them
    return history


def check(program: Program, *, contexts: bool = False) -> None:
    """Compare everything that every step returns."""
    rng = np.random.default_rng(program.seed)
    settings = [SETTINGS[rng.integers(len(SETTINGS)) if contexts else 0] for _ in range(program.steps)]
    meshes = [MESHES[rng.integers(len(MESHES)) if contexts else 0] for _ in range(program.steps)]
    params, _, _ = arguments(program)
    plain = jax.jit(step_of(program), static_argnums=3)
    try:
        expected = run_plain(program, plain, settings, params)
    except ValueError as error:
        if JAX_REFUSES not in str(error):
            raise
        with pytest.raises(ValueError, match=re.escape(JAX_REFUSES)):
            run_pipelined(program, settings, meshes)
        return
    moved = run_plain(program, plain, settings, nudged(params, program.seed))
    actual = run_pipelined(program, settings, meshes)
    paths = jax.tree_util.tree_leaves_with_path(expected)
    limits = jax.tree.leaves(allowed(program, expected, moved))
    for (path, want), have, limit in zip(paths, jax.tree.leaves(actual), limits, strict=True):
        tree_allclose({jax.tree_util.keystr(path): have}, {jax.tree_util.keystr(path): want}, rtol=limit)


def check_seeds(
    seeds: Iterable[int], *, collective: bool = False, contexts: bool = False, storage: bool = False
) -> None:
    """Check the programs of all seeds, and tell every one that is wrong."""
    wrong: list[str] = []
    for seed in seeds:
        program = draw(seed, collective=collective)
        if storage:
            program = draw_storage(random.Random(seed), program)
        try:
            check(program, contexts=contexts)
        except Exception as e:  # any error is a finding, and the other seeds run all the same
            wrong.append(f"{program}\n{type(e).__name__}: {e}")
    jax.clear_caches()
    assert not wrong, "\n\n".join(wrong)


def many(first: int, count: int) -> list[Any]:
    """Seeds for a soak test, fifty at a time."""
    return [pytest.param(range(start, start + 50), id=f"from_{start}") for start in range(first, first + count, 50)]


@pytest.mark.parametrize("seed", slow_but(range(4), 3))
def test_a_random_program(seed: int):
    check_seeds([seed])


@pytest.mark.parametrize("seed", slow_but((0, 1, 4, 39), 39))
def test_a_random_program_with_collectives(seed: int):
    check_seeds([seed], collective=True)


@pytest.mark.slow  # each step is another compilation; `tests/engine/test_trace_context.py` has each setting
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_random_program_in_other_settings(seed: int):
    check_seeds([seed], contexts=True)


@pytest.mark.parametrize("seed", slow_but((*range(4), STORED), STORED))
@pytest.mark.filterwarnings("ignore::jaxpp_flax.engine.passes.fsdp.rule.FsdpWarning")  # numbers count here, not gathers
def test_a_random_program_with_values_stored_elsewhere(seed: int):
    check_seeds([seed], storage=True)


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch):
    """One that is 1e-4 off, and one of a type that allows no difference."""
    right = {"largest": np.float32(3), "ids": np.int32(5)}
    monkeypatch.setattr(f"{__name__}.run_plain", lambda *_: [right])
    for name, wrong in {"largest": np.float32(1.0001), "ids": np.int32(2)}.items():
        monkeypatch.setattr(
            f"{__name__}.run_pipelined", lambda *_, name=name, wrong=wrong: [right | {name: right[name] * wrong}]
        )
        with pytest.raises(AssertionError, match=f"{name}.*differ"):
            check(draw(3))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seeds", many(1_000, 1_200))
def test_many_random_programs(seeds: range):
    check_seeds(seeds)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seeds", many(10_000, 500))
def test_many_random_programs_with_collectives(seeds: range):
    check_seeds(seeds, collective=True)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seeds", many(20_000, 500))
def test_many_random_programs_in_other_settings(seeds: range):
    check_seeds(seeds, contexts=True)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seeds", many(30_000, 1_000))
@pytest.mark.filterwarnings("ignore::jaxpp_flax.engine.passes.fsdp.rule.FsdpWarning")  # numbers count here, not gathers
def test_many_random_programs_with_values_stored_elsewhere(seeds: range):
    check_seeds(seeds, storage=True)
