"""A program whose last save takes long, and that SIGTERM asks to end in its third step."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore
from jaxpp_flax.trainers import Checkpoints, Logging
from tests.checkpoint.program import batches, make_trainer


def main(directory: str, *, seconds: float, deadline: float | None) -> None:
    """Train in a loop of the user's own; `deadline` None is the default one."""
    options = Checkpoints(Path(directory), every=2)
    options = options if deadline is None else replace(options, preemption_deadline=deadline)
    trainer = make_trainer(options, stages=1, logging=Logging())
    save = CheckpointStore.save

    def slow(self: CheckpointStore, step: int, *arguments: object, **options: object) -> None:
        time.sleep(seconds if step == 3 else 0)
        save(self, step, *arguments, **options)  # type: ignore[arg-type]

    CheckpointStore.save = slow  # type: ignore[method-assign]
    for step, _ in trainer.training_steps(batches()):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)
    print("the loop went on")
