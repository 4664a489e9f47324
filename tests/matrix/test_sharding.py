"""Parallelism inside a stage: data, FSDP and tensor axes beside the stages, equal to plain `jax.jit` on the submesh."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.program.program import Transfer
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, treduce
from jaxpp_flax.schedules import Schedule, Std1F1B, ZeroBubble
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly
from tests.helpers import batch_of, slow, tree_allclose
from tests.matrix.harness import count, mesh_of, run

MICROBATCHES, ROWS, DIM = 4, 16, 16
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)
TX = optax.sgd(0.1, momentum=0.9)
_COLLECTIVES = re.compile(
    r" = [^=]*?\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)


def parameters(layers: int) -> list[dict[str, np.ndarray]]:
    """Two products in each layer, as an MLP block has them."""
    rng = np.random.default_rng(0)

    def one(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / rows**0.5).astype(np.float32)

    return [
        {"up": one(DIM, 2 * DIM), "bias": np.zeros(2 * DIM, np.float32), "down": one(2 * DIM, DIM)}
        for _ in range(layers)
    ]


def model(params: Any, x: jax.Array, constrain: Callable[..., Any] = lambda x, spec: x) -> jax.Array:
    for i, p in enumerate(params):
        h = constrain(jnp.tanh(x @ p["up"] + p["bias"]), "hidden")
        x = constrain(x + h @ p["down"], "out")
        x = mark_stage_end(x) if i < len(params) - 1 else x
    return x


def train_step(apply: Callable[..., jax.Array] = model) -> Any:
    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, opt_state = state

        def loss(p: Any, b: Any) -> jax.Array:
            return jnp.mean((apply(p, b["x"]) - b["y"]) ** 2)

        losses, grads = treduce(lambda b: jax.value_and_grad(loss)(params, b), batch, schedule)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (losses, grads)

    return step


def collectives(compiled: CompiledPipeline) -> dict[str, list[str]]:
    """The collectives in the compiled code of each task."""
    found: dict[str, list[str]] = {}
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        found[task.name] = _COLLECTIVES.findall(executable.as_text())
    return found


def in_loop(compiled: CompiledPipeline) -> dict[str, list[str]]:
    """Those of the tasks that run for every microbatch."""
    loop = {t.name for t in compiled.program.tasks if t.stage is not None}
    return {name: found for name, found in collectives(compiled).items() if name in loop and found}


def on_one_submesh(step: Any, state: Any, batch: Any, mesh: MpmdMesh, state_specs: Any, data: Any) -> list[Any]:
    """Two steps under plain `jax.jit` on the first submesh, the arguments sharded alike."""
    sub = mesh.unstack[0]

    def put(specs: Any, tree: Any, target: Any) -> Any:
        is_spec = lambda s: isinstance(s, P)  # noqa: E731
        return jax.tree.map(
            lambda s, x: jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(target, s)), x),
            specs, tree, is_leaf=is_spec,
        )  # fmt: skip

    with jax.set_mesh(sub):
        return run(jax.jit(step, static_argnums=2), put(state_specs, state, sub), put(data, batch, sub), None, 2)


@functools.cache
def plain(layers: int = 2, apply: Callable[..., jax.Array] = model) -> list[Any]:
    """Two steps of a model under plain `jax.jit` on one device, for all meshes that it may lie on."""
    return run(jax.jit(train_step(apply), static_argnums=2), state_of(parameters(layers)), BATCH, None, 2)


def check(
    step: Any, state: Any, batch: Any, mesh: MpmdMesh, *schedules: Schedule,
    state_specs: Any, data: Any, expected: Any = None,
) -> Any:  # fmt: skip
    """Compare with plain `jax.jit` on the first submesh, the arguments sharded alike; or with what is expected."""
    expected = expected or on_one_submesh(step, state, batch, mesh, state_specs, data)
    pipelined = mpmd_jit_with_loop(step, mesh, in_specs=(state_specs, data), static_argnums=2)
    for schedule in schedules or (Std1F1B(mesh.mpmd_dim),):
        actual = run(pipelined, state, batch, schedule, 2)
        tree_allclose(actual, expected)
        compiled = pipelined.compile(state, batch, schedule)
    return compiled, actual, expected


def state_of(params: Any) -> Any:
    return params, TX.init(params)


DATA = {"x": P(None, "data"), "y": P(None, "data")}


@functools.cache
def trained(*names: str) -> Any:
    """What `check` gives of the plain step on two stages, whose axes inside a rank are these."""
    mesh = mesh_of(2, **{name: AXES[name] for name in names})
    of_layer = TENSOR if "tensor" in names else FSDP if "fsdp" in names else dict.fromkeys(TENSOR, P())
    data = {"x": P(None, names[0]), "y": P(None, names[0])}
    return check(train_step(), state_of(parameters(2)), BATCH, mesh, state_specs=specs_of(of_layer), data=data)


AXES = {"data": 2, "tensor": 2, "fsdp": 4}
FSDP = {"up": P("fsdp"), "bias": P("fsdp"), "down": P("fsdp")}
TENSOR = {"up": P(None, "tensor"), "bias": P("tensor"), "down": P("tensor")}


def specs_of(of_layer: Any) -> Any:
    """Of the parameters and the optimizer's state of two layers."""
    return [of_layer] * 2, (optax.TraceState([of_layer] * 2), optax.EmptyState())


def test_data_parallel():
    """Nothing is exchanged while the loop runs; each gradient, and the stacked losses, are reduced once after it."""
    compiled, _, _ = trained("data")
    assert in_loop(compiled) == {}
    after = [kind for name, found in collectives(compiled).items() if name.startswith("outer") for kind in found]
    assert set(after) == {"all-reduce"}
    assert len(after) <= 3 * 2 + 1, "one for each gradient and for the losses, or fewer where XLA combines them"


def test_data_parallel_with_remat():
    """Recomputed layers, too: their weight gradients wait for the end of the loop."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            x = jax.checkpoint(lambda p, x: model([p], x))(p, x)
            x = mark_stage_end(x) if i < len(params) - 1 else x
        return x

    compiled, _, _ = check(
        train_step(apply), state_of(parameters(2)), BATCH, mesh_of(2, data=2),
        state_specs=P(), data=DATA, expected=plain(),
    )  # fmt: skip
    assert in_loop(compiled) == {}
    # Two products forward; backward two for each of two weights, less one whose input is the batch, and one again.
    assert count(compiled, "dot_general") == {"fwd_0": 2, "fwd_bwd_1": 2 + 4 + 1, "bwd_0": 3 + 1}


def test_data_parallel_zero_bubble():
    check(
        train_step(), state_of(parameters(2)), BATCH, mesh_of(2, data=2), ZeroBubble(2),
        state_specs=P(), data=DATA, expected=plain(),
    )  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
def test_metrics_summed_over_the_sharded_batch(training: bool):
    """They wait for the end of the loop as gradients do, numbers too, and are work of the forward all the same."""
    schedule = Std1F1B(2)

    def step(params: Any, batch: Any, schedule: Schedule | None) -> Any:
        def loss(p: Any, b: Any) -> Any:
            y = model(p, b["x"])
            return jnp.mean((y - b["y"]) ** 2), {"columns": y.sum(0), "mean": y.mean(0), "norm": (y * y).sum()}

        body = jax.value_and_grad(loss, has_aux=True) if training else loss
        return treduce(lambda b: body(params, b), batch, schedule, operation=Add)

    params, batch = parameters(2), BATCH
    specs = (P(), P(None, "data"))
    pipelined = mpmd_jit_with_loop(step, mesh_of(2, data=2), in_specs=specs, static_argnums=2)
    schedule = schedule if training else ForwardOnly(schedule)
    tree_allclose(pipelined(params, batch, schedule), jax.jit(step, static_argnums=2)(params, batch, None), rtol=1e-5)
    assert in_loop(pipelined.compile(params, batch, schedule)) == {}


def test_tensor_parallel():
    """Megatron's split: one all-reduce of activations per layer and direction, weights never gathered."""
    compiled, actual, _ = trained("data", "tensor")
    assert {kind for kinds in in_loop(compiled).values() for kind in kinds} == {"all-reduce"}
    assert len(in_loop(compiled)["fwd_0"]) == 1
    (params, _), (_, grads) = actual[-1]
    for layer in (*params, *grads):
        assert {k: v.spec for k, v in layer.items()} == TENSOR


def test_fsdp():
    """Parameters, accumulators and optimizer state stay sharded; weights are gathered where they are used."""
    compiled, actual, _ = trained("fsdp")
    (params, _), (_, grads) = actual[-1]
    for layer in (*params, *grads):
        assert {k: v.spec for k, v in layer.items()} == FSDP
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        for output, _ in task.pins:
            spec = executable.output_shardings[output].spec
            assert spec[0] == "fsdp", f"accumulator {output} of {task.name} is partitioned as {spec}"


def test_what_a_step_returns_fits_the_next():
    """Results are partitioned as the arguments were, so the second step compiles nothing."""
    data = {"x": P(None, "fsdp"), "y": P(None, "fsdp")}
    pipelined = mpmd_jit_with_loop(
        train_step(), mesh_of(2, fsdp=4), in_specs=(specs_of(FSDP), data), static_argnums=2
    )  # fmt: skip
    state = state_of(parameters(2))
    compiled = pipelined.compile(state, BATCH, Std1F1B(2))
    state, _ = pipelined(state, BATCH, Std1F1B(2))
    assert pipelined.compile(state, BATCH, Std1F1B(2)) is compiled
    for argument, result in zip(jax.tree.leaves(specs_of(FSDP)), jax.tree.leaves(state), strict=True):
        assert result.spec == argument


@pytest.mark.parametrize(("way", "axis_type"), [("spec", "auto"), ("whole_mesh", "explicit")])
def test_constraints(way: str, axis_type: str):
    """Written with a PartitionSpec, or with a NamedSharding of the whole mesh, which no stage sees."""
    mesh = mesh_of(2, data=2, tensor=2) if axis_type == "auto" else explicit_mesh(2, data=2, tensor=2)
    names = {"hidden": P("data", "tensor"), "out": P("data", None)}

    def pipelined_constraint(x: jax.Array, which: str) -> jax.Array:
        spec = names[which] if way == "spec" else NamedSharding(mesh.jax_mesh, names[which])
        return constrain(x, spec)

    constrain = jax.lax.with_sharding_constraint if axis_type == "auto" else jax.sharding.reshard

    state = state_of(parameters(2))
    state_specs = specs_of(TENSOR)
    apply = model if axis_type == "auto" else explicit_model
    step = train_step(lambda p, x: apply(p, x, pipelined_constraint))
    pipelined = mpmd_jit_with_loop(step, mesh, in_specs=(state_specs, DATA), static_argnums=2)
    actual = run(pipelined, state, BATCH, Std1F1B(2), 2)
    tree_allclose(actual, plain())
    compiled = pipelined.compile(state, BATCH, Std1F1B(2))
    (task,) = [i for i, t in enumerate(compiled.program.tasks) if t.name == "fwd_0"]
    specs_out = [s.spec for s in compiled.executables.tasks[task].output_shardings]
    assert P("data", "tensor") in specs_out, "the hidden activation is sharded over both axes, as asked"


def explicit_model(params: Any, x: jax.Array, constrain: Callable[..., Any] = lambda x, spec: x) -> jax.Array:
    """As `model`; where axes are part of the types, a product over a sharded dimension is told how to lie."""
    for i, p in enumerate(params):
        h = constrain(jnp.tanh(x @ p["up"] + p["bias"]), "hidden")
        x = constrain(x + jnp.einsum("bh,ho->bo", h, p["down"], out_sharding=P("data", None)), "out")
        x = mark_stage_end(x) if i < len(params) - 1 else x
    return x


def explicit_mesh(num_ranks: int, **axes: int) -> MpmdMesh:
    shape = (num_ranks, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("stage", *axes), axis_types=(AxisType.Explicit,) * len(shape))
    return MpmdMesh(mesh, "stage")


def test_explicit_data_parallel():
    compiled, _, _ = check(
        train_step(), state_of(parameters(2)), BATCH, explicit_mesh(2, data=2),
        state_specs=P(), data=DATA, expected=plain(),
    )  # fmt: skip
    assert in_loop(compiled) == {}


def stacked(layers: int) -> dict[str, np.ndarray]:
    parts = parameters(layers)
    return {name: np.stack([p[name] for p in parts]) for name in parts[0]}


@pytest.mark.parametrize("mesh", [mesh_of, slow(explicit_mesh)])
def test_data_parallel_under_scan(mesh: Callable[..., MpmdMesh]):
    """Gradients that a scan stacks (of layers) or adds up (of a shared one) are reduced once after the loop, too."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        each, shared = params[0], {name: leaf[0] for name, leaf in params[1].items()}
        layer = jax.checkpoint(lambda x, p: (model([p], x), None), prevent_cse=False)
        x = mark_stage_end(jax.lax.scan(layer, x, each)[0])
        return jax.lax.scan(lambda x, _: (model([shared], x), None), x, length=2)[0]

    state = state_of([stacked(3), stacked(1)])
    compiled, _, _ = check(train_step(apply), state, BATCH, mesh(2, data=2), state_specs=P(), data=DATA)
    assert in_loop(compiled) == {}
    after = [kind for name, found in collectives(compiled).items() if name.startswith("outer") for kind in found]
    assert set(after) == {"all-reduce"}


def test_data_parallel_recurrence():
    """A scan over time whose state begins as zeros, without a trace of the batch."""

    def apply(params: Any, x: jax.Array) -> jax.Array:
        p = params[0]

        def cell(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(state @ p["down"].T @ p["down"] + x[:, None] * p["bias"][:DIM])
            return state, state.sum(1)

        _, x = jax.lax.scan(cell, jnp.zeros((ROWS, DIM)), x.T)
        return model(params[1:], mark_stage_end(x.T))

    compiled, _, _ = check(
        train_step(apply), state_of(parameters(2)), BATCH, mesh_of(2, data=2), state_specs=P(), data=DATA
    )
    assert in_loop(compiled) == {}


@pytest.mark.parametrize("names", [("data",), ("data", "tensor"), ("fsdp",)], ids="_".join)
def test_shardings_are_those_of_one_program(names: tuple[str, ...]):
    """Activations, cotangents and gradients lie as XLA's propagation through the whole program has them."""
    compiled, actual, expected = trained(*names)
    sub, batch_axis = compiled.mpmd_mesh.unstack[0], names[0]
    of_layer = TENSOR if "tensor" in names else FSDP if "fsdp" in names else dict.fromkeys(TENSOR, P())
    for got, wanted in zip(jax.tree.leaves(actual[-1]), jax.tree.leaves(expected[-1]), strict=True):
        assert wanted.sharding.is_equivalent_to(NamedSharding(sub, got.spec), wanted.ndim)

    def whole(params: Any, x: jax.Array, y: jax.Array) -> Any:
        activation = model(params[:1], x)
        loss = lambda a: jnp.mean((model(params[1:], a) - y) ** 2)  # noqa: E731
        return activation, jax.grad(loss)(activation)

    args = (parameters(2), BATCH["x"][0], BATCH["y"][0])
    lies = jax.tree.map(lambda s: NamedSharding(sub, s), ([of_layer] * 2, P(batch_axis), P(batch_axis)))
    one_program = jax.jit(whole, in_shardings=lies).lower(*args).compile().output_shardings
    crossing = {
        instruction.source: compiled.executables.held[instruction.received[0]].spec
        for instruction in compiled.program.instructions
        if isinstance(instruction, Transfer) and len(instruction.sent) == 1
    }
    for rank, wanted in enumerate(one_program):
        assert wanted.is_equivalent_to(NamedSharding(sub, crossing[rank]), 2), (rank, wanted, crossing)
