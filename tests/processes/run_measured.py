"""Run by `test_measured.py`: measured steps, and choices by measured times. Prints what this process has found."""

from __future__ import annotations

import sys
from typing import Any

from tests.processes.running import join_run, tell

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.planning import plan  # noqa: E402
from jaxpp_flax.trainers import MeshOptions  # noqa: E402
from tests.trainers import models as m  # noqa: E402


def trainer(schedule: Any, **options: Any) -> PipelineTrainer:
    ranks = jax.device_count() // 2 if "data" in sys.argv else jax.device_count()
    mesh = MeshOptions(num_ranks=ranks, axes={"data": 2} if "data" in sys.argv else {})
    return PipelineTrainer(
        m.Model(4, rngs=nnx.Rngs(0)), optax.adam(0.01), m.mean_loss,
        num_stages=ranks, num_microbatches=4, schedule=schedule, mesh=mesh, logging=False, **options,
    )  # fmt: skip


def measured() -> dict[str, Any]:
    t, plain = trainer("1f1b"), trainer("1f1b")
    batches = [m.make_batch(16, seed) for seed in range(3)]
    t.train_step(batches[0])
    profile = t.profile_step(batches[1])
    losses = [float(profile.metrics["loss"]), float(t.train_step(batches[2])["loss"])]
    expected = [float(plain.train_step(batch)["loss"]) for batch in batches][1:]
    events = [[[str(e.task), e.start, e.end] for e in rank] for rank in profile.measured.events]
    return {
        "equal": losses == expected,
        "measured": events,
        "simulated": profile.simulated.makespan,
        "order": [[str(task) for task in rank] for rank in t.schedule.tasks(4)],
        "drawn": profile.draw(),
    }


def planned() -> dict[str, Any]:
    """Every process makes the same plan, without the others, and trains by it."""
    t, plain = trainer("1f1b"), trainer("1f1b")
    batches = [m.make_batch(16, seed) for seed in range(3)]
    t.train_step(batches[0])
    costs = t.profile_step(batches[1])
    found = plan(t, batches[0], schedules=["1f1b", "gpipe", "zero_bubble"], costs=costs)
    made = trainer(None, plan=found)
    losses = [(float(made.train_step(b)["loss"]), float(plain.train_step(b)["loss"])) for b in batches]
    assert np.allclose(*zip(*losses, strict=True), rtol=1e-5, atol=0)  # sums in another order
    exact = [rank.held_bytes for rank in made.compile(batches[0]).memory_analysis()]
    return {
        "schedule": repr(found.schedule),
        "costs": [[block.forward, block.backward] for block in found.blocks],
        "planned": found.peak_bytes,
        "exact": exact,
    }


tell({"measured": measured(), "planned": planned()})
