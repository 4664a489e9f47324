"""Flax modules by name: a transformer of named blocks as Shardy:MPMD shows one, and an NNX model."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import mpmd
from tests.helpers import tree_allclose
from tests.mpmd.programs import WIDTH, config, in_runs, normal, topology


class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(y))


class Transformer(nn.Module):
    named: bool
    layers: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            block: Any = mpmd.flax.named_computation(Block, name=f"block_{i}") if self.named else Block
            x = block()(x)
        return x


@functools.cache
def first_params(layers: int) -> Any:
    return jax.jit(Transformer(False, layers).init)(jax.random.key(0), normal(1, 6).reshape(2, 3, WIDTH))["params"]


def state_of(model: Transformer) -> train_state.TrainState:
    # Linen draws other weights and masks inside of a lifted transform: both models start from the plain one's.
    params = first_params(model.layers)
    # SGD: Adam would amplify the rounding of gradients near zero.
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1e-3, momentum=0.9))


def make_microbatch_step(state, targets):
    def loss_fn(params, x):
        return jnp.mean((state.apply_fn({"params": params}, x) - targets) ** 2)

    def microbatch_step(carry, params, x):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss_fn)(params, x))

    return microbatch_step


def zero_carry(state):
    return jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)


def train_step(state, xs, targets):
    microbatch_step, carry = make_microbatch_step(state, targets), zero_carry(state)
    for i, x in enumerate(xs):
        carry = mpmd.call(microbatch_step, call_counter=i)(carry, state.params, x)
    loss, grads = carry
    return state.apply_gradients(grads=grads), loss


@functools.cache
def expected(layers: int, microbatches: int):
    """The unnamed model, three steps under plain jax.jit, which compiles one microbatch and the update."""
    x, *xs = (normal(seed, 6).reshape(2, 3, WIDTH) for seed in range(1 + microbatches))
    state, losses = state_of(Transformer(False, layers)), []
    step = jax.jit(make_microbatch_step(state, x))
    update = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    for _ in range(3):
        carry = zero_carry(state)
        for one in xs:
            carry = step(carry, state.params, one)
        losses.append(carry[0])
        state = update(state, carry[1])
    return tuple(xs), x, state, losses


def circular(layers: int) -> tuple[dict[str, str], dict[str, int]]:
    return ({f"block_{i}": f"m{i % 4}" for i in range(layers)}, {f"block_{i}": i // 2 for i in range(layers)})


def basic(layers: int) -> tuple[dict[str, str], None]:
    return in_runs(layers, min(4, layers)), None


def test_a_transformer_trains():
    train_named(2, "GPIPE", basic, microbatches=2)


# Compiled quickly, plain `jax.jit` in float32 is itself 0.74 of the tolerance away from float64; optimized, 0.15.
@pytest.mark.full_compilation
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "assign"),
    [("ONE_FWD_ONE_BWD", basic), ("GPIPE", basic), ("CIRCULAR", circular), ("ZERO_BUBBLE_H1", basic)],
)
def test_the_transformer_of_24_blocks_trains(schedule: str, assign: Any):
    train_named(24, schedule, assign)


def train_named(layers: int, schedule: str, assign: Any, microbatches: int = 4) -> None:
    """Three steps of a model of named blocks on up to four meshes, compared with the unnamed one."""
    xs, x, plain, losses = expected(layers, microbatches)
    assignment, stages = assign(layers)
    names = sorted({*assignment.values()})
    devices = np.array(jax.devices()).reshape(4, 1, 2)
    meshes = {name: Mesh(devices[i], ("stage", "data")) for i, name in enumerate(names)}
    cfg = mpmd.make_config(
        topology=meshes,
        name_to_mesh_assignment=assignment,
        name_to_stage_assignment=stages,
        partitioning_options=mpmd.PartitioningOptions(mpmd_pipeline_schedule=schedule),
    )
    state = state_of(Transformer(True, layers))
    assert jax.tree.structure(state.params) == jax.tree.structure(plain.params), "a name changed a parameter's path"

    def sharding(leaf):
        return NamedSharding(cfg.sharding_mesh, P("data") if getattr(leaf, "ndim", 0) else P())

    lowered = mpmd.jit(
        train_step,
        mpmd_config=cfg,
        in_shardings=(jax.tree.map(sharding, state), sharding(x), sharding(x)),
    ).lower(state, xs, x)
    compiled = lowered.compile()
    state, xs, x = jax.device_put((state, xs, x), lowered.function_named_shardings.input_specs)
    for wanted in losses:
        state, loss = compiled(state, xs, x)
        tree_allclose(loss, wanted)
    tree_allclose(state.params, plain.params)
    # What comes back is where the next step wants it: nothing is moved between steps.
    where = lowered.function_named_shardings.input_specs[0]
    assert jax.tree.map(lambda leaf: leaf.sharding, state.params) == where.params
    assert len({leaf.sharding.mesh for leaf in jax.tree.leaves(state.params)}) == len(meshes)


def test_mutable_collections_and_dropout_inside_of_a_name():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x))
            return nn.Dropout(0.5, deterministic=not train)(x)

    class Model(nn.Module):
        named: bool

        @nn.compact
        def __call__(self, x, *, train):
            for i in range(2):
                cls = mpmd.flax.named_computation(Normed, name=f"block_{i}", static_argnames="train")
                x = (cls if self.named else Normed)()(x, train=train)
            return x

    def fun_of(model):
        def fun(variables, x, key):
            def loss(params):
                y, new = model.apply(
                    {**variables, "params": params}, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
                )
                return jnp.mean(y**2), new

            return jax.value_and_grad(loss, has_aux=True)(variables["params"])

        return fun

    x, key = normal(0, 4), jax.random.key(1)
    variables = jax.jit(functools.partial(Model(named=False).init, train=False))(jax.random.key(2), x)
    named = fun_of(Model(named=True))
    step = mpmd.jit(named, config(topology(1, 1), {"block_0": "m0", "block_1": "m1"}))
    # Against the same model under plain jax.jit: Linen draws other masks inside of a lifted transform.
    # A bias in front of a BatchNorm has no gradient but rounding: atol is that of a sum of 30 float32 terms near 1.
    tree_allclose(step(variables, x, key), jax.jit(named)(variables, x, key), atol=1e-6)


def test_nnx_modules():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return nnx.relu(self.linear(x))

    class Model(nnx.Module):
        def __init__(self, rngs):
            classes = [mpmd.flax.named_computation(Layer, name=f"block_{i}") for i in range(2)]
            self.layers = nnx.List([cls(rngs) for cls in classes])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    graphdef, params = nnx.split(Model(nnx.Rngs(0)))

    def fun(params, x):
        return jax.value_and_grad(lambda p: jnp.mean(nnx.merge(graphdef, p)(x) ** 2))(params)

    x = normal(0, 4)
    lowered = mpmd.jit(fun, config(topology(1, 1), {"block_0": "m0", "block_1": "m1"})).lower(params, x)
    meshes = lowered.function_mesh_assignment.output_meshes
    assert set(jax.tree.leaves(meshes)) == {"m0", "m1"}
    tree_allclose(lowered.compile()(params, x), jax.jit(fun)(params, x))
