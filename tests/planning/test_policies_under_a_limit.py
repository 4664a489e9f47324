"""A plan and what a stage may not recompute: values that a user's policy saves, and side effects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning import Hardware, plan
from jaxpp_flax.schedules import ResidualPlan, StageResiduals
from jaxpp_flax.trainers import Memory
from tests.helpers import slow

POLICIES = jax.checkpoint_policies
SAVED = POLICIES.save_only_these_names("h")
ON_HOST = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)
BATCH = {key: jnp.ones((512, 64)) for key in "xy"}
H, X = (64, 256), (64, 64)  # of a microbatch: what a policy names, and what goes from block to block


class Block(nnx.Module):
    def __init__(self, policy, effect, rngs):
        self.up, self.down = (nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in ((64, 256), (256, 64)))
        self.policy, self.effect = policy, effect

    def run(self, x):
        h = checkpoint_name(jnp.sin(self.up(x)), "h")
        if self.effect:
            h = h * io_callback(lambda: jnp.float32(1), jax.ShapeDtypeStruct((), jnp.float32))
        return x + self.down(jnp.sin(h) if self.effect else h)

    def __call__(self, x):
        if self.policy is None:
            return self.run(x)
        policy = None if self.policy == "full" else self.policy
        return nnx.remat(lambda module, x: module.run(x), policy=policy)(self, x)


class Blocks(nnx.Module):
    def __init__(self, policy, effect, count, rngs):
        blocks = [Block(policy, effect, rngs) for _ in range(count)]
        self.blocks = nnx.List([PipelineStage(block, name=f"b{i}") for i, block in enumerate(blocks)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


CARD = Hardware(flops=1e12, host_bandwidth=1e3)  # a slow link: recomputation is the cheaper way


def trainer_of(policy=None, effect=False, per_stage=1, **options):
    model = Blocks(policy, effect, 2 * per_stage, nnx.Rngs(0))
    return PipelineTrainer(
        model, optax.sgd(0.1), lambda m, b: jnp.mean((m(b["x"]) - b["y"]) ** 2),
        num_stages=2, num_microbatches=8, schedule="gpipe", logging=False,
        assignment=[per_stage, per_stage], **options,
    )  # fmt: skip


def kept(trainer) -> list[tuple[int, ...]]:
    """The shapes of what the first stage's forward hands on."""
    program = trainer.compile(BATCH).program
    return [v.aval.shape for task in program.tasks if task.name == "fwd_0" for v in task.graph.outputs]


RECOMPUTE = ResidualPlan([StageResiduals(recompute=True)] * 2)


@pytest.mark.parametrize(("policy", "data"), [("full", 2), (SAVED, 1), slow("full", 1), slow(SAVED, 2)])
def test_a_limit_that_stages_of_blocks_with_remat_meet_by_recomputation_is_not_refused(policy, data):
    """A stage that recomputes keeps its own input, and not those of its blocks; a data axis changes nothing."""
    options = {"policy": policy, "per_stage": 3, "mesh": {"data": data}}
    held = lambda **more: [r.held_bytes for r in trainer_of(**options, **more).compile(BATCH).memory_analysis()]  # noqa: E731
    limit = held(memory=Memory(residuals=RECOMPUTE))
    found = plan(trainer_of(**options), BATCH, memory_limit=limit, hardware=CARD)
    assert all(stage.recompute for stage in found.residuals.stages)
    assert max(limit) < min(held())
    used = held(memory=Memory(residuals=found.residuals))
    assert used == list(found.peak_bytes)
    assert all(bytes_used <= most for bytes_used, most in zip(used, limit, strict=True))


@pytest.mark.parametrize("place", ["block", "trainer"])
def test_a_value_that_a_policy_saves_is_not_recomputed(place):
    of_block, of_trainer = (SAVED, None) if place == "block" else (None, SAVED)
    trainer = trainer_of(of_block, memory=Memory(remat=of_trainer, residuals=RECOMPUTE))
    assert kept(trainer).count(H) == 1


def test_full_remat_saves_nothing_from_a_plan():
    assert kept(trainer_of(memory=Memory(remat="full", residuals=RECOMPUTE))) == [X]


@pytest.mark.parametrize("limit", [870_000, 810_000])
def test_a_limit_counts_what_policies_save(limit):
    """The saved values of 8 microbatches alone are 0.52 MB in each stage: they move to the host."""
    found = plan(trainer_of(SAVED), BATCH, memory_limit=limit, hardware=CARD)
    trainer = trainer_of(SAVED, memory=Memory(residuals=found.residuals))
    for rank, predicted in zip(trainer.compile(BATCH).memory_analysis(), found.peak_bytes, strict=True):
        assert rank.held_bytes == predicted <= limit
    assert all(stage.offload for stage in found.residuals.stages)


def test_a_policy_that_offloads_takes_no_device_memory():
    found = plan(trainer_of(ON_HOST), BATCH)
    rows = trainer_of(ON_HOST).compile(BATCH).memory_analysis()
    assert [r.held_bytes for r in rows] == list(found.peak_bytes)


@pytest.mark.parametrize("limit", [1_300_000, 1_240_000])
def test_a_stage_with_effects_is_not_recomputed(limit):
    residuals = plan(trainer_of(effect=True), BATCH, memory_limit=limit, hardware=CARD).residuals
    assert not residuals.is_kept
    assert all(stage.recompute is not True for stage in residuals.stages)
