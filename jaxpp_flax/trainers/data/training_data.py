"""What a trainer knows of its data."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding
from jaxpp_flax.trainers.data.stream import DataTracking

__all__ = ["TrainingData"]


@dataclass(frozen=True)
class TrainingData:
    """The data of a trainer.

    Attributes:
      rows: divides a batch among microbatches, devices and processes.
      tracking: knows the position of the run in its data.
      trained_on: compares the batches that the processes train on.
    """

    rows: BatchSharding
    tracking: DataTracking
    trained_on: BatchComparison
