"""Further patterns of JaxPP's documentation and tests: dropout, results that are inputs, delayed reductions."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from tests.helpers import tree_allclose

WIDTH, MICROBATCHES = 8, 4
COLLECTIVES = re.compile(r"= (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def mesh_of(stages: int, data: int = 1, kind: AxisType = AxisType.Auto) -> jaxpp.MpmdMesh:
    devices = np.array(jax.devices()[: stages * data]).reshape(stages, data)
    return jaxpp.MpmdMesh(Mesh(devices, ("stage", "data"), axis_types=(kind, kind)), "stage")


class TrainState(train_state.TrainState):
    key: jax.Array


class DropoutModel(nn.Module):
    stages: int

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> Any:
        hidden = x
        for stage in range(self.stages):
            hidden = nn.Dropout(rate=0.5, deterministic=False)(nn.tanh(nn.Dense(WIDTH)(hidden)))
            if stage < self.stages - 1:
                hidden = jaxpp.mark_stage_end(hidden)
        return hidden + y, x, y


def test_dropout_and_results_that_are_inputs():
    model, stages = DropoutModel(2), 2

    def train_step(state: TrainState, inputs: Any, targets: jax.Array) -> Any:
        key = jax.random.fold_in(state.key, state.step)

        def loss_fn(params: Any, data: Any) -> Any:
            (x, y), target = data
            logits, x_out, y_out = state.apply_fn({"params": params}, x=x, y=y, rngs={"dropout": key})
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            return loss.mean(), (logits, x_out, y_out)

        (loss, aux), grads = jaxpp.treduce(
            partial(jax.value_and_grad(loss_fn, has_aux=True, argnums=0), state.params),
            (inputs, targets),
            schedule=jaxpp.Eager1F1B(num_stages=stages),
        )
        return state.apply_gradients(grads=grads), loss.mean(), aux

    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (jax.random.uniform(key, (MICROBATCHES, 2, WIDTH)) for key in keys[:2])
    targets = jnp.arange(MICROBATCHES * 2).reshape(MICROBATCHES, 2) % WIDTH
    params = model.init({"params": keys[0], "dropout": keys[1]}, x[0], y[0])["params"]
    start = TrainState.create(apply_fn=model.apply, params=params, key=keys[2], tx=optax.sgd(0.1, momentum=0.9))
    pipelined = jaxpp.mpmd_jit_with_loop(train_step, mpmd_mesh=mesh_of(stages))
    plain = jax.jit(train_step)
    states, expected = (start, start), None
    for _ in range(2):
        (state, *rest), (plain_state, *expected) = (
            step(state, (x, y), targets) for step, state in zip((pipelined, plain), states, strict=True)
        )
        states = state, plain_state
        tree_allclose((state.params, state.opt_state, rest), (plain_state.params, plain_state.opt_state, expected))
    loss, (_, x_out, y_out) = rest
    assert f"{loss:.3f}" == f"{float(loss):.3f}"
    np.testing.assert_array_equal(x_out, x)
    np.testing.assert_array_equal(y_out, y)


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((jaxpp.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1]) ** 2)


PARAMS = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(2)]
BATCH = jax.random.normal(jax.random.key(2), (MICROBATCHES, 4, WIDTH))


def all_reduces(compiled: Any) -> dict[bool, int]:
    """How many all-reduces of gradients the tasks in the loop hold (True), and those outside of it."""
    found = {True: 0, False: 0}
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        shapes = re.findall(r"= (\(?f32\[.*) all-reduce(?:-start)?\(", executable.as_text())
        found[task.stage is not None] += sum(shape.count(f"{WIDTH},{WIDTH}]") for shape in shapes)
    return found


def expected_gradients() -> Any:
    gradients = [jax.grad(loss_fn)(PARAMS, x) for x in BATCH]
    return jax.tree.map(lambda *parts: sum(parts), *gradients)


def test_reductions_delayed_by_types_are_refused_and_not_needed():
    def step(params: Any, batch: Any, *, typed: bool) -> Any:
        if typed:
            params = [jax.sharding.reshard(w, P(reduced={"data"})) for w in params]
        grads = jaxpp.treduce(
            partial(jax.grad(loss_fn), params), batch, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add
        )  # fmt: skip
        return [jax.sharding.reshard(g, P()) for g in grads] if typed else grads

    mesh = mesh_of(2, 2, AxisType.Explicit)
    specs = (P(), P(None, "data"))
    typed = jaxpp.mpmd_jit_with_loop(partial(step, typed=True), mesh, in_specs=specs)
    with pytest.raises(
        NotImplementedError, match=r"partial sums over \['data'\].* reduced once, after the loop.* Drop"
    ):
        typed.compile(PARAMS, BATCH)
    compiled = jaxpp.mpmd_jit_with_loop(partial(step, typed=False), mesh, in_specs=specs).compile(PARAMS, BATCH)
    tree_allclose(compiled(PARAMS, BATCH), expected_gradients())
    assert all_reduces(compiled) == {True: 0, False: 2}
    # Under plain JAX the types may stay: the loop's accumulators take them on.
    with jax.set_mesh(mesh.unstack[0]):
        batch = jax.device_put(BATCH, NamedSharding(mesh.unstack[0], P(None, "data")))
        tree_allclose(jax.jit(partial(step, typed=True))(PARAMS, batch), expected_gradients())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_reductions_delayed_by_a_mapped_dimension(kind: AxisType):
    """No task in the loop talks over "data"; each gradient is reduced once, by the step's own sum after the loop."""
    mesh = mesh_of(2, 2, kind)
    shards = NamedSharding(mesh.lowering_mesh(), P("data"))
    auto = kind == AxisType.Auto

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        if auto:  # as `nn.with_logical_constraint` does: `vmap` adds its own axis in front
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh.lowering_mesh(), P(None, None)))
        return loss_fn(params, x)

    def step(params: Any, batch: Any, *, constrained: bool = auto) -> Any:
        losses, grads = jaxpp.treduce(
            jax.vmap(partial(jax.value_and_grad(loss), params), spmd_axis_name="data"),
            batch, axis=1, schedule=jaxpp.Std1F1B(2), operation=(jaxpp.Concat(axis=1), jaxpp.Add),
        )  # fmt: skip
        if constrained:
            grads = [jax.lax.with_sharding_constraint(g, shards) for g in grads]
        return losses, [p - 0.1 * g.sum(axis=0) for p, g in zip(params, grads, strict=True)]

    batch = BATCH.reshape(2, MICROBATCHES, 2, WIDTH)
    losses = jax.vmap(jax.vmap(partial(loss_fn, PARAMS)))(batch)
    grads = jax.grad(lambda params: jax.vmap(jax.vmap(partial(loss_fn, params)))(batch).sum())(PARAMS)
    expected = losses, [p - 0.1 * g for p, g in zip(PARAMS, grads, strict=True)]
    for constrained in {auto, False}:
        pipelined = jaxpp.mpmd_jit_with_loop(
            partial(step, constrained=constrained), mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P())
        )
        compiled = pipelined.compile(PARAMS, batch)
        tree_allclose(compiled(PARAMS, batch), expected)
        in_loop, after = collectives(compiled)
        assert in_loop == []
        assert sorted(after) == ["all-reduce", "all-reduce"], "one for each of the two parameters"


def collectives(compiled: Any) -> tuple[list[str], list[str]]:
    """The collectives of the loop's tasks, and those of all others: one entry for each array that they take."""
    found: tuple[list[str], list[str]] = [], []
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        for shapes, name in COLLECTIVES.findall(executable.as_text()):
            found[task.stage is None].extend([name] * len(re.findall(r"\w+\[", shapes)))
    return found
