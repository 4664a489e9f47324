"""Trackers write metrics to memory, a JSONL file, TensorBoard, Weights & Biases, MLflow, or several of these."""

from jaxpp_flax.trainers.trackers.base import CompositeTracker, DictTracker, Tracker
from jaxpp_flax.trainers.trackers.files import JsonlTracker, TensorBoardTracker
from jaxpp_flax.trainers.trackers.services import MlflowTracker, WandbTracker

__all__ = [
    "CompositeTracker",
    "DictTracker",
    "JsonlTracker",
    "MlflowTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
]
