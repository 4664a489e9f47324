"""A scanned stack of layers as stages: the model with one scan per stage equals the model with one scan."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import linen
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.traced import cut_at_every_mark
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.layers.scan import join_layers, join_scanned, split_layers, split_scanned
from jaxpp_flax.schedules import Schedule, Std1F1B
from tests.helpers import batch_of, slow, slow_but, tree_allclose
from tests.matrix.harness import count, mesh_of, run

LAYERS, STAGES, MICROBATCHES, ROWS, DIM = 5, 2, 3, 16, 16
BATCH = batch_of(MICROBATCHES, ROWS, DIM, host=True)
LENGTHS = (3, 2)
AXES: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": nn.broadcast}
TX = optax.sgd(0.1, momentum=0.9)


def train_step(model: Any) -> Any:
    def loss(p: Any, b: Any) -> jax.Array:
        return jnp.mean((model(p, b["x"]) - b["y"]) ** 2)

    def step(state: Any, batch: Any, schedule: Schedule | None) -> Any:
        params, opt_state = state
        losses, grads = treduce(lambda b: jax.value_and_grad(loss)(params, b), batch, schedule)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (losses, grads)

    return step


def compare(
    plain_model: Any, staged_model: Any, params: Any, lengths: Any = LENGTHS, stages: int = STAGES, cuts: Any = None
) -> Any:
    """Two steps of both; the stacked state is carried over to the stages before them, and back after them."""
    state = (params, TX.init(params))
    expected = run(jax.jit(train_step(plain_model), static_argnums=2), state, BATCH, None, 2)
    policy = cut_at_every_mark if cuts is None else lambda marks, n: cuts
    pipelined = mpmd_jit_with_loop(train_step(staged_model), mesh_of(stages), static_argnums=2, cut_policy=policy)
    split = split_scanned(state, "layers", lengths)
    actual = run(pipelined, split, BATCH, Std1F1B(stages), 2)
    for (state, (losses, grads)), (wanted, (wanted_losses, wanted_grads)) in zip(actual, expected, strict=True):
        tree_allclose(losses, wanted_losses)
        tree_allclose(join_scanned(grads, "layers"), wanted_grads)
        tree_allclose(join_scanned(state, "layers"), wanted)
    return pipelined.compile(split, BATCH, Std1F1B(stages)), actual


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
        return x + scale * jnp.tanh(nn.Dense(DIM)(x)), None


class LinenModel(nn.Module):
    """Its layers are recomputed."""

    staged: bool
    stages: Any = STAGES

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.remat(Layer, prevent_cse=False)
        x = nn.Dense(DIM, name="first")(x)
        if self.staged:
            layers = linen.scan(layer, stages=self.stages, length=LAYERS, **AXES)
        else:
            layers = nn.scan(layer, length=LAYERS, **AXES)
        x, _ = layers(name="layers")(x, jnp.float32(0.5))
        return nn.Dense(DIM, name="last")(x)


DIVISIONS = {
    # parts, number of stages, which marks cut, the stage of each part
    "a_number": (STAGES, STAGES, None, (0, 1)),
    "one_layer_in_each_part": ((1, 1, 1, 1, 1), 2, [2], (0, 0, 0, 1, 1)),
    "uneven": ((1, 3, 1), 3, None, (0, 1, 2)),
    "uneven_in_fewer_stages": ((2, 1, 1, 1), 3, [0, 2], (0, 1, 1, 2)),
    "one_stage": ((3, 2), 1, [], (0, 0)),
}


@pytest.mark.parametrize("name", slow_but(DIVISIONS, "uneven_in_fewer_stages"))
def test_linen(name: str):
    """Parts of any lengths, in as many stages or fewer: each stage holds its own layers alone, and scans them once."""
    parts, stages, cuts, home = DIVISIONS[name]
    lengths = LENGTHS if parts == STAGES else parts
    plain = LinenModel(staged=False)
    params = plain.init(jax.random.key(0), BATCH["x"][0])
    staged = LinenModel(staged=True, stages=parts)
    compiled, history = compare(plain.apply, staged.apply, params, parts, stages, cuts)
    ((state, opt_state), (_, grads)) = history[-1]
    for tree in (state, opt_state[0].trace, grads):
        kernels = [tree["params"]["layers"][f"stage_{i}"]["Dense_0"]["kernel"] for i in range(len(lengths))]
        assert [k.shape for k in kernels] == [(n, DIM, DIM) for n in lengths]
        assert [k.mpmd_idxs for k in kernels] == [(rank,) for rank in home]
    assert sum(count(compiled, "scan").values()) == 2 * len(lengths)


@pytest.mark.parametrize("form", [slow("whole"), "split"])
def test_where_a_stack_lives(form: str):
    """Stages that slice one stack hold all of it each, gradients too; after `split_layers`, their own layers."""
    rng = np.random.default_rng(0)
    params = {"layers": (rng.normal(size=(LAYERS, DIM, DIM)) / DIM**0.5).astype(np.float32)}

    def layers(x: jax.Array, stack: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    def whole(p: Any, x: jax.Array) -> jax.Array:
        return layers(mark_stage_end(layers(x, p["layers"][: LENGTHS[0]])), p["layers"][LENGTHS[0] :])

    def split(p: Any, x: jax.Array) -> jax.Array:
        return layers(mark_stage_end(layers(x, p[0]["layers"])), p[1]["layers"])

    def plain(p: Any, x: jax.Array) -> jax.Array:
        return layers(x, p["layers"])

    state = (params, TX.init(params))
    expected = run(jax.jit(train_step(plain), static_argnums=2), state, BATCH, None, 2)[-1][1]
    given = params if form == "whole" else split_layers(params, LENGTHS)
    step = mpmd_jit_with_loop(train_step(whole if form == "whole" else split), mesh_of(STAGES), static_argnums=2)
    (after, _), (losses, grads) = run(step, (given, TX.init(given)), BATCH, Std1F1B(STAGES), 2)[-1]
    tree_allclose((losses, grads if form == "whole" else join_layers(grads)), expected)
    (loop,) = step.compile((given, TX.init(given)), BATCH, Std1F1B(STAGES)).placed.loops
    sums = [a.state.aval.shape for a in loop.partition.accumulators if a.state.aval.ndim == 3]
    if form == "whole":
        assert after["layers"].mpmd_idxs == (0, 1)
        assert sums == [(LAYERS, DIM, DIM)] * 2
    else:
        assert [part["layers"].mpmd_idxs for part in after] == [(0,), (1,)]
        assert sorted(sums) == sorted((n, DIM, DIM) for n in LENGTHS)


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        return x + scale * jnp.tanh(self.linear(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, staged: bool) -> None:
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def make(rngs: nnx.Rngs) -> NnxLayer:
            return NnxLayer(rngs)

        self.first = nnx.Linear(DIM, DIM, rngs=rngs)
        self.layers = nnx.List(split_layers(make(rngs), STAGES)) if staged else make(rngs)
        self.last = nnx.Linear(DIM, DIM, rngs=rngs)
        self.staged = staged

    def __call__(self, x: jax.Array) -> jax.Array:
        x, scale = self.first(x), jnp.float32(0.5)
        scan = nnx.scan(lambda x, layer: layer(x, scale), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        for part in self.layers if self.staged else [self.layers]:
            x = mark_stage_end(scan(x, part))
        return self.last(x)


def test_nnx():
    models = [nnx.split(NnxModel(nnx.Rngs(0), staged)) for staged in (False, True)]
    (plain, params), (staged, staged_params) = models
    # Made from the same key, the parameters are those of the plain model, cut.
    tree_allclose(
        jax.tree.leaves(staged_params), jax.tree.leaves(split_scanned(params, "layers", LENGTHS)), rtol=0, atol=0
    )

    def run_of(graphdef: Any) -> Any:
        return lambda p, x: nnx.merge(graphdef, p, copy=True)(x)

    _, history = compare(run_of(plain), run_of(staged), params)
    kernel = history[-1][0][0]["layers"][1]["linear"]["kernel"].get_value()
    assert (kernel.mpmd_idxs, kernel.shape) == ((1,), (2, DIM, DIM))


def test_there_and_back_again():
    """Bit for bit, through any number of stages, with what stands beside the stack left alone; frozen stacks, too."""
    rng = np.random.default_rng(0)
    params = {"layers": {"w": rng.normal(size=(LAYERS, 2)), "deep": {"b": rng.normal(size=LAYERS)}}, "head": np.ones(3)}
    labels = {"layers": "frozen", "head": "trained"}
    frozen = optax.multi_transform({"frozen": optax.set_to_zero(), "trained": optax.adam(0.1)}, labels)
    tree = {"params": params, "opt": optax.adam(0.1).init(params), "frozen": frozen.init(params)}
    for stages in (1, 2, LAYERS):
        split = split_scanned(tree, "layers", stages)
        assert len(split["params"]["layers"]) == len(split["opt"][0].mu["layers"]) == stages
        tree_allclose(join_scanned(split, "layers"), tree, rtol=0, atol=0)
