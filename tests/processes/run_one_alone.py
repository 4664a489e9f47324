"""Run by `test_one_alone.py`: two processes train; then process 0 makes a call that process 1 does not.

Usage: run_one_alone.py CALL WHAT_PROCESS_1_DOES FOLDER
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from tests.processes.running import join_watched_run

join_watched_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.trainers import Checkpoints  # noqa: E402


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    """Any."""
    return (model(x) ** 2).mean()


class ByTheClock:
    """Asks for a checkpoint in process 0 alone, as a clock of its own may."""

    def should_save(self, *_: Any, **__: Any) -> bool:
        """Any."""
        return jax.process_index() == 0

    def get_decision(self, *_: Any, **__: Any) -> Any:
        """Any."""
        return SimpleNamespace(should_save=self.should_save())


call, other, folder = sys.argv[1:]
checkpoints = Checkpoints(folder, every=ByTheClock()) if call == "fit" else None
layers = [PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i))) for i in range(2)]
trainer = PipelineTrainer(
    nnx.Sequential(*layers),
    optax.sgd(0.1),
    loss_fn,
    num_stages=2,
    num_microbatches=2,
    logging=False,
    checkpoints=checkpoints,
)
batch = np.ones((4, 4), np.float32)
trainer.fit([batch] * 3)
print("trained", flush=True)
if jax.process_index() == 0:
    if call == "train_step":  # it waits for what process 1 is to send
        float(trainer.train_step(batch)["loss"])
    else:
        trainer.save(folder) if call == "save" else trainer.gather_model()
elif other == "trains":
    for _ in range(100):
        float(trainer.train_step(batch)["loss"])
elif other == "trains another shape":
    trainer.train_step(batch[:2])
elif other == "evaluates":
    trainer.evaluate([batch])
