"""Trackers write metrics to memory, a JSONL file, TensorBoard, Weights & Biases, or several of these."""

from jaxpp_flax.trainers.trackers.base import CompositeTracker, DictTracker, JsonlTracker, NoopTracker, Tracker
from jaxpp_flax.trainers.trackers.extras import TensorBoardTracker, WandbTracker

__all__ = [
    "CompositeTracker",
    "DictTracker",
    "JsonlTracker",
    "NoopTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]
