"""`plan`: what fits is never refused, its bytes are the compiled step's, and the training stays that of `jax.jit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import AssignmentError, Hardware, LimitError, describe, plan
from jaxpp_flax.schedules import ResidualPlan, ScheduleError, StageResiduals, Std1F1B, by_name
from jaxpp_flax.trainers import Memory, MeshOptions, Training
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

WIDTH = 16
CARD = Hardware(flops=1e9, host_bandwidth=1e12)  # copies are almost free, and recomputation is not
SLOW_LINK = Hardware(flops=1e12, host_bandwidth=1e3)
pytestmark = pytest.mark.filterwarnings("ignore::jaxpp_flax.engine.passes.fsdp.rule.FsdpWarning")


def trainer_of(tx=None, **options) -> PipelineTrainer:
    options = {"num_microbatches": 8, "logging": False, **options}
    if "plan" not in options:
        options = {"num_stages": 4, **options}
    return PipelineTrainer(model(), tx or optax.sgd(0.1), m.squared_error, **options)


def model() -> m.Chain:
    """Eight blocks of one weight each: planning traces each leaf's sum again for every assignment."""
    rngs = nnx.Rngs(0)
    blocks = [nnx.Sequential(nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs), jnp.tanh) for _ in range(8)]
    return m.Chain(PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks))


def batch_of(size: int, seed: int = 0) -> dict[str, np.ndarray]:
    return m.make_xy(size, WIDTH, seed)


def exact_bytes(trainer, batch) -> list[int]:
    return [rank.held_bytes for rank in trainer.compile(batch).memory_analysis()]


@pytest.mark.parametrize(
    ("options", "card", "does"),
    [
        ({}, SLOW_LINK, "recompute"),
        slow({"num_stages": 8, "schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=4)}, CARD, "offload"),
    ],
    ids=["1f1b", "interleaved"],
)
def test_sixty_percent_of_the_peak_trains_as_plain_jit_does(options, card, does, tmp_path):
    batches = [batch_of(512, seed=seed) for seed in range(2)]
    free = plan(trainer_of(**options), batches[0])
    assert free.residuals.is_kept
    limit = 0.6 * max(free.peak_bytes)
    found = plan(trainer_of(**options), batches[0], memory_limit=limit, hardware=card)
    assert max(found.peak_bytes) <= limit
    assert any(does in describe(stage) for stage in found.residuals.stages)
    trainer = trainer_of(plan=found.save(tmp_path / "plan.json"), mesh={})
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    assert trainer.plan.peak_bytes == found.peak_bytes
    assert trainer.plan.residuals == found.residuals
    expected, after = m.plain_training(model(), optax.sgd(0.1), m.squared_error, batches, 8)
    tree_allclose(losses, expected, rtol=1e-5)
    tree_allclose(jax.device_get(trainer.state.params), after[-1], rtol=1e-5, atol=1e-6)
    assert max(exact_bytes(trainer, batches[0])) <= limit


OPTIONS = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"num_stages": 8, "mesh": MeshOptions(num_ranks=4), "schedule": "interleaved_1f1b"},
    "zbv": {"num_stages": 4, "mesh": MeshOptions(num_ranks=2), "schedule": "zbv"},
    "data": {"mesh": {"data": 2}, "schedule": "zero_bubble"},
    "tensor": {"mesh": {"tensor": 2}, "schedule": "zero_bubble"},
    "remat": {"memory": Memory(remat="full")},
    "ema": {"training": Training(ema_decay=0.9)},
    "clip": {"tx": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))},
    "host": {"memory": Memory(optimizer_state="pinned_host")},
    "offload": {"memory": Memory(residuals=ResidualPlan([StageResiduals(offload=0.5)] * 4))},
}


DEFAULT = ("zbv", "data")


@pytest.mark.parametrize("name", [*DEFAULT, *(slow(name) for name in OPTIONS if name not in DEFAULT)])
def test_planned_bytes_are_the_compiled_steps_and_no_limit_that_they_meet_is_refused(name):
    options, batch = {"tx": optax.adam(1e-2), **OPTIONS[name]}, batch_of(64)
    exact = exact_bytes(trainer_of(assignment="even", **options), batch)
    found = plan(trainer_of(assignment="even", **options), batch, memory_limit=[1.001 * n for n in exact])
    np.testing.assert_allclose(found.peak_bytes, exact, rtol=0.05)
    assert found.residuals.is_kept or "offload" in name


class Tower(nnx.Module):
    """Layers whose weights are partitioned over an axis."""

    def __init__(self, spec, rngs, width=64):
        init = nnx.initializers.lecun_normal()
        up, down = (nnx.with_partitioning(init, s) if spec else init for s in (spec, spec and spec[::-1]))
        self.layers = nnx.List([])
        with nnx.use_eager_sharding(False):
            for i in range(2):
                pair = (
                    nnx.Linear(width, 2 * width, use_bias=False, kernel_init=up, rngs=rngs),
                    nnx.Linear(2 * width, width, use_bias=False, kernel_init=down, rngs=rngs),
                )
                self.layers.append(PipelineStage(nnx.Sequential(pair[0], jnp.tanh, pair[1]), name=f"b{i}"))

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("axes", "spec", "fsdp", "schedule", "rows"),
    [
        ({"tensor": 2}, (None, "tensor"), "microbatch", "zero_bubble", 64),
        ({"fsdp": 2}, ("fsdp", None), "step", "gpipe", 16),
        slow({"tensor": 4}, (None, "tensor"), "microbatch", "gpipe", 512),
    ],
)
def test_weights_in_parts(axes, spec, fsdp, schedule, rows):
    def trainer():
        return PipelineTrainer(
            Tower(spec, nnx.Rngs(0)), optax.adam(1e-3), m.squared_error, num_stages=2, num_microbatches=4,
            schedule=schedule, mesh=MeshOptions(axes=axes, fsdp=fsdp), logging=False, assignment=[1, 1],
        )  # fmt: skip

    batch = {"x": jnp.ones((rows, 64)), "y": jnp.zeros((rows, 64))}
    exact = exact_bytes(trainer(), batch)
    found = plan(trainer(), batch, memory_limit=[1.05 * n for n in exact])
    np.testing.assert_allclose(found.peak_bytes, exact, rtol=0.05)
    assert found.residuals.is_kept
    if rows == 512:  # with fewer rows, weights fill the devices
        less = plan(trainer(), batch, memory_limit=0.8 * max(exact))
        again = PipelineTrainer(
            Tower(spec, nnx.Rngs(0)), optax.adam(1e-3), m.squared_error, plan=less, mesh=MeshOptions(fsdp=fsdp),
            logging=False,
        )  # fmt: skip
        np.testing.assert_allclose(exact_bytes(again, batch), less.peak_bytes, rtol=0.05)


def test_a_state_of_no_parameter_counts():
    """`optax.flatten` joins the state of all parameters: no path tells whose it is, and one rank holds it."""

    def trainer():
        return PipelineTrainer(
            Tower(None, nnx.Rngs(0)), optax.flatten(optax.adam(1e-2)), m.squared_error, num_stages=2,
            num_microbatches=4, logging=False,
        )  # fmt: skip

    batch = {key: jnp.ones((64, 64)) for key in "xy"}
    with pytest.warns(UserWarning, match="mixes arrays of several ranks"):
        exact = exact_bytes(trainer(), batch)
    with pytest.warns(UserWarning, match="mixes arrays of several ranks"):
        assert plan(trainer(), batch).peak_bytes == pytest.approx(exact, rel=0.05)
    with (
        pytest.warns(UserWarning, match="mixes arrays of several ranks"),
        pytest.raises(LimitError, match=r"keeps within memory_limit.*other arrays"),
    ):
        plan(trainer(), batch, memory_limit=0.3 * max(exact))


# ------------------------------------------------------------------ schedules, costs, stages


def test_the_best_of_several_schedules():
    batch = batch_of(64)
    found = plan(trainer_of(), batch, schedules=["1f1b", "zero_bubble"], hardware=CARD)
    assert found.schedule == by_name("zero_bubble", 4)
    assert found.notes[-1] == "the best of 2 schedules"
    each = [plan(trainer_of(schedule=name), batch, hardware=CARD) for name in ("1f1b", "zero_bubble")]
    assert found.seconds == min(of.seconds for of in each)
    # A limit that one of them does not meet leaves it out.
    limit = 1.01 * max(each[0].peak_bytes)
    tight = plan(
        trainer_of(memory=Memory(residuals=ResidualPlan.keep(4))), batch, memory_limit=limit,
        schedules=["gpipe", "1f1b"],
    )  # fmt: skip
    assert tight.schedule == Std1F1B(4)
    assert tight.notes[-1] == "the best of 1 schedules; 1 do not fit"


@pytest.mark.slow
def test_all_schedules():
    batch = batch_of(64)
    found = plan(trainer_of(num_stages=2), batch, schedules="all", hardware=CARD)
    named = plan(trainer_of(num_stages=2), batch, schedules="zero_bubble", hardware=CARD)
    assert found.seconds <= named.seconds
    assert trainer_of(plan=found, mesh={}).compile(batch).memory_analysis()


def test_a_limit_moves_blocks_or_is_refused():
    batch, options = batch_of(64), {"schedule": "gpipe", "num_stages": 3, "assignment": "balanced"}
    most = plan(trainer_of(**options), batch).peak_bytes
    tight = plan(trainer_of(**options), batch, memory_limit=[most[0] - 1, 1e12, 1e12])
    assert tight.peak_bytes[0] < most[0]
    text = (
        r"no mixture of keep, recompute and offload keeps within memory_limit: in the closest plan found, rank \d "
        r"holds [\d,]+ bytes on each device, but may hold 1,000 \(stage \d: .*; .*parameters .*, gradients .*\)\. Use"
    )
    with pytest.raises(LimitError, match=text):
        plan(trainer_of(**options), batch, memory_limit=1e3)
    with pytest.raises(LimitError, match=r"none of 2 schedules fits: .* The closest is .*rank \d holds"):
        plan(trainer_of(), batch, memory_limit=1e3, schedules=["1f1b", "gpipe"])
    with pytest.raises(ScheduleError, match=r"memory_limit has 2 numbers for 3 ranks"):
        plan(trainer_of(**options), batch, memory_limit=[5, 6])


def test_measured_costs_move_blocks():
    batch, trainer = batch_of(16), trainer_of(num_stages=2)
    trainer.train_step(batch)
    profile = trainer.profile_step(batch)
    found = plan(trainer, batch, costs=profile)
    assert (found.unit, found.source) == ("s", "measured")
    of_stage = [sum(b.forward for b in found.blocks[:4]), sum(b.forward for b in found.blocks[4:])]
    assert of_stage == pytest.approx(list(profile.simulated.costs.forward))
    # Other microbatches: twice the examples, and half of them on each of two devices of a rank.
    for options, scale in (({"num_microbatches": 4}, 2.0), ({"mesh": {"data": 2}}, 0.5)):
        other = plan(trainer_of(num_stages=2, **options), batch, costs=profile)
        assert sum(b.cost for b in other.blocks) == pytest.approx(scale * sum(b.cost for b in found.blocks))
    given = plan(trainer, batch, costs=[9, 1, 1, 1, 1, 1, 1, 1])
    assert given.stage_sizes == (1, 8)
    assert (given.blocks[0].forward, given.blocks[0].backward) == (3.0, 6.0)  # one number is both passes
    assert plan(trainer, batch, costs={f"block_{i}": 1.0 for i in range(8)}).rank_costs == (4.0, 4.0)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"costs": [1, 2]}, AssignmentError, r"costs= has 2 numbers for 8 blocks"),
        ({"costs": {"block_9": 1.0}}, AssignmentError, r"costs= names 'block_9', .* Did you mean "),
        ({"costs": {"block_0": 1.0}}, AssignmentError, r"costs= leaves out 'block_1'"),
        ({"costs": "flop"}, AssignmentError, r"costs='flop' is unknown\. Did you mean 'flops'"),
        ({"costs": 3}, TypeError, r"costs is 3 \(int\)"),
        ({"costs": [-1.0] * 8}, AssignmentError, r"costs= holds -1"),
        ({"memory_limit": "16GB"}, ScheduleError, r"memory_limit='16GB'"),
        ({"schedules": "1f2b"}, ValueError, r"unknown schedule '1f2b'"),
        ({"schedules": [Std1F1B(2)]}, ScheduleError, r"is for 2 ranks, but the trainer has 4"),
    ],
)
def test_what_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        plan(trainer_of(), batch_of(64), **options)


def test_a_plan_needs_a_pipeline():
    with pytest.raises(ValueError, match=r"a plan needs a pipeline"):
        plan(trainer_of(num_stages=1), batch_of(64))
    with pytest.raises(LimitError, match="memory_limit"):  # a pipeline of one rank
        plan(trainer_of(num_stages=1, mesh={"data": 1}), batch_of(64), memory_limit=10)


def test_what_the_trainer_fixes_stays():
    batch, residuals = batch_of(64), ResidualPlan([StageResiduals(recompute=True)] * 4)
    found = plan(lambda: trainer_of(assignment=[1, 2, 3, 2], memory=Memory(residuals=residuals)), batch)
    assert found.stage_sizes == (1, 2, 3, 3)
    assert found.residuals == residuals
