"""The trainer balances: results stay those of plain training, and the slowest rank gets less."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from rich.console import Console

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import AssignmentError, Plan, plan
from jaxpp_flax.trainers import Inference, MeshOptions
from tests.helpers import slow
from tests.trainers import models as m
from tests.trainers.sharing import assign_stages

VOCABULARY, WIDTH, ROWS = 512, 64, 8

pytestmark = pytest.mark.usefixtures("verified")


class Tower(nnx.Module):
    """Six small blocks between an embedding and a head many times their size."""

    def __init__(self, rngs: nnx.Rngs, fsdp: bool = False):
        init = nnx.initializers.lecun_normal()
        kernel = nnx.with_partitioning(init, ("fsdp", None)) if fsdp else init
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        with nnx.use_eager_sharding(False):
            blocks = [nnx.Linear(WIDTH, WIDTH, kernel_init=kernel, rngs=rngs) for i in range(6)]
        self.blocks = nnx.List([PipelineStage(block, name=f"b{i}") for i, block in enumerate(blocks)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.head(x)


class LinenTower(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        for i in range(6):
            x = jnp.tanh(linen_pipeline.PipelineStage(nn.Dense(WIDTH), name=f"b{i}")(x))
        return nn.Dense(VOCABULARY)(x)


def loss_fn(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()


def tokens(rows=ROWS):
    return np.random.default_rng(0).integers(0, VOCABULARY, (rows, 4)).astype(np.int32)


def trainer_of(linen=False, fsdp=False, tx=None, **options):
    tx = tx or optax.sgd(0.1, momentum=0.9)  # compiles sooner than Adam, and has a state
    options = {"num_stages": 3, "num_microbatches": 4, "logging": False, **options}
    if linen:
        options["variables"] = LinenTower().init(jax.random.key(0), tokens())
    model = LinenTower() if linen else Tower(nnx.Rngs(0), fsdp)
    return PipelineTrainer(model, tx, loss_fn, **options)


def predict(model, batch):
    return model(batch)


@pytest.fixture(scope="module")
def balanced():
    """A trainer that has trained, and what it has shown."""
    trainer = trainer_of(assignment="balanced", logging=True, inference=Inference(predict_fn=predict))
    console = shown_by(trainer)
    before = trainer.predict(tokens())
    assert trainer.plan is None, "nothing is planned yet"
    trainer.compile(tokens())
    after = trainer.predict(tokens(4))
    np.testing.assert_allclose(before[:4], after, rtol=1e-5, atol=1e-6)
    for _ in range(2):
        trainer.fit([tokens()], steps=1)
    return trainer, console.export_text()


@pytest.mark.parametrize("linen", [False, slow(True)])
def test_a_large_head_gets_a_stage_of_its_own(linen, balanced):
    trainer = balanced[0]
    if linen:
        trainer = trainer_of(linen, assignment="balanced")
        trainer.compile(tokens())
    plan = trainer.plan
    assert [block.name for block in plan.blocks] == [*(f"b{i}" for i in range(6)), "after_b5"]
    assert plan.unit == "FLOP"
    assert plan.imbalance <= plan.even_imbalance
    assert all(block.forward > 0 and block.backward > 0 for block in plan.blocks)
    assert plan.stage_sizes[-1] == 1
    assert plan.gain > 0.02


@functools.cache
def plain_training():
    return m.plain_training(m.Layers(5), optax.sgd(0.1), m.squared_error, [m.make_xy(8, seed=i) for i in range(2)], 4)


@pytest.mark.parametrize(
    "options",
    [
        slow({"assignment": "balanced"}),
        {"assignment": "balanced", "num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "interleaved_1f1b"},
        slow({"assignment": "balanced", "num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "zbv"}),
        slow({}),
        {"assignment": {"Linear_*": 0, "Linear_4": 1, "after_Linear_4": 2}},
    ],
    ids=["balanced", "interleaved", "zbv", "auto", "by_name"],
)
def test_results_are_those_of_plain_training(options):
    batches = [m.make_xy(8, seed=seed) for seed in range(2)]
    options = {"num_stages": 3, "num_microbatches": 4, "logging": False, **options}
    trainer = PipelineTrainer(m.Layers(5), optax.sgd(0.1), m.squared_error, **options)
    trainer.compile(batches[0])
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    plain, params = plain_training()
    # float32, sums of a few dozen terms in another order
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    found = jax.tree.leaves(nnx.state(trainer.gather_model(), nnx.Param))
    for mine, theirs in zip(found, jax.tree.leaves(params[-1]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_evaluating_and_predicting_keep_the_stages_of_training(balanced):
    trainer, plan = balanced[0], balanced[0].plan
    trainer.evaluate([tokens()])
    assert trainer.plan is plan
    compiled = {key[0]: executable for key, executable in trainer.steps.compiled.items()}
    sizes = [stage.parameter_count for stage in compiled["train"].stages]
    assert [stage.parameter_count for stage in compiled["evaluate"].stages] == sizes


def test_a_plan_is_saved_edited_and_loaded(balanced, tmp_path):
    plan = balanced[0].plan
    path = plan.save(tmp_path / "plan.json")
    assert [block.stage for block in plan.blocks] == [0, 0, 0, 1, 1, 1, 2]
    path.write_text(path.read_text().replace('"b3", "stage": 1', '"b3", "stage": 0'))
    moved = Plan.load(path)
    again = trainer_of(assignment=str(path))
    assign_stages(again, tokens())
    assert again.plan.blocks == moved.blocks
    assert again.plan.ranks == (0, 1, 2)
    assert again.plan.imbalance is not None  # from the costs in the file
    with pytest.raises(AssignmentError, match=r"the plan is for 3 stages, but num_stages=2"):
        assign_stages(trainer_of(assignment=str(path), num_stages=2), tokens())


def shown_by(trainer):
    """The console that the trainer writes to from now on."""
    console = Console(width=150, record=True)
    trainer.loop.display._console = console
    return console


def test_the_table_is_printed_once_before_the_first_step(balanced):
    text = balanced[1]
    assert text.count("assignment of 7 blocks to 3 stages, operations and bytes estimated") == 1
    assert "slowest rank over the mean: even" in text


def test_the_default_tells_its_choice_with_the_stages():
    traces = []

    def counting(model, tokens):
        traces.append(None)
        return loss_fn(model, tokens)

    def compiled(**options):
        traces.clear()
        trainer = PipelineTrainer(
            Tower(nnx.Rngs(0)), optax.sgd(0.1), counting, num_stages=3, num_microbatches=4, **options
        )
        console = shown_by(trainer)
        trainer.compile(tokens())
        return trainer.plan, console.export_text(), len(traces)

    even, even_text, even_traces = compiled(assignment="even")
    plan, text, count = compiled()
    assert count == even_traces  # the estimate reads the step that is traced anyway
    assert "assignment" not in even_text
    assert not even.notes
    # The head costs four blocks, so it is better off alone.
    assert even.stage_sizes == (2, 2, 3)
    assert plan.stage_sizes == (3, 3, 1)
    assert 'assignment "auto": balanced stages; simulated step: even' in text
    assert "blocks to 3 stages" not in text  # nobody asked for the costs of the blocks


def test_another_schedule_another_plan():
    trainer = PipelineTrainer(
        m.Layers(4), optax.sgd(0.1), m.squared_error, num_stages=2, num_microbatches=2, assignment="balanced",
        logging=False,
    )  # fmt: skip
    assign_stages(trainer, m.make_xy(8))
    assert trainer.plan.ranks == (0, 1)
    trainer.use_schedule("interleaved_1f1b", 4)
    assign_stages(trainer, m.make_xy(8))
    assert trainer.plan.ranks == (0, 1, 0, 1)


class Normed(nnx.Module):
    def __init__(self, norm: nnx.Module, rngs: nnx.Rngs):
        self.linear, self.norm = nnx.Linear(m.Layers.WIDTH, m.Layers.WIDTH, rngs=rngs), norm

    def __call__(self, x):
        return self.norm(self.linear(x))


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
def test_a_model_that_cannot_be_cut_at_some_mark():
    """Its first two blocks share a BatchNorm, so that they cannot be on two stages."""

    def sharing():
        norm = nnx.BatchNorm(m.Layers.WIDTH, rngs=nnx.Rngs(0))
        blocks = [*(Normed(norm, nnx.Rngs(i)) for i in range(2)), *m.Layers().layers]
        model = m.Chain(map(PipelineStage, blocks))
        return PipelineTrainer(model, optax.sgd(0.1), m.squared_error, num_stages=2, num_microbatches=2, logging=False)

    chosen = sharing()
    assign_stages(chosen, m.make_xy(8))  # the estimate needs no such cut
    assert chosen.plan.stage_sizes
    with pytest.raises(AssignmentError, match=r"a plan looks at each block alone, .* shar"):
        plan(sharing(), m.make_xy(8))


def test_too_few_marks_are_refused():
    with pytest.raises(AssignmentError, match=r"num_stages=8 needs at least 7 marks"):
        trainer_of(assignment="balanced", num_stages=8).compile(tokens())
