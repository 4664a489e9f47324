"""`remat=` on the trainer and on blocks: the same training, and a block recomputes itself alone."""

from __future__ import annotations

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage, PipelineTrainer, pipeline_stage
from jaxpp_flax.schedules import ResidualPlan, StageResiduals
from jaxpp_flax.trainers import Memory
from tests.helpers import slow, slow_but, tree_allclose
from tests.matrix.harness import count
from tests.trainers import models as m

STAGES, MICROBATCHES = 2, 2
BATCH = m.make_xy(2 * MICROBATCHES, m.WIDTH)


def blocks(remat=None):
    """Two stages of two blocks; a block has two products, and the second one has dropout."""
    made = [m.Block(rngs=nnx.Rngs(i), dropout=0.3 * (i == 1)) for i in range(2 * STAGES)]
    return m.Chain(PipelineStage(block, name=f"block_{i}", remat=remat) for i, block in enumerate(made))


def train(model, **options):
    made = PipelineTrainer(
        model,
        optax.sgd(0.1),
        m.squared_error,
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        logging=False,
        **options,
    )
    compiled = made.compile(BATCH)
    losses = [float(made.train_step(BATCH)["loss"]) for _ in range(2)]
    state = [np.asarray(leaf) for leaf in jax.tree.leaves((made.state.params, _arrays(made.state.model_state)))]
    return losses, state, count(compiled, "dot_general"), compiled.stages[0].activation_bytes


def _arrays(tree):
    return [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


@functools.cache
def plain():
    return train(blocks())


# The step's first product has no gradient of its input. Each of a stage's two blocks does its first product again:
# nothing in its gradient needs the second one. A block that recomputed the one before it would add that one's two.
CASES = {
    "trainer": ({"memory": Memory(remat="full")}, None, 2),
    "blocks": ({}, "full", 2),
    "policy": ({"memory": Memory(remat=jax.checkpoint_policies.dots_saveable)}, None, 0),
}


@pytest.mark.parametrize("case", slow_but(CASES, "trainer"))
def test_equals_plain_and_a_block_recomputes_itself_alone(case):
    options, of_blocks, again = CASES[case]
    losses, state, products, kept = plain()
    found = train(blocks(of_blocks), **options)
    # One rounding is 6e-8; recomputed values may be fused in another way.
    np.testing.assert_allclose(found[0], losses, rtol=1e-6)
    tree_allclose(found[1], state)
    assert (products["fwd_0"], products["bwd_0"]) == (4, 7)
    assert (found[2]["fwd_0"], found[2]["bwd_0"]) == (4, 7 + again)
    assert found[3] < kept, "less is kept for backward"


class LinenModel(nn.Module):
    """As above: two stages of two blocks, whose remat is Flax's own (`nn.remat`) or the mark's."""

    of_blocks: str | None = None

    @nn.compact
    def __call__(self, x, training=True):
        for i in range(2 * STAGES):
            kind = nn.remat(m.LinenBlock, static_argnums=(2,)) if self.of_blocks == "nn.remat" else m.LinenBlock
            remat = "full" if self.of_blocks == "mark" else None
            x = linen_pipeline.PipelineStage(kind(0.3 * (i == 1), name=f"block_{i}"), remat=remat)(x, training)
        return x


def train_linen(of_blocks=None, **options):
    module = LinenModel(of_blocks)
    variables = LinenModel().init(jax.random.key(0), BATCH["x"], False)
    return train(module, variables=variables, **options)


@functools.cache
def plain_linen():
    return train_linen()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["trainer", "mark", "nn.remat", "policy"])
def test_linen_equals_plain_and_a_block_recomputes_itself_alone(way):
    policies = {"trainer": "full", "policy": jax.checkpoint_policies.dots_saveable}
    losses, state, products, kept = plain_linen()
    found = train_linen(way, memory=Memory(remat=policies.get(way)))
    np.testing.assert_allclose(found[0], losses, rtol=1e-6)  # as above
    tree_allclose(found[1], state)
    assert (products["fwd_0"], products["bwd_0"]) == (4, 7)
    assert (found[2]["fwd_0"], found[2]["bwd_0"]) == (4, 7 + (0 if way == "policy" else 2))
    assert found[3] < kept, "less is kept for backward"


def test_a_marked_linen_block_recomputes_itself_alone():
    """Under plain `jax.grad`, where a mark does nothing else."""
    variables = jax.jit(LinenModel().init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCH["x"])

    def loss(of_blocks, variables):
        return LinenModel(of_blocks).apply(variables, BATCH["x"], rngs={"dropout": jax.random.key(1)}).sum()

    gradients = [jax.grad(functools.partial(loss, way)) for way in (None, "mark")]
    products = [str(jax.make_jaxpr(gradient)(variables)).count("dot_general") for gradient in gradients]
    assert products == [8 + 15, 8 + 15 + 4], "the first product of each block again"
    tree_allclose(*jax.jit(lambda variables: [gradient(variables) for gradient in gradients])(variables))


def test_functions_keep_python_arguments_and_policies_by_name():
    policy = jax.checkpoint_policies.save_only_these_names("hidden")

    def layer(w, x, activation, *, scale=None):
        y = getattr(jnp, activation)(checkpoint_name(x @ w["a"], "hidden"))
        return jnp.sin(y @ w["b"]) * (1.0 if scale is None else scale)

    w, x = {"a": jnp.eye(3) * 0.3, "b": jnp.eye(3) * 0.7}, jnp.ones((2, 3))
    marked = pipeline_stage(layer, remat=policy)
    loss = lambda f: lambda w: f(w, x, "tanh", scale=2.0).sum()  # noqa: E731
    tree_allclose(jax.grad(loss(marked))(w), jax.grad(loss(layer))(w))
    text = str(jax.make_jaxpr(jax.grad(loss(marked)))(w))
    full = str(jax.make_jaxpr(jax.grad(loss(pipeline_stage(layer, remat="full"))))(w))
    assert full.count("dot_general") - text.count("dot_general") == 1


def test_marked_classes_can_be_pickled_and_named():
    block = linen_pipeline.PipelineStage(m.LinenBlock(), remat="full")
    assert pickle.loads(pickle.dumps(type(block))).stage_remat == "full"
    assert PipelineStage(m.Block(rngs=nnx.Rngs(0)), remat="full").stage_remat == "full"


def test_what_is_no_remat_is_refused():
    block = m.Block(rngs=nnx.Rngs(0))
    for where, make in {
        "PipelineStage": lambda: PipelineStage(block, remat=True),
        "linen.PipelineStage": lambda: linen_pipeline.PipelineStage(m.LinenBlock(), remat=True),
        "pipeline_stage": lambda: pipeline_stage(remat=True),
        "Memory": lambda: Memory(remat=True),
    }.items():
        with pytest.raises(TypeError, match=rf"^{where} got remat=True\. Use None .*, 'full'"):
            make()


@pytest.fixture
def remat3():
    """JAX's other implementation of `jax.checkpoint`."""
    before = getattr(jax.config, "jax_remat3")  # noqa: B009, as it is not among the typed names
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


@pytest.mark.parametrize("case", slow_but(CASES, "trainer"))
def test_a_block_recomputes_itself_alone_in_both_implementations(case, remat3):
    options, of_blocks, again = CASES[case]
    losses, state, products, kept = train(blocks(of_blocks), **options)
    expected_losses, expected_state, *_ = plain()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    tree_allclose(state, expected_state)
    assert (products["fwd_0"], products["bwd_0"]) == (4, 7 + again)
    assert kept < plain()[3], "less is kept for backward"


@pytest.mark.parametrize("schedule", [slow("gpipe"), "1f1b"])
def test_stages_hold_their_own_parameters_in_both_implementations(schedule, remat3):
    memory = Memory(remat="full")
    made = PipelineTrainer(
        blocks(), optax.sgd(0.1), m.squared_error, num_stages=4, num_microbatches=2, schedule=schedule, memory=memory,
        logging=False,
    )  # fmt: skip
    counts = [stage.parameter_count for stage in made.compile(BATCH).stages]
    assert counts == [sum(x.size for x in jax.tree.leaves(nnx.state(m.Block(rngs=nnx.Rngs(0)), nnx.Param)))] * 4


def barriers(model, data, **options):
    """The barriers of each task of a loop, as XLA gets them; and the bytes that the first stage keeps."""
    made = PipelineTrainer(
        model, optax.sgd(0.1), m.squared_error, num_stages=STAGES, num_microbatches=MICROBATCHES, mesh={"data": data},
        logging=False, **options,
    )  # fmt: skip
    compiled, found = made.compile(m.make_xy(4 * MICROBATCHES, m.WIDTH)), {}
    for task in compiled.program.tasks:
        if task.stage is not None:
            structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in task.graph.inputs]
            found[task.name] = jax.jit(task.graph.run).lower(*structs).as_text().count("optimization_barrier")
    return found, compiled.stages[0].activation_bytes


class Layers(nnx.Module):
    """A scan over blocks that recompute themselves."""

    def __init__(self, seed):
        make = nnx.vmap(lambda key: m.Block(rngs=nnx.Rngs(key)))
        self.layers = make(jax.random.split(jax.random.key(seed), 3))

    def __call__(self, x):
        scan = nnx.scan(nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.layers)


def wrapped(wrap):
    """Two stages of two blocks, each in `wrap`."""
    return m.Chain(PipelineStage(wrap(m.Block(rngs=nnx.Rngs(i))), name=f"block_{i}") for i in range(2 * STAGES))


class Rematted(nnx.Module):
    def __init__(self, block):
        self.block = block

    def __call__(self, x):
        return nnx.remat(lambda block, x: block(x))(self.block, x)


RECOMPUTE = ResidualPlan([StageResiduals(recompute=True)] * STAGES)
# The loss is one more region, if the trainer's remat is around it.
REGIONS = {
    "nnx.remat": (lambda: wrapped(Rematted), {}, 2),
    "block": (lambda: blocks("full"), {}, 2),
    "policy": (lambda: blocks(jax.checkpoint_policies.dots_saveable), {}, 2),
    "trainer": (blocks, {"memory": Memory(remat="full")}, 3),
    "scan": (lambda: m.Chain(PipelineStage(Layers(i), name=f"layers_{i}") for i in range(STAGES)), {}, 1),
    "nnx.remat in a stage that recomputes": (lambda: wrapped(Rematted), {"memory": Memory(residuals=RECOMPUTE)}, 2),
}


@pytest.mark.parametrize("schedule", [slow("gpipe"), "1f1b"])
@pytest.mark.parametrize("case", slow_but(REGIONS, "nnx.remat", "nnx.remat in a stage that recomputes"))
def test_each_region_keeps_its_barrier_with_a_data_axis(case, schedule):
    """Without it, accelerators undo the recomputation, or hold the values of all regions at once."""
    make, options, regions = REGIONS[case]
    alone, kept = barriers(make(), 1, schedule=schedule, **options)
    last = "fwd_bwd_1" if schedule == "1f1b" else "bwd_1"
    assert alone["fwd_0"] == 0
    assert (alone["bwd_0"], alone[last]) == (min(regions, 2), regions)
    assert barriers(make(), 2, schedule=schedule, **options) == (alone, kept)


@pytest.mark.parametrize("policy", ["full", slow(jax.checkpoint_policies.dots_saveable)], ids=["full", "policy"])
def test_a_stage_of_blocks_with_remat_recomputes_its_residuals_on_a_data_axis(policy):
    made = lambda **options: barriers(blocks(policy), 2, schedule="gpipe", **options)[1]  # noqa: E731
    assert made(memory=Memory(residuals=RECOMPUTE)) < made()
