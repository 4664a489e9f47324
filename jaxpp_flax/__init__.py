"""Pipeline parallelism for JAX and Flax: mark the layers, choose a schedule, train.

The trainer (`PipelineTrainer`) and the layers (`PipelineStage`) are for Flax models; underneath,
`mpmd_jit_with_loop` pipelines any JAX function with a `treduce` loop. More in `jaxpp_flax.linen`,
`jaxpp_flax.trainers`, `jaxpp_flax.layers` and `jaxpp_flax.schedules`.
"""

from jaxpp_flax.engine.array import MpmdArray
from jaxpp_flax.engine.jit import mpmd_jit, mpmd_jit_with_loop
from jaxpp_flax.engine.loop import Add, Concat, Last, Max, Op, treduce, treduce_i
from jaxpp_flax.engine.markers import mark_stage_end, pipeline_enter_stage
from jaxpp_flax.engine.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.reshard import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from jaxpp_flax.layers import PipelineStage, pipeline_stage
from jaxpp_flax.schedules import Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B
from jaxpp_flax.trainers import Callback, DictTracker, JsonlTracker, PipelineTrainer, Tracker, TrainState

__all__ = [
    # training a Flax model
    "PipelineTrainer",
    "TrainState",
    "Callback",
    "Tracker",
    "DictTracker",
    "JsonlTracker",
    # marking its stages
    "PipelineStage",
    "pipeline_stage",
    "mark_stage_end",
    "pipeline_enter_stage",
    # the order of work
    "Schedule",
    "GPipe",
    "Std1F1B",
    "Eager1F1B",
    "Interleaved1F1B",
    # the engine underneath
    "mpmd_jit_with_loop",
    "mpmd_jit",
    "treduce",
    "treduce_i",
    "Op",
    "Add",
    "Concat",
    "Last",
    "Max",
    "MpmdMesh",
    "MpmdArray",
    "MpmdSharding",
    "spmd_to_mpmd_reshard",
    "mpmd_to_spmd_reshard",
]
