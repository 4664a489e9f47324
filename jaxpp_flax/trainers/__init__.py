"""Training: `PipelineTrainer`, callbacks and trackers."""

from pathlib import Path

from jax.extend import source_info_util

from jaxpp_flax.planning.profile import StepProfile
from jaxpp_flax.trainers.callbacks import Callback, StepRecord
from jaxpp_flax.trainers.callbacks.evaluate import Evaluate
from jaxpp_flax.trainers.callbacks.log_metrics import LogMetrics
from jaxpp_flax.trainers.callbacks.sigterm import KILLED_STATUS, PREEMPTED_STATUS
from jaxpp_flax.trainers.data.lengths.group_by_length import LengthGroups, group_by_length
from jaxpp_flax.trainers.errors import (
    BatchError,
    BatchStatisticsWarning,
    DataPositionError,
    LossError,
    MeshError,
    MicrobatchLossWarning,
    MicrobatchStateWarning,
    ModelError,
    NonFiniteLossError,
    PrecisionWarning,
    UnusedParametersWarning,
)
from jaxpp_flax.trainers.generation.explicit_cache import ExplicitCache, NextTokens
from jaxpp_flax.trainers.generation.generated import Generated
from jaxpp_flax.trainers.loop.compiled_step import CompiledStep
from jaxpp_flax.trainers.loss.loss_rule import with_aux
from jaxpp_flax.trainers.loss.whole_batch import WholeBatchLoss
from jaxpp_flax.trainers.metrics.throughput import Throughput
from jaxpp_flax.trainers.options import (
    Checkpoints,
    Inference,
    Logging,
    Memory,
    MeshOptions,
    Precision,
    Training,
)
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.optimizer_update import DynamicLossScale
from jaxpp_flax.trainers.trackers import (
    CompositeTracker,
    DictTracker,
    JsonlTracker,
    MlflowTracker,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)
from jaxpp_flax.trainers.trainer import PipelineTrainer

# Messages name the user's line, not ours.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))

__all__ = [
    "BatchError",
    "BatchStatisticsWarning",
    "Callback",
    "Checkpoints",
    "CompiledStep",
    "CompositeTracker",
    "DataPositionError",
    "DictTracker",
    "DynamicLossScale",
    "Evaluate",
    "ExplicitCache",
    "Generated",
    "Inference",
    "JsonlTracker",
    "MlflowTracker",
    "KILLED_STATUS",
    "LengthGroups",
    "LogMetrics",
    "Logging",
    "LossError",
    "Memory",
    "MeshError",
    "MeshOptions",
    "MicrobatchLossWarning",
    "MicrobatchStateWarning",
    "ModelError",
    "NextTokens",
    "NonFiniteLossError",
    "PREEMPTED_STATUS",
    "Precision",
    "PrecisionWarning",
    "Training",
    "PipelineTrainer",
    "StepProfile",
    "StepRecord",
    "TensorBoardTracker",
    "Throughput",
    "Tracker",
    "TrainState",
    "UnusedParametersWarning",
    "WandbTracker",
    "WholeBatchLoss",
    "with_aux",
    "group_by_length",
]
