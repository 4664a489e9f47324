"""Losses and parameters have the same bits for each schedule and number of ranks.

Stages and data axis are the same: "auto" may cut otherwise for another schedule. `circular_reversed` is left out: it
adds the gradients of the last microbatch first.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import MeshOptions
from tests.helpers import slow_but
from tests.trainers import models as m

LAYOUTS = {
    "gpipe": 4,
    "zero_bubble": 4,
    "gpipe_1f1b_last": 4,
    "eager_1f1b": 4,
    "zero_bubble_h2": 4,
    "interleaved_1f1b": 2,
    "interleaved_gpipe": 2,
    "kimi_k2": 2,
    "circular": 2,
    "zbv": 2,
    "dualpipe_v": 2,
}


def trained(schedule: str, num_ranks: int, axes: dict[str, int]) -> list[np.ndarray[Any, Any]]:
    trainer = PipelineTrainer(
        m.Tokens(4, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.weighted_loss, num_stages=4, num_microbatches=8,
        assignment="even", schedule=schedule, mesh=MeshOptions(num_ranks=num_ranks, axes=axes), logging=False,
    )  # fmt: skip
    losses = [trainer.train_step(m.make_batch(16, seed))["loss"] for seed in range(2)]
    return [*map(np.asarray, losses), *map(np.asarray, jax.tree.leaves(trainer.state.params))]


expected = cache(lambda sharded: trained("1f1b", 4, {"data": 2} if sharded else {}))


@pytest.mark.parametrize("schedule", slow_but(LAYOUTS, "zbv"))
def test_a_schedule_changes_no_bit(schedule: str):
    for one, other in zip(trained(schedule, LAYOUTS[schedule], {}), expected(False), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble", "zero_bubble_h2"])
def test_nor_with_a_data_axis(schedule: str):
    for one, other in zip(trained(schedule, 4, {"data": 2}), expected(True), strict=True):
        np.testing.assert_array_equal(one, other)
