"""Trains with checkpoints as several processes, to be killed: `-m tests.launch.training DIRECTORY STEPS`, launched."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

print("pid", os.getpid(), flush=True)

import jax  # noqa: E402

from jaxpp_flax.trainers import Callback, Checkpoints  # noqa: E402
from tests.checkpoint.program import batches, make_trainer  # noqa: E402


class Losses(Callback):
    """Says each step's loss, to the last bit: every process knows it."""

    def on_metrics(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        print(f"step {step} loss {float(metrics['loss']).hex()}", flush=True)


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    count = max(2, jax.process_count())
    trainer = make_trainer(Checkpoints(directory, every=1, keep=3), stages=count, depth=count)
    print("compiling", flush=True)
    trainer.fit(batches(), steps=steps, resume=True, callbacks=[Losses()])


if __name__ == "__main__":
    main()
