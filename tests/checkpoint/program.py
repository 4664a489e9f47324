"""A program that trains with checkpoints, to be killed: `python -m tests.checkpoint.program DIRECTORY STEPS`.

With `hang`, a third argument, the devices are kept busy for ever after step 2; a fourth is the deadline of SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Callback, Checkpoints, Logging
from tests.trainers.models import Layers, make_xy, squared_error
from tests.trainers.sharing import sharing_steps

WIDTH = 6


class MLP(Layers):
    def __init__(self, depth: int, *, rngs: nnx.Rngs, dropout: float = 0.1):
        super().__init__(depth, WIDTH, rngs=rngs, dropout=dropout)


def batches(count: int = 1000):
    for seed in range(count):
        yield make_xy(4, WIDTH, seed)


@sharing_steps("checkpoints", "logging")
def make_trainer(
    checkpoints: Path | Checkpoints | None,
    stages: int = 2,
    depth: int = 2,
    loss: Callable[..., Any] = squared_error,
    **options: Any,
) -> PipelineTrainer:
    defaults = {"num_microbatches": 2, "mesh": {}, "logging": Logging(progress=False, every=1)}
    options = {"num_stages": stages, **defaults, **options}
    return PipelineTrainer(
        MLP(depth, rngs=nnx.Rngs(0)), optax.sgd(0.1, momentum=0.9), loss, checkpoints=checkpoints, **options
    )


class Report(Callback):
    """A line after each step: the moment to kill at is counted from the first."""

    def __init__(self, hang: bool):
        super().__init__()
        self.hang = hang

    def on_step(self, trainer, record):
        jax.block_until_ready(jax.tree.leaves(trainer.state))
        print(f"took step {record.step}", flush=True)
        if self.hang and record.step == 2:
            print("hanging", flush=True)
            endless = jax.jit(lambda x: jax.lax.while_loop(lambda y: y > -1.0, lambda y: y + 1.0, x))
            endless(jnp.zeros(())).block_until_ready()  # inside JAX, where no signal handler of Python runs


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    deadline = float(sys.argv[4]) if len(sys.argv) > 4 else 30.0
    trainer = make_trainer(Checkpoints(directory, every=1, keep=3, preemption_deadline=deadline))
    trainer.fit(batches(), steps=steps, resume=True, callbacks=[Report(hang="hang" in sys.argv[3:4])])


if __name__ == "__main__":
    main()
