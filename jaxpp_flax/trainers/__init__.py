"""Training: `PipelineTrainer`, callbacks and trackers."""

from pathlib import Path

from jax.extend import source_info_util

from jaxpp_flax.planning.profile import StepProfile
from jaxpp_flax.trainers.callbacks import Callback
from jaxpp_flax.trainers.ending.preemption import KILLED_STATUS, PREEMPTED_STATUS
from jaxpp_flax.trainers.errors import (
    BatchError,
    BatchStatisticsWarning,
    DataPositionError,
    LossError,
    MeshError,
    MicrobatchLossWarning,
    ModelError,
    NonFiniteLossError,
    UnusedParametersWarning,
)
from jaxpp_flax.trainers.loop.hooks import Evaluate, LogMetrics, LoopHook, StepHook, StepRecord
from jaxpp_flax.trainers.loop.progress import Meter
from jaxpp_flax.trainers.loop.trackers import (
    CompositeTracker,
    DictTracker,
    JsonlTracker,
    MlflowTracker,
    NoopTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from jaxpp_flax.trainers.metrics.throughput import Throughput
from jaxpp_flax.trainers.options import (
    Checkpoints,
    Inference,
    Logging,
    Memory,
    MeshOptions,
    Parameters,
    Precision,
    RandomStreams,
)
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.optimizer_update import DynamicLossScale
from jaxpp_flax.trainers.step.whole_batch import WholeBatchLoss
from jaxpp_flax.trainers.trainer import PipelineTrainer

# Messages name the user's line, not ours.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))

__all__ = [
    "BatchError",
    "BatchStatisticsWarning",
    "Callback",
    "Checkpoints",
    "CompositeTracker",
    "DataPositionError",
    "DictTracker",
    "DynamicLossScale",
    "Evaluate",
    "Inference",
    "JsonlTracker",
    "MlflowTracker",
    "KILLED_STATUS",
    "LogMetrics",
    "Logging",
    "LoopHook",
    "LossError",
    "Memory",
    "MeshError",
    "MeshOptions",
    "Meter",
    "MicrobatchLossWarning",
    "ModelError",
    "NonFiniteLossError",
    "NoopTracker",
    "PREEMPTED_STATUS",
    "Parameters",
    "PipelineTrainer",
    "Precision",
    "RandomStreams",
    "StepHook",
    "StepProfile",
    "StepRecord",
    "TensorBoardTracker",
    "Throughput",
    "Tracker",
    "TrainState",
    "UnusedParametersWarning",
    "WandbTracker",
    "WholeBatchLoss",
]
