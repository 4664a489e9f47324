"""The steps of a training loop: one record for each batch, for the loop of `fit` or of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from jaxpp_flax.trainers.data.batch import count_units
from jaxpp_flax.trainers.trackers import Tracker

__all__ = ["StepHook", "StepRecord", "TrainerProtocol", "steps_of"]


@dataclass(frozen=True)
class StepRecord:
    """A step that was dispatched.

    Args:
      step: the number of the step, from 1.
      metrics: values that may not be ready yet.
      units: the number of tokens or examples in the step's batch.
      unit: "tokens" or "examples".
    """

    step: int
    metrics: Mapping[str, Any]
    units: int
    unit: str


StepHook = Callable[[StepRecord], None]
"""A function that is called after each step, before the next batch is drawn."""


class TrainerProtocol(Protocol):
    """The attributes of the trainer that a loop and its callbacks use."""

    tracker: Tracker
    stopping: str | None

    @property
    def step(self) -> int: ...
    def compile(self, batch: Any, *, global_batch_size: int | None = None) -> Any: ...
    def train_step(self, batch: Any, *, global_batch_size: int | None = None) -> dict[str, Any]: ...
    def evaluate(self, data: Iterable[Any], *, global_batch_size: int | None = None) -> dict[str, Any]: ...


def steps_of(
    trainer: TrainerProtocol,
    source: Iterable[Any],
    global_batch_size: int | None,
    *,
    begin: Callable[[Any], bool],
    within: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[StepRecord]:
    """Train on every batch of `source`; a step runs when the consumer asks for its record.

    Args:
      trainer: takes the steps.
      source: the batches.
      global_batch_size: as in `fit`.
      begin: called with the first batch, before its step; False ends the loop without a step.
      within: makes the context manager to enter around each step.
    """
    for number, batch in enumerate(source):
        if not number and not begin(batch):
            return
        with within():
            metrics = trainer.train_step(batch, global_batch_size=global_batch_size)
        units, unit = count_units(batch, global_batch_size)
        yield StepRecord(trainer.step, metrics, units, unit)
