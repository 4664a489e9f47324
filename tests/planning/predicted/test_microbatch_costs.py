"""The costs of microbatches: the work of the tasks that a program runs for each of them."""

import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning.predicted.microbatch_costs import microbatch_costs
from jaxpp_flax.schedules import TaskKind
from tests.helpers import slow
from tests.trainers.models import Model


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch), batch).mean()


@pytest.mark.parametrize("schedule", ["1f1b", slow("gpipe"), "zero_bubble"])
def test_the_tasks_of_a_microbatch_have_the_work_of_the_stages(schedule):
    model = Model(2, rngs=nnx.Rngs(0))
    trainer = PipelineTrainer(
        model, optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=3, schedule=schedule, logging=False
    )
    compiled = trainer.compile(np.zeros((6, 5), np.int32))
    costs = microbatch_costs(compiled.program, 2)
    assert costs == [costs[0]] * 3
    table = costs[0].table(2)
    assert table.times[TaskKind.FUSED] == pytest.approx([stage.flops for stage in compiled.stages])
    inputs, weights = (table.times[kind] for kind in (TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT))
    halves = [i + w for i, w in zip(inputs, weights, strict=True)]
    assert halves == pytest.approx(table.times[TaskKind.BACKWARD])
    assert all(seconds > 0 for seconds in table.times[TaskKind.FORWARD])
