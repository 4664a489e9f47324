"""`memory_limit=`: stages recompute or offload what does not fit, and the training stays that of plain `jax.jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.assignment import AssignmentError
from jaxpp_flax.messages import amount
from jaxpp_flax.planning import Hardware, describe
from jaxpp_flax.schedules import FusedTask, ResidualPlan, StageResiduals, TaskKind
from jaxpp_flax.trainers import Assignment, Balanced, Memory, MeshOptions
from jaxpp_flax.trainers.step.compiled_steps import stage_table
from jaxpp_flax.trainers.tuning.exact_bytes import ExactBytes
from tests.helpers import tree_allclose
from tests.trainers import models as m

CARD = Hardware(flops=1e9, host_bandwidth=1e12)  # copies are almost free, and recomputation is not
SLOW_LINK = Hardware(flops=1e12, host_bandwidth=1e3)


def trainer_of(assignment, **options) -> PipelineTrainer:
    options = {"num_stages": 4, "num_microbatches": 8, "schedule": "1f1b", "logging": False, **options}
    return PipelineTrainer(m.Model(8, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, assignment=assignment, **options)


def peak_without_limit(**options) -> float:
    trainer = trainer_of(Assignment(memory_limit=1e12), **options)
    trainer.compile(m.make_batch(512))
    assert trainer.plan.residuals.is_kept
    return max(trainer.plan.rank_bytes)


@pytest.mark.parametrize(
    ("options", "card", "does"),
    [
        ({}, SLOW_LINK, "recompute"),
        ({"num_stages": 8, "schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=4)}, CARD, "offload"),
    ],
    ids=["1f1b", "interleaved"],
)
def test_sixty_percent_of_the_peak_trains_as_plain_jit_does(options, card, does):
    batches = [m.make_batch(512, seed=seed) for seed in range(2)]
    limit = 0.6 * peak_without_limit(**options)
    trainer = trainer_of(Assignment(memory_limit=limit, hardware=card), **options)
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    plan = trainer.plan
    assert max(plan.rank_bytes) <= limit
    assert "estimated bytes on each device" in plan.table().caption  # the compiled step's are the exact ones, see below
    assert any(does in describe(stage) for stage in plan.residuals.stages)
    expected, after = m.plain_training(m.Model(8, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, batches, 8)
    tree_allclose(losses, expected, rtol=1e-5)
    tree_allclose(jax.device_get(trainer.state.params), after[-1], rtol=1e-5, atol=1e-6)
    for rank in trainer.compile(batches[0]).memory_analysis():
        assert rank.argument_bytes + rank.peak_bytes <= limit


def layers_trainer(limit, tx=None, rows=8192, **options) -> PipelineTrainer:
    width = 64

    class Layers(nnx.Module):
        def __init__(self, rngs):
            layers = [nnx.Linear(width, width, rngs=rngs) for _ in range(8)]
            self.layers = nnx.List([PipelineStage(layer, name=f"b{i}") for i, layer in enumerate(layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    options = {"num_stages": 4, "num_microbatches": 16, "schedule": "1f1b", "logging": False, **options}
    trainer = PipelineTrainer(
        Layers(nnx.Rngs(0)), tx or optax.sgd(0.1), lambda model, b: jnp.mean((model(b["x"]) - b["y"]) ** 2),
        assignment=Assignment([8 // options["num_stages"]] * options["num_stages"], memory_limit=limit, hardware=CARD),
        **options,
    )  # fmt: skip
    trainer.compile({key: jnp.ones((rows, width)) for key in "xy"})
    return trainer


def exact_bytes(trainer, rows=8192) -> list[int]:
    compiled = trainer.compile({key: jnp.ones((rows, 64)) for key in "xy"})
    return [rank.argument_bytes + rank.peak_bytes for rank in compiled.memory_analysis()]


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 0.8), ("gpipe", 0.5)])
def test_the_compiled_step_keeps_within_the_limit(schedule, share):
    """Of what the first rank holds above its arguments; arrays on their way between ranks count too."""
    full = exact_bytes(layers_trainer(1e12, schedule=schedule))[0]
    limit = share * full + (1 - share) * 2.1e6
    limits = [limit, 1e12, 1e12, 1e12]
    trainer = layers_trainer(limits, schedule=schedule)
    assert not trainer.plan.residuals.is_kept
    assert exact_bytes(trainer)[0] <= limit


@pytest.mark.parametrize(
    ("schedule", "plan"),
    [
        ("1f1b", {"offload": 0.6}),
        ("1f1b", {"offload": 1.0, "offload_values": 0.25}),
        ("gpipe", {}),
        ("zero_bubble", {"offload": 0.6}),
        ("zbv", {"recompute": True, "offload": 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "keep",
)
def test_the_walk_of_a_schedule_is_that_of_its_compiled_program(schedule, plan):
    """Arrays between ranks and whole values count; beyond the prediction, ranks hold the counter of steps (4 bytes)."""
    residuals = ResidualPlan([StageResiduals(**plan)] * 4, fetch_ahead=2, offload_within=2)
    options = {"schedule": schedule, **({"mesh": MeshOptions(num_ranks=2)} if schedule == "zbv" else {})}
    trainer = layers_trainer(1e12, **options)
    marks, pipeline = trainer._core.assigner._last
    model = trainer._core.assigner._limited_step(marks, pipeline).model([2, 2, 2, 3])
    predicted = model.predict(residuals)
    compiled = layers_trainer(None, memory=Memory(residuals=residuals), **options).compile(
        {key: jnp.ones((8192, 64)) for key in "xy"}
    )
    ranks = compiled.memory_analysis()
    over = [r.argument_bytes + r.peak_bytes - held for r, held in zip(ranks, predicted.peak_bytes, strict=True)]
    # What a fused task or a whole backward makes for itself is in XLA's workspace, which is apart.
    inside = [rank for rank, tasks in enumerate(model.tasks) if any(_has_workspace(t, plan) for t in tasks)]
    assert all(more <= 4 if rank in inside else 0 <= more <= 4 for rank, more in enumerate(over))
    assert len(inside) < len(ranks)
    assert [rank.host_peak_bytes for rank in ranks] == list(predicted.host_bytes)


def _has_workspace(task, plan) -> bool:
    return isinstance(task, FusedTask) or (plan.get("recompute", False) and task.kind is TaskKind.BACKWARD)


def test_a_state_of_no_parameter_counts():
    """`optax.flatten` joins the state of all parameters: no path tells whose it is, and one rank holds it."""
    options = {"tx": optax.flatten(optax.adam(1e-2)), "rows": 64, "num_stages": 2}
    with pytest.warns(UserWarning, match="mixes arrays of several ranks"):
        held = max(exact_bytes(layers_trainer(1e12, **options), 64))
    with (
        pytest.warns(UserWarning, match="mixes arrays of several ranks"),
        pytest.raises(ValueError, match=r"does not keep within memory_limit.*other arrays"),
    ):
        layers_trainer(0.7 * held, **options)


def test_a_plan_whose_compiled_step_is_refused_is_neither_kept_nor_shown(monkeypatch):
    def refuse(self, plan, memory):
        raise AssignmentError("the compiled step is too large", 1.0)

    monkeypatch.setattr(ExactBytes, "fit", refuse)
    blocks = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i)), name=f"b{i}") for i in range(2)])
    trainer = PipelineTrainer(
        nnx.Sequential(*blocks), optax.sgd(0.1), lambda model, x: jnp.mean(model(x) ** 2), num_stages=2,
        num_microbatches=2, assignment=Balanced(memory_limit=1e12), logging=False,
    )  # fmt: skip
    with pytest.raises(AssignmentError, match="the compiled step is too large"):
        trainer.compile(jnp.ones((4, 4)))
    assert trainer.plan is None
    assert trainer._core.assigner.news() == []


class TransformerBlock(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        heads = (a.reshape(*a.shape[:2], 4, -1) for a in jnp.split(self.qkv(self.norms[0](x)), 3, -1))
        x = x + self.out(jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class GPT(nnx.Module):
    def __init__(self, width: int, num_blocks: int, rngs: nnx.Rngs):
        self.embed, self.head = nnx.Embed(64, width, rngs=rngs), nnx.Linear(width, 64, rngs=rngs)
        blocks = [TransformerBlock(width, rngs) for _ in range(num_blocks)]
        self.blocks = nnx.List([PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token_loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.mark.slow
def test_a_gpt_trains_with_sixty_percent_of_the_peak_in_at_most_1_05_of_the_step():
    """Copies take as much of a step as for a model of 7B parameters on PCIe 5 (`benchmarks/residuals.py`)."""
    rng = np.random.default_rng(0)
    batches = [{k: rng.integers(0, 64, (32, 16)) for k in "xy"} for _ in range(2)]

    def trainer_with(limit: float, hardware: Hardware) -> PipelineTrainer:
        return PipelineTrainer(
            GPT(64, 8, nnx.Rngs(0)), optax.sgd(0.1), next_token_loss, num_stages=8, num_microbatches=16,
            schedule="1f1b", assignment=Assignment(memory_limit=limit, hardware=hardware), logging=False,
        )  # fmt: skip

    card = Hardware(flops=400e12, host_bandwidth=50e9)
    full = trainer_with(1e12, card)
    stages = full.compile(batches[0]).stages
    prediction = full.plan.choice.prediction
    seconds = prediction.seconds / (16 + 7)  # of a forward and a backward
    card = Hardware(flops=400e12, host_bandwidth=stages[0].activation_bytes / (0.79 * seconds))
    limit = 0.6 * max(prediction.peak_bytes)
    trainer = trainer_with(limit, card)
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    assert max(trainer.plan.rank_bytes) <= limit
    assert trainer.plan.choice.slowdown <= 1.05
    assert any(stage.offload for stage in trainer.plan.residuals.stages)
    expected, _ = m.plain_training(GPT(64, 8, nnx.Rngs(0)), optax.sgd(0.1), next_token_loss, batches, 16)
    tree_allclose(losses, expected, rtol=1e-5)


def test_residuals_are_given_or_chosen():
    plan = ResidualPlan([StageResiduals(recompute=True)] * 4)
    with pytest.raises(ValueError, match=r"both Memory\(residuals=\) and memory_limit=1000.0 are given"):
        trainer_of(Assignment(memory_limit=1000.0), memory=Memory(residuals=plan))


def test_the_table_of_stages_shows_the_state_on_the_host():
    options = {"tx": optax.adam(1e-2), "rows": 64, "num_stages": 2, "memory": Memory(optimizer_state="pinned_host")}
    trainer = layers_trainer(1e12, **options)
    compiled = trainer.compile({key: jnp.ones((64, 64)) for key in "xy"})
    column = stage_table(compiled.stages, {}, "", trainer.plan).columns[-1]
    assert column.header == "host"
    # Adam has two numbers for each one of four layers on a rank.
    assert list(column.cells) == [amount(2 * 4 * (64 * 64 + 64) * 4, "B")] * 2


def test_a_limit_needs_a_pipeline():
    with pytest.raises(ValueError, match=r"memory_limit=10 of the assignment needs a pipeline"):
        trainer_of(Assignment(memory_limit=10), num_stages=1)
    with pytest.raises(ValueError, match="memory_limit"):  # a pipeline of one rank
        trainer_of(Assignment(memory_limit=10), num_stages=1, mesh={"data": 1}).compile(m.make_batch(512))


@pytest.mark.parametrize(("fsdp", "rows"), [("step", 16), (None, 1024), (None, 16)], ids=["step", "loop", "update"])
def test_gathers_and_the_update_hold_the_predicted_bytes(fsdp, rows):
    """Above the prediction, the last rank holds the counter of steps (4 bytes) alone."""
    width, init = 64, nnx.initializers.lecun_normal()
    kernel = nnx.with_partitioning(init, ("fsdp", None)) if fsdp else init

    class Tower(nnx.Module):
        def __init__(self, rngs):
            with nnx.use_eager_sharding(False):
                layers = [nnx.Linear(width, width, use_bias=False, kernel_init=kernel, rngs=rngs) for _ in range(4)]
            self.layers = nnx.List([PipelineStage(layer, name=f"b{i}") for i, layer in enumerate(layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    place = (
        {"mesh": MeshOptions(axes={"fsdp": 2}, fsdp=fsdp)}
        if fsdp
        else {"memory": Memory(optimizer_state="pinned_host")}
    )
    trainer = PipelineTrainer(
        Tower(nnx.Rngs(0)), optax.adam(1e-3), lambda model, b: jnp.mean((model(b["x"]) - b["y"]) ** 2), num_stages=2,
        num_microbatches=4, schedule="gpipe", logging=False, assignment=Assignment(memory_limit=1e12), **place,
    )  # fmt: skip
    batch = {"x": jnp.ones((rows, width)), "y": jnp.zeros((rows, width))}
    compiled = trainer.compile(batch)
    row = compiled.memory_analysis()[-1]
    live = row.argument_bytes + row.peak_bytes
    if (fsdp, rows) == (None, 16):  # weights, gradients and the fetched state enter the update; the batch stays beside
        own = [e for t, e in zip(compiled.program.tasks, compiled._executables.tasks, strict=True) if t.rank == 1]
        update = max(e.memory_analysis().argument_size_in_bytes for e in own)
        live = update + batch["y"].nbytes
    assert trainer.plan.rank_bytes[-1] + 4 == live
