"""A value that stays on its rank has the layout that the compiler of its task chooses, where this pays."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.runtime import layouts
from jaxpp_flax.engine.runtime.layouts import left_to_compilers
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from tests.engine.toys import chain, mesh_of, sgd_step
from tests.helpers import DIM, ROWS, batch_of, tree_allclose

# The bound of issue 5: sums in another order move a few units in the last place.
RTOL = 1e-5
HEADS = 2
OFFLOAD = StageResiduals(offload=1.0)


@pytest.fixture
def chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let XLA for CPU choose too: a value that it transposes stays as it was."""
    monkeypatch.setattr(layouts, "_PLATFORMS", {"cpu"})


def parameters(num_stages: int) -> Any:
    """Of dense layers, with one weight of four dimensions: so have its gradient, and the sum of it."""
    return [{**layer, "w": layer["w"].reshape(DIM, 1, HEADS, -1)} for layer in chain(num_stages)]


def loss(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Attention over the rows of a microbatch, the heads turned to the front; also between stages: four dimensions."""
    x = batch["x"][None]
    for i, layer in enumerate(params):
        if i:
            x = mark_stage_end(x.reshape(1, ROWS, HEADS, -1).transpose(0, 3, 2, 1), f"layer_{i - 1}")
            x = x.transpose(0, 3, 2, 1).reshape(1, ROWS, DIM)
        heads = (x @ layer["w"].reshape(DIM, DIM) + layer["b"]).reshape(1, ROWS, HEADS, -1).transpose(0, 2, 3, 1)
        weights = jax.nn.softmax(jnp.einsum("bhdq,bhdk->bhqk", heads, heads))
        x = x + jnp.einsum("bhqk,bhdk->bqhd", weights, jnp.tanh(heads)).reshape(1, ROWS, DIM)
    return jnp.mean((x[0] - batch["y"]) ** 2)


@functools.cache
def plain(num_stages: int) -> Any:
    return jax.tree.map(np.asarray, jax.jit(sgd_step(None, loss))(parameters(num_stages), batch_of(4)))


def compiled(
    schedule: Schedule, residuals: ResidualPlan | None = None, axes: dict[str, int] | None = None
) -> CompiledPipeline:
    step = mpmd_jit_with_loop(sgd_step(schedule, loss), mesh_of(schedule.num_ranks, **axes or {}), residuals=residuals)
    return step.compile(parameters(schedule.num_stages), batch_of(4))


def chosen(step: CompiledPipeline) -> Iterator[tuple[str, int, str]]:
    """The values of orders other than the default: tasks, positions, and "made" or "read"."""
    for task, executable in zip(step.program.tasks, step.executables.tasks, strict=True):
        for what, forms in (("made", executable.output_formats), ("read", executable.input_formats[0])):
            for position, form in enumerate(forms):
                order = form.layout.major_to_minor
                if order != tuple(range(len(order))):
                    yield task.name, position, what


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize(
    ("schedule", "axes", "readers"),
    [
        (Std1F1B(2), {}, {"bwd_0"}),
        (Std1F1B(2), {"data": 2}, {"bwd_0"}),
        (ZeroBubble(2), {}, {"bwd_0", "bwd_i_1"}),
        (Interleaved1F1B(4, 2), {}, {"bwd_0", "bwd_1", "bwd_2"}),
    ],
    ids=["1f1b", "data", "zero bubble", "interleaved"],
)
def test_numbers_are_those_of_plain_jax(schedule: Schedule, axes: dict[str, int], readers: set[str]):
    step = compiled(schedule, axes=axes)
    found = list(chosen(step))
    assert {name for name, _, what in found if what == "read"} >= readers
    left = left_to_compilers(step.program)
    names = [task.name for task in step.program.tasks]
    assert {(name, at) for name, at, what in found if what == "made"} <= {
        (names[task], output) for task, outputs in left.items() for output in outputs
    }
    for _ in range(2):  # the second call takes JAX's fast path
        tree_allclose(step(parameters(schedule.num_stages), batch_of(4)), plain(schedule.num_stages), rtol=RTOL)


@pytest.mark.usefixtures("chooses")
def test_what_leaves_its_rank_or_device_has_the_default():
    step = compiled(Std1F1B(2), ResidualPlan([OFFLOAD, OFFLOAD]))
    assert not list(chosen(step))
    tree_allclose(step(parameters(2), batch_of(4)), plain(2), rtol=RTOL)


@pytest.mark.usefixtures("chooses")
def test_switches_and_profile_read_such_values():
    step = compiled(Std1F1B(2))
    assert list(chosen(step))
    with jax.debug_nans(True):
        results, _ = step.profile(parameters(2), batch_of(4))
    tree_allclose(results, plain(2), rtol=RTOL)


def test_alike_stages_compile_once_as_with_defaults(monkeypatch: pytest.MonkeyPatch):
    """JAX lowers layouts of inputs for known devices only; the executable is copied all the same."""
    default = compiled(GPipe(4)).compiler
    monkeypatch.setattr(layouts, "_PLATFORMS", {"cpu"})
    step = compiled(GPipe(4))
    assert {name for name, _, what in chosen(step) if what == "read"} >= {"bwd_1", "bwd_2"}
    choices = 3  # of the first, a middle and the last forward
    assert step.compiler.compilations == default.compilations + choices
    assert (step.compiler.lowerings, step.compiler.executables) == (default.lowerings, default.executables)
    tree_allclose(step(parameters(4), batch_of(4)), plain(4), rtol=RTOL)


def test_cpu_keeps_the_default():
    assert not list(chosen(compiled(Std1F1B(2))))
