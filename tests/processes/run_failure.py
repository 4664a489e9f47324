"""Run by `test_failure.py`: trains until it is ended, and says each step.

Usage: run_failure.py [BATCHES OF PROCESS 1]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.processes.running import join_watched_run

join_watched_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.trainers import Callback  # noqa: E402
from tests.trainers.models import Layers  # noqa: E402


class Say(Callback):
    """Says each step; later ones come slowly, so that a busy test sees one before the next comparison of batches."""

    def on_step(self, trainer: Any, record: Any) -> None:
        print(f"step {record.step}", flush=True)
        if record.step > 33:
            time.sleep(0.1)


def batches(count: int) -> Iterator[Any]:
    """Equal ones."""
    for _ in range(count):
        yield {"x": np.ones((8, 8), np.float32)}


mine = int(sys.argv[1]) if len(sys.argv) > 1 and jax.process_index() == 1 else 1_000_000
trainer = PipelineTrainer(
    Layers(jax.process_count(), 8),
    optax.sgd(0.1),
    lambda model, batch: jnp.mean(model(batch["x"]) ** 2),
    num_stages=jax.process_count(),
    num_microbatches=4,
    logging=False,
)
trainer.fit(batches(mine), callbacks=[Say()])
