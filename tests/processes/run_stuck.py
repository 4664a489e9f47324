"""Run by `test_stuck.py`: trains until process 1 stands still in step 5.

Usage: run_stuck.py (callback | data | collective)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.trainers import Callback  # noqa: E402

WHERE, ME = sys.argv[1], jax.process_index()
STEP = 5


class Middle(nnx.Module):
    """A stage that calls the host, which does not answer for the batch of `STEP`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if WHERE == "callback":
            jax.debug.callback(wait_for_ever, x[0, 0])
        if WHERE == "collective":  # the processes of this stage each have a part of the batch
            x = x - x.mean(axis=0)
        return self.linear(x)


class Model(nnx.Module):
    """Three stages, or two."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        layers = [nnx.Linear(4, 4, rngs=rngs), Middle(rngs), nnx.Linear(4, 4, rngs=rngs)]
        if WHERE == "collective":  # two processes a stage
            layers = [Middle(rngs), nnx.Linear(4, 4, rngs=rngs)]
        self.stages = nnx.List([PipelineStage(layer) for layer in layers])
        self.first = nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in self.stages:
            x = stage(x)
        return x


def wait_for_ever(_: Any) -> None:
    """Stand still, once the data say so."""
    if Steps.step >= STEP:
        time.sleep(600.0)


class Steps(Callback):
    """Counts the steps, for the call of the host."""

    step = 0

    def on_step(self, trainer: Any, record: Any) -> None:
        Steps.step = record.step
        print(f"step {record.step}", flush=True)


def batches() -> Iterator[Any]:
    """Equal ones; the loader of process 1 stands still."""
    number = 0
    while True:
        number += 1
        if ME == 1 and WHERE in ("data", "collective") and number > STEP:
            time.sleep(600.0)
        yield {"x": np.ones((8, 4), np.float32)}


trainer = PipelineTrainer(
    Model(nnx.Rngs(0)),
    optax.sgd(0.01),
    lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
    num_stages=2 if WHERE == "collective" else 3,
    num_microbatches=4,
    logging=False,
)
trainer.fit(batches(), steps=1_000_000, callbacks=[Steps()])
