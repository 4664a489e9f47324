"""A profile of some steps of `fit`, as a trace of XLA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.callbacks.base import Callback, StepRecord, has_failed

__all__ = ["Profile"]


class Profile(Callback):
    """Writes an XLA trace of some steps, for Perfetto (`*.trace.json.gz`), TensorBoard and xprof (`*.xplane.pb`).

    The rows of the devices show each task, such as `jit_fwd_1`. Its operations have the names of the blocks and of
    `jax.named_scope`. Tasks with equal code share one executable: its operations have the names of the first task.

    With several processes, each one writes a trace of its own devices, in a folder `process_0`, `process_1`, ...

    Args:
      start: the first step to profile, counted from the beginning of `fit`, from 1. Step 1 is slower than others.
      steps: the number of steps to profile.
      directory: the folder of the trace.
      python: True also records every Python call, which slows down the steps.

    Raises:
      ValueError: if `start` or `steps` is below 1.
      RuntimeError: from `fit`, if another JAX profile is running.

    Example:
      >>> import glob, tempfile, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineTrainer
      >>> trainer = PipelineTrainer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1),
      ...                           lambda model, x: (model(x) ** 2).mean(), num_stages=1, num_microbatches=2,
      ...                           logging=False)
      >>> folder = tempfile.mkdtemp()
      >>> _ = trainer.fit([jnp.ones((4, 2))], steps=3, callbacks=[Profile(start=2, steps=1, directory=folder)])
      >>> len(glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True))
      1
    """

    def __init__(
        self, *, start: int = 3, steps: int = 3, directory: str | os.PathLike[str] = "profile", python: bool = False
    ) -> None:
        super().__init__()
        self._start, self._steps = check_count("Profile: start", start), check_count("Profile: steps", steps)
        self._directory, self._python = Path(directory), python
        self._before = 0  # the step before the first one of `fit`
        self._runs = False

    def on_fit_start(self, trainer: Any) -> None:
        self._before = trainer.step
        self._look(trainer, trainer.step)

    def on_step(self, trainer: Any, record: StepRecord) -> None:
        self._look(trainer, record.step)

    def _look(self, trainer: Any, step: int) -> None:
        done = step - self._before
        if self._runs and done == self._start + self._steps - 1:
            self._end(trainer, step)
        elif done == self._start - 1:
            jax.block_until_ready(jax.tree.leaves(trainer.state))  # earlier steps are not part of the profile
            self._begin()

    def on_fit_end(self, trainer: Any, error: BaseException | None) -> None:
        if self._runs:
            # After an error the state may be deleted, or never become ready.
            self._end(trainer, trainer.step, waits=not has_failed(error))
        elif trainer.step - self._before < self._start:
            trainer.message(
                f"no profile: Profile(start={self._start}), but fit ended after {trainer.step - self._before} steps"
            )

    @property
    def _folder(self) -> Path:
        # Processes of one host would overwrite each other's files.
        return self._directory / f"process_{jax.process_index()}" if jax.process_count() > 1 else self._directory

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._python)
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
        except RuntimeError as error:
            raise RuntimeError(
                f"Profile(start={self._start}) cannot begin: {error} End the other profile before `fit`, or leave out "
                "one of them."
            ) from error
        self._runs = True

    def _end(self, trainer: Any, step: int, *, waits: bool = True) -> None:
        self._runs = False
        try:
            if waits:
                jax.block_until_ready(jax.tree.leaves(trainer.state))
        finally:
            jax.profiler.stop_trace()
        trainer.message(
            f"profile of steps {self._before + self._start} to {step}: {self._directory}. Open its *.trace.json.gz at "
            f"ui.perfetto.dev, or run `tensorboard --logdir {self._directory}`."
        )
