"""The arguments of `fit`, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp_flax.counts import check_count
from jaxpp_flax.trainers.callbacks.base import Callback, named
from jaxpp_flax.trainers.callbacks.stop_conditions import EarlyStopping
from jaxpp_flax.trainers.checkpoints import Resume, check_resume
from jaxpp_flax.trainers.data.remainder import Remainder
from jaxpp_flax.trainers.data.source import ResumeData
from jaxpp_flax.trainers.data.stream import check_batches

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
    eval_data: Iterable[Any] | None
    eval_every: int | None
    eval_global_batch_size: int | None
    callbacks: Sequence[Callback]
    resume: Resume
    resume_data: ResumeData

    def __post_init__(self) -> None:
        named(self.callbacks)
        for callback in self.callbacks:
            if self.eval_data is None and isinstance(callback, EarlyStopping):
                raise ValueError("EarlyStopping counts evaluations: pass eval_data= and eval_every=.")
        check_resume(self.resume)
        for name in ("steps", "epochs", "global_batch_size", "eval_every", "eval_global_batch_size"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, value))
        if self.eval_data is not None:
            check_batches("eval_data", self.eval_data)
        for name in ("eval_every", "eval_global_batch_size") if self.eval_data is None else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)}, but there is nothing to evaluate: pass eval_data=.")
        if self.eval_every is not None and isinstance(self.eval_data, Iterator):
            raise ValueError(
                f"eval_every={self.eval_every} needs eval_data that can be iterated again, but a "
                f"{type(self.eval_data).__name__} can be iterated only once. Pass a list."
            )

    def common(self) -> Mapping[str, Any]:
        """Return the arguments that all processes must pass alike."""
        own = ("eval_data", "callbacks", "resume_data")
        return {name: value for name, value in vars(self).items() if name not in own}
