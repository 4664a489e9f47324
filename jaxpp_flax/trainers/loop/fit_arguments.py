"""The arguments of `fit`, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.callbacks.base import Callback, named
from jaxpp_flax.trainers.callbacks.stop_conditions import EarlyStopping
from jaxpp_flax.trainers.checkpoints import Resume, check_resume
from jaxpp_flax.trainers.data.evaluation_sets import evaluation_sets
from jaxpp_flax.trainers.data.remainder import Remainder
from jaxpp_flax.trainers.data.source import ResumeData

__all__ = ["FitArguments"]


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """The checked arguments of `PipelineTrainer.fit`, without the data; see their description there.

    Raises:
      TypeError, ValueError: the message names the argument that does not fit.
    """

    steps: int | None
    epochs: int | None
    global_batch_size: int | None
    remainder: Remainder | None
    eval_data: Iterable[Any] | Mapping[str, Iterable[Any]] | None
    eval_every: int | None
    eval_steps: int | None
    eval_global_batch_size: int | None
    callbacks: Sequence[Callback]
    resume: Resume
    resume_data: ResumeData

    def __post_init__(self) -> None:
        named(self.callbacks)
        check_resume(self.resume)
        of_evaluation = ("eval_every", "eval_steps", "eval_global_batch_size")
        for name in ("steps", "epochs", "global_batch_size", *of_evaluation):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, value))
        every = None if self.eval_every is None else f"eval_every={self.eval_every}"
        sets = {} if self.eval_data is None else evaluation_sets("eval_data", self.eval_data, every=every)
        for callback in self.callbacks:
            if not sets and isinstance(callback, EarlyStopping):
                raise ValueError("EarlyStopping counts evaluations: pass eval_data= and eval_every=.")
            if isinstance(callback, EarlyStopping):
                callback.check_sets([*sets])
        for name in of_evaluation if not sets else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)}, but there is nothing to evaluate: pass eval_data=.")

    def common(self) -> Mapping[str, Any]:
        """Return the arguments that all processes must pass alike; of the data to evaluate, the names of the sets."""
        own = ("eval_data", "callbacks", "resume_data")
        sets = ", ".join(map(repr, self.eval_data)) if isinstance(self.eval_data, Mapping) else ""
        common = {name: value for name, value in vars(self).items() if name not in own}
        return {**common, "eval_data": f"sets {sets}"} if sets else common
