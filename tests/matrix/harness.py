"""How a row of the matrix is checked: one train step, under plain `jax.jit` and as a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex_core

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.traced import CutPolicy, cut_at_every_mark
from jaxpp_flax.schedules import Schedule, Std1F1B
from tests.helpers import tree_allclose

# The bound for float32, relative to a leaf's largest entry. One rounding is 6e-8; the pipeline only adds the
# same microbatches up in another order.
RTOL = 1e-5

# (state, batch, schedule) -> (state, anything)
Step = Callable[[Any, Any, Schedule | None], tuple[Any, Any]]


def mesh_of(num_ranks: int, **axes: int) -> MpmdMesh:
    """Ranks times the given other axes, on the first devices."""
    shape = (num_ranks, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return MpmdMesh(jax.sharding.Mesh(devices, ("stage", *axes)), "stage")


class Checked(NamedTuple):
    """What a step was compiled to, and what its steps returned."""

    compiled: CompiledPipeline
    history: list[Any]


def check(
    step: Step,
    state: Any,
    batch: Any,
    mesh: MpmdMesh,
    *schedules: Schedule,
    steps: int = 2,
    rtol: float = RTOL,
    cut_policy: CutPolicy = cut_at_every_mark,
    reference: Step | None = None,
) -> Checked:
    """Run `steps` steps both ways and compare everything they return; gives the last schedule's.

    Plain `jax.jit` gets no schedule, and `reference` in place of the step where one is given. All `schedules` (by
    default 1F1B) share the executables of equal tasks.
    """
    pipelined = mpmd_jit_with_loop(step, mesh, static_argnums=2, cut_policy=cut_policy)
    expected = run(jax.jit(reference or step, static_argnums=2), state, batch, None, steps)
    for schedule in schedules or (Std1F1B(mesh.mpmd_dim),):
        actual = run(pipelined, state, batch, schedule, steps)
        tree_allclose(actual, expected, rtol=rtol)
        assert_replicas_agree(actual)
        checked = Checked(pipelined.compile(state, batch, schedule), actual)
    return checked


def run(step: Any, state: Any, batch: Any, schedule: Schedule | None, steps: int) -> list[Any]:
    """What every step returns."""
    history: list[Any] = []
    for _ in range(steps):
        state, outputs = step(state, batch, schedule)
        history.append((state, outputs))
    return history


def assert_replicas_agree(tree: Any) -> None:
    """Fail unless every replica of every array is the same, bit for bit."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        assert isinstance(leaf, MpmdArray), f"{jax.tree_util.keystr(path)} is a {type(leaf).__name__}"
        first, *others = [as_bits(leaf._parts[rank]) for rank in leaf.mpmd_idxs]
        for other in others:
            np.testing.assert_array_equal(other, first, err_msg=jax.tree_util.keystr(path))


def as_bits(array: jax.Array) -> np.ndarray:
    """The array's bytes; of a PRNG key, its data's."""
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def replicated(tree: Any) -> list[str]:
    """The paths of the leaves that live on several ranks."""
    return [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if isinstance(leaf, MpmdArray) and leaf.is_mpmd_replicated
    ]


def count(compiled: CompiledPipeline, primitive: str) -> dict[str, int]:
    """How often a primitive occurs in each task of the loops, calls looked into."""
    found: dict[str, int] = {}
    for task in compiled.program.tasks:
        if task.stage is not None:
            found[task.name] = sum(_count(e.name, e.params, primitive) for e in task.graph.equations)
    return found


def _count(name: str, params: Any, primitive: str) -> int:
    subs = [getattr(j, "jaxpr", j) for j in jex_core.jaxprs_in_params(dict(params))]
    return (name == primitive) + sum(_count(e.primitive.name, e.params, primitive) for s in subs for e in s.eqns)
