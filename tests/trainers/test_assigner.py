"""The trainer balances: results stay those of plain training, the slowest rank gets less, limits are kept."""

from __future__ import annotations

from types import SimpleNamespace

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
from jaxpp_flax.assignment import AssignmentError, Plan
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.trainers import Assignment, Balanced, Inference, Memory, MeshOptions, Training
from jaxpp_flax.trainers.tuning import shared_block_times
from tests.helpers import slow
from tests.trainers import models as m

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


@pytest.mark.parametrize(
    ("cost", "linen"),
    [
        ("estimated", False),
        slow("estimated", True),
        slow("flops", False),
        ("flops", True),
        slow("measured", False),
        ("measured", True),
    ],
)
def test_a_large_head_gets_a_stage_of_its_own(linen, cost):
    trainer = trainer_of(linen, assignment=Balanced(cost=cost))
    trainer.compile(tokens())
    plan = trainer.plan
    assert [block.name for block in plan.blocks] == [*(f"b{i}" for i in range(6)), "after_b5"]
    assert plan.unit == ("s" if cost == "measured" else "FLOP")
    assert plan.exact
    assert plan.imbalance <= plan.even_imbalance
    assert all(block.forward > 0 and block.backward > 0 for block in plan.blocks)
    if cost != "measured":  # times of tasks this small are noise
        assert plan.stage_sizes[-1] == 1
        assert plan.gain > 0.02


@pytest.mark.parametrize(
    "options",
    [
        {"assignment": "balanced"},
        slow({"assignment": Balanced(cost="measured")}),
        {"assignment": "balanced", "num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "interleaved_1f1b"},
        slow({"assignment": "balanced", "num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "zbv"}),
        slow({"assignment": Balanced(cost=[1, 1, 1, 1, 9])}),
        {"assignment": Assignment(cost=[9, 9, 1, 1, 1])},
        {"assignment": {"block_*": 0, "block_4": 1, "after_block_4": 2}},
    ],
    ids=["estimated", "measured", "interleaved", "zbv", "given", "auto", "by_name"],
)
def test_results_are_those_of_plain_training(options):
    batches = [m.make_batch(8, seed) for seed in range(2)]
    options = {"num_stages": 3, "num_microbatches": 4, "logging": False, **options}
    trainer = PipelineTrainer(m.Model(5, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, **options)
    trainer.compile(batches[0])
    if trainer.plan.stages_choice is not None:
        assert (trainer.plan.stages_choice.chosen, trainer.plan.stage_sizes) == ("balanced", (1, 1, 4))
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    plain, params = m.plain_training(
        m.Model(5, rngs=nnx.Rngs(0), marked=False), optax.sgd(0.1), m.mean_loss, batches, 4
    )
    # float32, sums of a few dozen terms in another order
    np.testing.assert_allclose(losses, plain, rtol=1e-5)
    found = jax.tree.leaves(nnx.state(trainer.gather_model(), nnx.Param))
    for mine, theirs in zip(found, jax.tree.leaves(params[-1]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_evaluating_and_predicting_keep_the_stages_of_training():
    trainer = trainer_of(assignment="balanced", inference=Inference(predict_fn=lambda model, batch: model(batch)))
    before = trainer.predict(tokens())  # nothing is planned yet
    assert trainer.plan is None
    trainer.compile(tokens())
    plan = trainer.plan
    trainer.evaluate([tokens()])
    after = trainer.predict(tokens(4))
    assert trainer.plan is plan
    np.testing.assert_allclose(before[:4], after, rtol=1e-5, atol=1e-6)
    compiled = {key[0]: executable for key, executable in trainer._core.executables.compiled.items()}
    sizes = [stage.parameter_count for stage in compiled["train"].stages]
    assert [stage.parameter_count for stage in compiled["evaluate"].stages] == sizes


def test_a_plan_is_saved_edited_and_loaded(tmp_path):
    trainer = trainer_of(assignment="balanced")
    trainer.compile(tokens())
    path = trainer.plan.save(tmp_path / "plan.json")
    assert [block.stage for block in trainer.plan.blocks] == [0, 0, 0, 1, 1, 1, 2]
    path.write_text(path.read_text().replace('"b3", "stage": 1', '"b3", "stage": 0'))
    moved = Plan.load(path)
    again = trainer_of(assignment=str(path))
    again.compile(tokens())
    assert again.plan.blocks == moved.blocks
    assert again.plan.ranks == (0, 1, 2)
    assert again.plan.imbalance is not None  # from the costs in the file
    with pytest.raises(AssignmentError, match=r"the plan is for 3 stages, but num_stages=2"):
        trainer_of(assignment=str(path), num_stages=2).compile(tokens())


def shown_by(trainer):
    """The console that the trainer writes to from now on."""
    console = Console(width=150, record=True)
    trainer._parts.display._console = console
    return console


def test_the_table_is_printed_once_before_the_first_step():
    trainer = trainer_of(assignment="balanced", logging=True)
    console = shown_by(trainer)
    trainer.fit([tokens()], steps=1)
    trainer.fit([tokens()], steps=1)
    text = console.export_text()
    assert text.count("assignment of 7 blocks to 3 stages, operations and bytes estimated") == 1
    assert "slowest rank over the mean: even" in text
    assert "no other assignment is better" in text


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
    assert even.stages_choice is None
    # The head costs four blocks, so it is better off alone.
    assert even.stage_sizes == (2, 2, 3)
    assert (plan.stages_choice.chosen, plan.stages_choice.searched, plan.stage_sizes) == ("balanced", True, (3, 3, 1))
    assert plan.stages_choice.balanced < 0.9 * plan.stages_choice.even
    assert 'assignment "auto": balanced stages; simulated step: even' in text
    assert "blocks to 3 stages" not in text  # nobody asked for the costs of the blocks


def test_another_schedule_another_plan_and_measured_once(monkeypatch):
    calls = []
    measure = shared_block_times.time_blocks
    monkeypatch.setattr(shared_block_times, "time_blocks", lambda *args: calls.append(args) or measure(*args))
    trainer = trainer_of(assignment=Balanced(cost="measured"), num_stages=2)
    trainer.train_step(tokens())
    assert trainer.plan.ranks == (0, 1)
    trainer.use_schedule("interleaved_1f1b", 4)
    trainer.train_step(tokens())
    assert trainer.plan.ranks == (0, 1, 0, 1)
    assert len(calls) == 1


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "options",
    [
        {},
        slow({"schedule": "gpipe"}),
        slow({"num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "interleaved_1f1b"}),
        slow({"mesh": {"data": 2}}),
        {"mesh": {"fsdp": 2}, "fsdp": True},
        {"memory": Memory(remat="full")},
        slow({"training": Training(ema_decay=0.9)}),
        {"linen": True},
    ],
    ids=["1f1b", "gpipe", "interleaved", "data", "fsdp", "remat", "ema", "linen"],
)
def test_the_bytes_that_are_predicted_are_those_of_the_program(options):
    trainer = trainer_of(assignment=Assignment(memory_limit=1e12), tx=optax.adam(1e-2), **options)
    compiled = trainer.compile(tokens(16))
    # On the last rank a fused task keeps its activations inside the executable, where the walk of the program cannot
    # see them; elsewhere what is left out are scalars, indices and arrays on their way to another rank.
    for found, predicted in list(zip(compiled.memory_analysis(), trainer.plan.rank_bytes, strict=True))[:-1]:
        assert predicted == pytest.approx(found.argument_bytes + found.peak_bytes, rel=0.1)


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_with_a_split_backward_no_more_is_held_than_predicted(schedule):
    options = {"num_stages": 4, "mesh": MeshOptions(num_ranks=2)} if schedule == "zbv" else {}
    trainer = trainer_of(assignment=Assignment(memory_limit=1e12), tx=optax.adam(1e-2), schedule=schedule, **options)
    found = trainer.compile(tokens(64)).memory_analysis()
    # Activations count to the end of the weight gradient, though some are let go after the input gradient. Not counted
    # are a few arrays between stages, on their way to or from another rank.
    on_their_way = 4 * (16 * 4 * WIDTH * 4)
    for rank, predicted in zip(found, trainer.plan.rank_bytes, strict=True):
        assert rank.argument_bytes + rank.peak_bytes <= predicted + on_their_way


def test_a_limit_moves_blocks_or_is_refused():
    trainer = trainer_of(assignment=Balanced(memory_limit=1e12), schedule="gpipe")
    trainer.compile(tokens(64))
    most = trainer.plan.rank_bytes
    tight = trainer_of(assignment=Balanced(memory_limit=[most[0] - 1, 1e12, 1e12]), schedule="gpipe")
    tight.compile(tokens(64))
    assert tight.plan.rank_bytes[0] < most[0]
    assert tight.plan.imbalance >= trainer.plan.imbalance
    text = (
        r"no assignment of 7 blocks to 3 stages keeps within memory_limit, whatever its stages keep, recompute or "
        r"offload: in the closest plan found, rank \d holds [\d,]+ bytes on each device, but may hold 50,000 \(stage "
        r"\d: .*recompute, .*; .*parameters .*, optimizer .*, gradients .*, residuals .*\)\. Use more stages"
    )
    with pytest.raises(AssignmentError, match=text):
        trainer_of(assignment=Balanced(memory_limit=5e4), schedule="gpipe").compile(tokens(64))
    with pytest.raises(AssignmentError, match=r"the assignment does not keep within memory_limit, .* rank \d holds"):
        trainer_of(assignment=Assignment("even", memory_limit=5e4)).compile(tokens(64))
    # A limit for each rank: the last rank may hold everything.
    with pytest.raises(AssignmentError, match=r"rank 0 holds .* but may hold 5"):
        trainer_of(assignment=Balanced(memory_limit=[5, 1e12, 1e12])).compile(tokens(64))
    with pytest.raises(AssignmentError, match=r"memory_limit has 2 numbers for 3 ranks"):
        trainer_of(assignment=Balanced(memory_limit=[5, 6])).compile(tokens())


def test_a_larger_batch_is_held_against_the_limit_too():
    trainer = trainer_of(assignment=Assignment(memory_limit=1e12))
    trainer.compile(tokens(4))
    trainer = trainer_of(assignment=Assignment(memory_limit=2 * max(trainer.plan.rank_bytes)))
    trainer.compile(tokens(4))
    with pytest.raises(AssignmentError, match="the assignment does not keep within memory_limit"):
        trainer.compile(tokens(4096))


# ------------------------------------------------------------------ measuring


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        slow({"dropout": 0.5}, {}),
        ({"batch_norm": True}, {}),
        ({}, {"mesh": {"data": 2}}),
        slow({}, {"schedule": "zero_bubble"}),
        slow({}, {"memory": Memory(remat="full")}),
        slow({}, {"training": Training(loss_scale="dynamic")}),
    ],
    ids=["dropout", "batch_norm", "data", "zero_bubble", "remat", "loss_scale"],
)
def test_blocks_are_timed_alone_whatever_they_take(model, options):
    trainer = PipelineTrainer(
        m.Model(4, rngs=nnx.Rngs(0), **model), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=4,
        assignment=Balanced(cost="measured", memory_limit=1e12), logging=False, **options,
    )  # fmt: skip
    assert np.isfinite(float(trainer.train_step(m.make_batch(16))["loss"]))
    assert all(0 < block.forward < 10 and 0 < block.backward < 10 for block in trainer.plan.blocks)  # seconds


def test_equal_blocks_are_compiled_and_timed_once(monkeypatch):
    from jaxpp_flax.assignment import block_times

    read = []
    monkeypatch.setattr(block_times, "_read", lambda task: read.append(id(task.run)) or float(len(set(read))))
    trainer = trainer_of(assignment=Balanced(cost="measured"))
    trainer.compile(tokens())
    # b0 with the embedding, the five others alike, and what follows: forward and backward each, five rounds.
    assert (len(set(read)), len(read)) == (6, 30)
    assert len({block.cost for block in trainer.plan.blocks[1:-1]}) == 1


def test_measuring_is_refused_where_several_processes_own_every_rank(monkeypatch):
    """One process alone cannot run a block there."""
    trainer = trainer_of(assignment=Balanced(cost="measured"))
    both = [SimpleNamespace(process_index=index) for index in (0, 1)]
    monkeypatch.setattr(jax.sharding.Mesh, "is_multi_process", property(lambda mesh: True))
    monkeypatch.setattr(MpmdMesh, "rank_devices", lambda mesh, rank: both)
    with pytest.raises(AssignmentError, match=r"several processes.*trainer.plan.save"):
        shared_block_times.shared_block_times((), trainer.mesh)


class Sharing(nnx.Module):
    """Its first two blocks share a BatchNorm, so that they cannot be on two stages."""

    def __init__(self, rngs: nnx.Rngs):
        norm = nnx.BatchNorm(m.WIDTH, rngs=rngs)
        self.embed = nnx.Embed(m.VOCABULARY, m.WIDTH, rngs=rngs)
        self.blocks = nnx.List([m.Block(rngs=rngs) for _ in range(4)])
        self.blocks[0].norm = self.blocks[1].norm = nnx.data(norm)
        for i, block in enumerate(self.blocks):
            PipelineStage(block, name=f"block_{i}")
        self.head = nnx.Linear(m.WIDTH, m.VOCABULARY, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")
def test_a_model_that_cannot_be_cut_at_some_mark():
    def sharing(**options):
        return PipelineTrainer(
            Sharing(nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=4, logging=False,
            **options,
        )  # fmt: skip

    chosen = sharing(assignment=Assignment(cost=[9, 5, 1, 1]))  # the first block alone would be best
    assert np.isfinite(float(chosen.train_step(m.make_batch(8))["loss"]))  # the estimate needs no such cut
    assert chosen.plan.stage_sizes == (2, 3)
    assert chosen.plan.stages_choice.reason == "the model cannot be cut into the balanced ones"
    with pytest.raises(
        AssignmentError, match=r"cost='measured' looks at each block alone, .* shar.* use cost='estimat"
    ):
        sharing(assignment=Balanced(cost="measured")).compile(m.make_batch(8))
    with pytest.raises(AssignmentError, match=r"memory_limit= looks at each block alone"):
        sharing(assignment=Balanced(memory_limit=1e9)).compile(m.make_batch(8))


def test_an_automatic_schedule_balances_each_number_of_stages():
    from jaxpp_flax.trainers.tuning.auto_schedule import AutoSchedule

    trainer = trainer_of(
        assignment=Balanced(cost="measured"), num_stages=2, schedule=AutoSchedule(steps=1, evaluations=20)
    )
    for _ in range(14):
        trainer.train_step(tokens())
    assert trainer.schedule_report is not None
    assert not trainer.schedule_report.skipped
    assert trainer.plan.num_stages == trainer.schedule.num_stages
    assert trainer.plan.ranks == tuple(map(trainer.schedule.rank_of, range(trainer.schedule.num_stages)))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"assignment": Balanced(cost=[1, 2])}, AssignmentError, r"cost= has 2 numbers for 6 blocks"),
        ({"assignment": Balanced(cost={"b7": 1.0})}, AssignmentError, r"cost= names 'b7', .* Did you mean "),
        ({"assignment": Balanced(cost={"b0": 1.0})}, AssignmentError, r"cost= leaves out 'b1'"),
        ({"num_stages": 8}, AssignmentError, r"num_stages=8 needs at least 7 marks"),
    ],
)
def test_refusals(options, error, text):
    with pytest.raises(error, match=text):
        trainer_of(**{"assignment": "balanced", **options}).compile(tokens())
