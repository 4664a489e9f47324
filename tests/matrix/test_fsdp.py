"""FSDP once per step: parameters are gathered before the loop's tasks, gradients reduced and scattered after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.fsdp.rule import FsdpWarning
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.program.program import Run
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, treduce
from jaxpp_flax.schedules import Interleaved1F1B, Schedule, Std1F1B, ZeroBubble
from tests.engine.test_memory import observe
from tests.helpers import batch_of, tree_allclose
from tests.matrix.harness import mesh_of, run
from tests.matrix.test_sharding import (
    _COLLECTIVES,
    DIM,
    FSDP,
    ROWS,
    explicit_mesh,
    model,
    parameters,
    plain,
    state_of,
    train_step,
)

MICROBATCHES = 4
LEAVES = len(FSDP)  # sharded leaves of a stage


def specs_of(of_layer: Any, layers: int, batch_axes: Any) -> tuple[Any, Any]:
    specs = [of_layer] * layers
    return (specs, (optax.TraceState(specs), optax.EmptyState())), {"x": P(None, batch_axes), "y": P(None, batch_axes)}


def check(
    mesh: MpmdMesh,
    of_layer: Any,
    batch_axes: Any,
    schedule: Schedule,
    fsdp: Any = "step",
    apply: Callable[..., jax.Array] = model,
    reference: Callable[..., jax.Array] = model,
) -> CompiledPipeline:
    """Compare two steps with plain `jax.jit` of the same model without shards; return the compiled step."""
    step, batch = train_step(apply), batch_of(MICROBATCHES, ROWS, DIM, host=True)
    state, (state_specs, data) = state_of(parameters(schedule.num_stages)), specs_of(
        of_layer, schedule.num_stages, batch_axes
    )  # fmt: skip
    pipelined = mpmd_jit_with_loop(step, mesh, in_specs=(state_specs, data), static_argnums=2, fsdp=fsdp)
    actual = run(pipelined, state, batch, schedule, 2)
    # In float32 to 1e-5: the order of the sums over devices and microbatches differs.
    tree_allclose(actual, plain(schedule.num_stages, reference), rtol=1e-5)
    (params, opt_state), (_, grads) = actual[-1]
    for layer in (*params, *grads, *opt_state[0].trace):
        assert {k: v.spec for k, v in layer.items()} == of_layer, "the optimizer works on shards"
    return pipelined.compile(state, batch, schedule)


def executed(compiled: CompiledPipeline, in_loop: bool) -> Counter[str]:
    """The collectives that one step executes, in the tasks of the loop or outside of them."""
    found: Counter[str] = Counter()
    texts = [
        _COLLECTIVES.findall(re.sub(r"/\*.*?\*/", "", executable.as_text()))
        for executable in compiled.executables.tasks
    ]
    for instruction in compiled.program.instructions:
        if isinstance(instruction, Run) and (instruction.microbatch >= 0) == in_loop:
            found.update(texts[instruction.task])
    return found


def gathered_before(compiled: CompiledPipeline, name: str) -> int:
    """The number of gathers that run before the first run of a task, on its rank."""
    tasks = compiled.program.tasks
    found = 0
    (rank,) = {task.rank for task in tasks if task.name == name}
    for instruction in compiled.program.instructions:
        if isinstance(instruction, Run) and instruction.rank == rank:
            if tasks[instruction.task].name == name:
                break
            found += compiled.executables.tasks[instruction.task].as_text().count(" all-gather(")
    return found


@pytest.fixture(scope="module")
def trained() -> CompiledPipeline:
    return check(mesh_of(2, fsdp=4), FSDP, "fsdp", Std1F1B(2))


def test_weights_are_gathered_and_gradients_scattered_once(trained: CompiledPipeline):
    """Whatever the number of microbatches; the stacked losses are reduced once, too."""
    assert executed(trained, in_loop=False) == {"all-gather": 2 * LEAVES, "reduce-scatter": 2 * LEAVES, "all-reduce": 1}
    assert executed(trained, in_loop=True) == {}
    assert gathered_before(trained, "fwd_0") == gathered_before(trained, "fwd_bwd_1") == LEAVES


def test_a_replicated_mask_of_the_gradient_changes_nothing():
    mesh, params, batch = mesh_of(2, fsdp=4), parameters(2), batch_of(MICROBATCHES, ROWS, DIM, host=True)
    masks = jax.tree.map(lambda p: (jnp.arange(p.size).reshape(p.shape) % 3 > 0).astype(p.dtype), params)

    def step(params: Any, masks: Any, batch: Any) -> Any:
        def loss_of(microbatch: Any) -> Any:
            error = lambda params: jnp.mean((model(params, microbatch["x"]) - microbatch["y"]) ** 2)  # noqa: E731
            return jax.value_and_grad(error)(params)

        losses, grads = treduce(loss_of, batch, schedule=Std1F1B(2), operation=(Concat(), Add))
        return jax.tree.map(lambda p, g, mask: p - 0.1 * g * mask, params, grads, masks), losses

    specs = ([FSDP] * 2, None, {"x": P(None, "fsdp"), "y": P(None, "fsdp")})
    pipelined = mpmd_jit_with_loop(step, mesh, in_specs=specs, fsdp="step")
    tree_allclose(jax.tree.map(np.asarray, pipelined(params, masks, batch)), jax.jit(step)(params, masks, batch))
    compiled = pipelined.compile(params, masks, batch)
    after = executed(compiled, in_loop=False)
    assert after == {"all-gather": 2 * LEAVES, "reduce-scatter": 2 * LEAVES, "all-reduce": 1}  # the last, of the losses


def test_bytes_are_those_of_real_buffers(trained: CompiledPipeline):
    state, batch = state_of(parameters(2)), batch_of(MICROBATCHES, ROWS, DIM, host=True)
    devices = [trained.mpmd_mesh.rank_devices(rank)[0] for rank in range(2)]
    start: list[int] = []
    peak = [0, 0]

    def look(instruction: Any, environment: list[Any], done: bool) -> None:
        now = [0, 0]
        for x in {id(x): x for x in environment if x is not None and not x.is_deleted()}.values():
            for shard in x.addressable_shards:
                if shard.device in devices:
                    now[devices.index(shard.device)] += shard.data.nbytes
        start[:] = start or now
        peak[:] = map(max, peak, now)

    observe(trained, (state, batch), look)
    assert [row.peak_bytes for row in trained.memory_analysis()] == [p - s for p, s in zip(peak, start, strict=True)]


def test_hybrid_mesh_with_a_split_backward():
    """Over "data" the shards of a gradient are summed, after they are scattered over "fsdp"."""
    compiled = check(mesh_of(2, data=2, fsdp=2), FSDP, ("data", "fsdp"), ZeroBubble(2))
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == 2 * LEAVES
    assert executed(compiled, in_loop=True) == {}


TENSOR = {"up": P("fsdp", "tensor"), "bias": P("tensor"), "down": P("tensor", "fsdp")}


def test_tensor_axis_beside():
    compiled = check(mesh_of(2, fsdp=2, tensor=2), TENSOR, "fsdp", Std1F1B(2))
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == 2 * 2  # the bias is not cut over "fsdp"
    assert "all-gather" not in executed(compiled, in_loop=True)


def test_axes_that_share_a_dimension():
    """Where the batch's axis is the outer one, a device's shard is in several pieces of the gathered parameter."""
    of_layer = {"up": P(("fsdp", "tensor")), "bias": P(("tensor", "fsdp")), "down": P()}
    with pytest.warns(FsdpWarning) as found:
        check(mesh_of(2, fsdp=2, tensor=2), of_layer, "fsdp", Std1F1B(2))
    assert {str(w.message).count("['up'], ") for w in found} == {1}, "the bias has the axes in the other order"


def explicit(params: Any, x: jax.Array) -> jax.Array:
    """The weights are gathered where they are used, one of them between two operations on its elements."""
    for i, p in enumerate(params):
        up = -jax.sharding.reshard(-p["up"], P(None, None))
        bias, down = jax.sharding.reshard(p["bias"], P(None)), jax.sharding.reshard(p["down"], P(None, None))
        x = x + jnp.tanh(x @ up + bias) @ down
        x = mark_stage_end(x) if i < len(params) - 1 else x
    return x


def test_explicit_axes():
    """The body's own `reshard` and its transpose move nothing: they are around the loop."""
    compiled = check(explicit_mesh(2, fsdp=2), FSDP, "fsdp", Std1F1B(2), apply=explicit)
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == 2 * LEAVES
    assert executed(compiled, in_loop=True) == {}


def tied(params: Any, x: jax.Array) -> jax.Array:
    return explicit([{**p, "up": params[0]["up"]} for p in params], x)


def tied_plain(params: Any, x: jax.Array) -> jax.Array:
    return model([{**p, "up": params[0]["up"]} for p in params], x)


def decayed(params: Any, x: jax.Array) -> jax.Array:
    """A gradient has a term that is no sum over examples, and lies as the parameter does."""
    p = params[0]["up"]
    return explicit(params, x) + jax.sharding.reshard((p * p).sum(), P())


@pytest.mark.slow
def test_explicit_tied_weights():
    compiled = check(explicit_mesh(2, fsdp=2), FSDP, "fsdp", Std1F1B(2), apply=tied, reference=tied_plain)
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == 2 * LEAVES


def test_explicit_gradients_with_a_term_of_their_own():
    def decayed_plain(params: Any, x: jax.Array) -> jax.Array:
        return model(params, x) + (params[0]["up"] ** 2).sum()

    mesh = explicit_mesh(2, fsdp=2)
    with pytest.warns(FsdpWarning, match=r"\['up'\]"):
        check(mesh, FSDP, "fsdp", Std1F1B(2), apply=decayed, reference=decayed_plain)


def constrained(params: Any, x: jax.Array) -> jax.Array:
    """Weights that the model itself keeps sharded; and one of them in two stages."""
    for i, p in enumerate(params):
        up = jax.lax.with_sharding_constraint(params[0]["up"], P("fsdp"))
        x = x + jnp.tanh(x @ up + p["bias"]) @ p["down"]
        x = mark_stage_end(x) if i < len(params) - 1 else x
    return x


def test_tied_weights_with_constraints():
    """A weight of two stages is gathered in both, and each reduces its own part of the gradient once."""
    mesh = mesh_of(2, fsdp=2)
    of_layer = {**FSDP}
    compiled = check(mesh, of_layer, "fsdp", Std1F1B(2), apply=constrained, reference=tied_plain)
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == 2 * LEAVES
    assert executed(compiled, in_loop=True) == {}


def test_two_stages_of_a_rank_gather_once():
    stages, schedule = 4, Interleaved1F1B(4, 2)
    compiled = check(mesh_of(2, fsdp=2), FSDP, "fsdp", schedule)
    after = executed(compiled, in_loop=False)
    assert after["all-gather"] == after["reduce-scatter"] == stages * LEAVES
    assert "all-gather" not in executed(compiled, in_loop=True)


def lower(mesh: MpmdMesh, specs: Any, data: Any, fsdp: Any, apply: Callable[..., Any] = model) -> Any:
    state, batch = state_of(parameters(2)), batch_of(MICROBATCHES, ROWS, DIM, host=True)
    step = mpmd_jit_with_loop(train_step(apply), mesh, in_specs=(specs, data), static_argnums=2, fsdp=fsdp)
    return step.compile(state, batch, Std1F1B(2))


def test_without_a_sharded_parameter():
    data = {"x": P(None, "data"), "y": P(None, "data")}
    text = (
        r"fsdp='step' gathers parameters .* the step has none\. .* partitions P\(None, 'data'\S* inside a rank, whose"
    )
    with pytest.raises(ValueError, match=text):
        lower(mesh_of(2, data=2), P(), data, "step")
    # A batch that every device has whole: then the weights are no FSDP.
    state_specs, _ = specs_of(FSDP, 2, None)
    with pytest.raises(ValueError, match=r"fsdp='step' gathers parameters .* Shard a parameter and the examples over"):
        lower(mesh_of(2, fsdp=2), state_specs, P(), "step")


def test_a_gradient_that_cannot_wait_is_told():
    """The sum of a bfloat16 product that asks for float32 is rounded to bfloat16 behind the sum."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        params = [{**p, "up": p["up"].astype(jnp.bfloat16)} for p in params]
        for i, p in enumerate(params):
            up = jax.lax.dot(x.astype(jnp.bfloat16), p["up"], preferred_element_type=jnp.float32)
            x = x + jnp.tanh(up + p["bias"]) @ p["down"]
            x = mark_stage_end(x) if i < len(params) - 1 else x
        return x

    state_specs, data = specs_of(FSDP, 2, "fsdp")
    with pytest.warns(
        FsdpWarning, match=r"the gradient that updates argument\S*\['up'\], float32\[16,32\], is no sum over"
    ):
        lower(mesh_of(2, fsdp=2), state_specs, data, "step", apply)


def test_explicit_shards_that_are_read_are_told():
    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            up = jax.sharding.reshard(p["up"] * 2, P(None, None))
            x = x + jnp.tanh(x @ up)[:, :DIM]
            x = mark_stage_end(x) if i < len(params) - 1 else x
        return x

    state_specs, data = specs_of(FSDP, 2, "fsdp")
    with pytest.warns(FsdpWarning) as found:
        lower(explicit_mesh(2, fsdp=2), state_specs, data, "step", apply)
    text = r"argument\S*\['up'\], float32\[16@fsdp,32\], is read as shards by `mul` at .*test_fsdp"
    assert any(re.match(text, str(each.message)) for each in found)


@pytest.mark.parametrize("fsdp", ["once", 4096])
def test_an_unknown_setting(fsdp: Any):
    with pytest.raises(ValueError, match=rf'fsdp={fsdp!r} is no known setting. Use "step" .* or "microbatch"'):
        mpmd_jit_with_loop(train_step(), mesh_of(2, fsdp=2), fsdp=fsdp)
