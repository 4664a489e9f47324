"""Run by `test_measured.py`: measured steps, and choices by measured times. Prints what this process has found."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.trainers import AutoSchedule, Balanced, MeshOptions  # noqa: E402
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


def auto() -> dict[str, Any]:
    t = trainer(AutoSchedule(steps=1, evaluations=50, stages_per_rank=(1,)))
    plain = trainer("1f1b")
    losses = []
    for seed in range(8):
        batch = m.make_batch(16, seed)
        losses.append((float(t.train_step(batch)["loss"]), float(plain.train_step(batch)["loss"])))
    assert np.allclose(*zip(*losses, strict=True), rtol=1e-5, atol=0)  # sums in another order
    report = t.schedule_report
    return {"chosen": repr(report.chosen), "predicted": report.predicted, "measured": report.measured}


def blocks() -> dict[str, Any]:
    t = trainer("1f1b", assignment=Balanced(cost="measured"))
    t.compile(m.make_batch(16, 0))
    plan = t.plan
    return {"costs": [[block.forward, block.backward] for block in plan.blocks if block.cost is not None]}


print("found " + json.dumps({"measured": measured(), "auto": auto(), "blocks": blocks()}), flush=True)
