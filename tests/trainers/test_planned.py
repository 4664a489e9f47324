"""`PipelineTrainer(plan=)`: what a plan gives, and what is said where an argument differs from it."""

from __future__ import annotations

from dataclasses import replace

import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning import AssignmentError, Plan, PlannedBlock
from jaxpp_flax.schedules import GPipe, Interleaved1F1B, ResidualPlan, StageResiduals
from jaxpp_flax.trainers import Memory, MeshError, MeshOptions
from jaxpp_flax.trainers.mesh import build_mesh
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import assign_stages

AGAIN = ResidualPlan([StageResiduals(recompute=True), StageResiduals()])
PLAN = Plan(
    num_stages=2, num_microbatches=4, schedule=GPipe(2), residuals=AGAIN, layout={"stage": 2, "data": 4},
    blocks=[PlannedBlock(name=f"block_{i}", stage=int(i > 0)) for i in range(3)], peak_bytes=(7.0, 8.0), seconds=2.0,
)  # fmt: skip


def make(plan, **options) -> PipelineTrainer:
    model = m.Tokens(3, rngs=nnx.Rngs(0))
    return PipelineTrainer(model, optax.sgd(0.1), m.mean_loss, plan=plan, logging=False, **options)


def test_a_plan_gives_what_is_left_out(tmp_path):
    for options in (
        {"num_stages": 2, "num_microbatches": 4, "schedule": "gpipe", "mesh": {"data": 4}},
        {"schedule": GPipe(2), "memory": Memory(residuals=AGAIN), "mesh": MeshOptions(num_ranks=2)},
        {},
    ):
        trainer = make(PLAN.save(tmp_path / "plan.json"), **options)
        assert (trainer.num_stages, trainer.num_microbatches, trainer.schedule) == (2, 4, GPipe(2))
        assert dict(trainer.mesh.jax_mesh.shape) == {"stage": 2, "data": 4}
    batch = m.make_batch(16)
    loss = float(trainer.train_step(batch)["loss"])
    expected, _ = m.plain_training(m.Tokens(3, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, [batch], 4)
    tree_allclose(loss, expected[0], rtol=1e-5)
    found = trainer.plan
    assert [block.stage for block in found.blocks] == [0, 1, 1, 1]
    assert (found.residuals, found.layout, found.peak_bytes, found.seconds) == (AGAIN, PLAN.layout, (7.0, 8.0), 2.0)
    trainer.use_schedule("1f1b")
    assign_stages(trainer, batch)
    assert trainer.plan.peak_bytes == ()  # nobody has predicted these


def test_a_mesh_of_the_users_devices_fits_the_layout():
    mesh = build_mesh(2, {"data": 4})
    assert make(PLAN, mesh=mesh).mesh == mesh
    with pytest.raises(
        ValueError, match=r"mesh=\{'stage': 2\} differs from the plan, which has \{'stage': 2, 'data': 4\}"
    ):
        make(PLAN, mesh=build_mesh(2, {}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_stages": 3}, r"num_stages=3 differs from the plan, which has 2. Leave num_stages out"),
        ({"num_microbatches": 8}, r"num_microbatches=8 differs from the plan, which has 4"),
        ({"schedule": "1f1b"}, r"schedule=Std1F1B\(.*\) differs from the plan, which has GPipe"),
        ({"schedule": Interleaved1F1B(2, 1)}, r"schedule=Interleaved1F1B.* differs from the plan"),
        ({"mesh": {"data": 2}}, r"the mesh's axes=\{'data': 2\} differs from the plan, which has \{'data': 4\}"),
        ({"mesh": MeshOptions(num_ranks=1)}, r"num_ranks=1 differs from the plan, which has 2"),
        ({"memory": Memory(residuals=ResidualPlan.keep(2))}, r"residuals=.* differs from the plan"),
        ({"assignment": "even"}, r"both plan= and assignment='even' are given"),
    ],
)
def test_what_differs_from_the_plan(options, text):
    with pytest.raises(ValueError, match=text):
        make(PLAN, **options)


def test_a_plan_for_fewer_devices_leaves_none_idle_unless_the_mesh_says_so():
    less = replace(PLAN, layout={"stage": 2, "data": 2})
    with pytest.raises(MeshError, match=r"is for 4 devices, but there are 8: .*or allow it, by mesh=\{'data': 2\}"):
        make(less)
    assert dict(make(less, mesh={"data": 2}).mesh.jax_mesh.shape) == {"stage": 2, "data": 2}


def test_what_is_no_plan(tmp_path):
    with pytest.raises(TypeError, match=r"plan must be a jaxpp_flax.planning.Plan or its JSON file, got int: 3"):
        make(3)
    with pytest.raises(FileNotFoundError, match=r"plan.json', does not exist"):
        make(tmp_path / "plan.json")
    for name in ("num_stages", "num_microbatches"):
        given = {"num_stages": 2, "num_microbatches": 4}
        del given[name]
        with pytest.raises(TypeError, match=f"PipelineTrainer needs {name}=, a whole number, or a plan= that has it"):
            make(None, **given)
    with pytest.raises(TypeError, match="the plan has no num_microbatches"):
        make(replace(PLAN, num_microbatches=None))


def test_a_plan_for_another_model():
    other = replace(PLAN, blocks=[PlannedBlock(name=f"blok_{i}", stage=int(i > 0)) for i in range(3)])
    with pytest.raises(
        AssignmentError, match=r"puts 'blok_0' on stage 0, but the model has no such block. Did you mean"
    ):
        make(other).compile(m.make_batch(16))
