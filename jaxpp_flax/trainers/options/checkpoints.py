"""The options of checkpoints."""

from __future__ import annotations

import os
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias

from jaxpp_flax.checkpoint.best import Best
from jaxpp_flax.checkpoint.checkpoint_store import KeepPolicy, SavePolicy
from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.options.base import misfit

__all__ = ["Checkpoints"]


Directory: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Checkpoints:
    """The options of checkpoints, `checkpoints=`: where and when to save, and how many checkpoints to keep.

    A directory alone, `checkpoints="run"`, means `Checkpoints("run")`: `save` and `restore` use this directory, and
    `fit` saves its last step. See `docs/guides/checkpointing.md`.

    Args:
      directory: the directory of all checkpoints; it gets one directory for each saved step.
      every: steps between two saves in `fit`, which also saves its last step; or an Orbax save decision policy. None:
        `fit` saves its last step alone, and `training_steps` nothing.
      memory_every: steps between two copies of the state in the host's memory, from which `fit` goes on when the
        launcher starts the run again (`python -m jaxpp_flax.launch -n 4 --max-restarts 3 ...`, Linux), unless a
        checkpoint is newer. The host holds two copies, and none after the end of the run. A copy waits for its step.
        With `--ray`, each host also holds those of the host before it, which come during the next step: a step is kept
        once they have come, and the copy after it waits for them. None makes no copies.
      keep: how many of the latest checkpoints to keep, or an Orbax preservation policy. None keeps all.
      best: a metric such as "eval_loss": the checkpoint with its best value is kept too, and `restore("best")` reads
        it. A checkpoint has the metrics of its own step, so save and evaluate at the same steps. The summary at the
        end of `fit` names the best value that was logged.
      best_mode: "min" if smaller values are better; "max" if larger values are, as for an accuracy.
      asynchronous: write checkpoints in the background while training continues.
      preemption_deadline: SIGTERM ends `fit` and `training_steps` as `trainer.stop` does, with a checkpoint. After this
        many seconds the process ends without a checkpoint, and says so. The scheduler must wait longer before it kills
        the process: `docs/guides/jobs/slurm.sh` gives 120 s. None does not handle the signal.

    Raises:
      TypeError, ValueError: if a field has a value that does not fit; the message names the field.

    Example:
      >>> Checkpoints("run", every=100, keep=3).every
      100
    """

    directory: Directory
    _: KW_ONLY
    every: SavePolicy | None = None
    memory_every: int | None = None
    keep: KeepPolicy | None = None
    best: str | None = None
    best_mode: Literal["min", "max"] = "min"
    asynchronous: bool = True
    preemption_deadline: float | None = 110.0

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)):
            raise misfit("directory", self.directory, "a path")
        for name, of_policy in (("every", "should_save"), ("keep", "should_preserve")):
            value = getattr(self, name)
            if value is not None and not hasattr(value, of_policy):
                object.__setattr__(self, name, check_count(name, value, ", a policy, or None"))
        if self.memory_every is not None:
            check_count("memory_every", self.memory_every, " or None")
        _ = self.ranking
        if self.preemption_deadline is not None and not self.preemption_deadline > 0:
            raise ValueError(f"preemption_deadline={self.preemption_deadline!r}: it must be seconds above 0, or None.")

    @property
    def ranking(self) -> Best | None:
        """The metric that ranks checkpoints."""
        return None if self.best is None else Best(self.best, self.best_mode)

    @classmethod
    def of(cls, value: Checkpoints | Directory | None) -> Checkpoints | None:
        """Convert the trainer's `checkpoints=`."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, (str, os.PathLike)):
            return cls(value)
        raise misfit("checkpoints", value, "a directory, or Checkpoints(directory, every=..., keep=...)")
