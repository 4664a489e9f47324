"""This package's engine under the names of NVIDIA's and ROCm's `jaxpp.api`.

In a program written for JaxPP, import `jaxpp_flax.api` instead of `jaxpp.api`. `docs/reference/jaxpp_names.md` lists
the names of each version of JaxPP and the differences. For a name of JaxPP that this package lacks, the
`AttributeError` names the replacement.

Example:
  >>> import jaxpp_flax.api as jaxpp
  >>> [str(task) for task in jaxpp.Interleaved1F1B(num_stages=2, mpmd_dim=2).tasks(2)[1]]
  ['FusedTask(fwd_1__0, bwd_1__0)', 'FusedTask(fwd_1__1, bwd_1__1)']
"""

from pathlib import Path
from typing import Any

from jax.extend import source_info_util

from jaxpp_flax import __version__ as __version__
from jaxpp_flax.api.cross import cross_mpmd_all_reduce, cross_mpmd_stack
from jaxpp_flax.api.jit import mpmd_jit_by_yield, mpmd_jit_with_loop
from jaxpp_flax.api.loop import treduce, treduce_i
from jaxpp_flax.api.marks import mark_stage_end, pipeline_enter_stage, place_with
from jaxpp_flax.api.mesh import MpmdMesh
from jaxpp_flax.api.missing import explain
from jaxpp_flax.api.reverse import mpmd_jit_rev
from jaxpp_flax.api.schedules import (
    BaseSchedule,
    DualPipeV,
    Eager1F1B,
    FusedTask,
    GPipe,
    Interleaved1F1B,
    InterleavedBaseSchedule,
    InterleavedGPipe,
    KimiK2,
    ScheduleTasks,
    Std1F1B,
    Task,
    TaskType,
    ZeroBubble,
)
from jaxpp_flax.api.steps.array import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mesh import MpmdSharding as DistributedSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.runtime.profile import collect_task_times_ms
from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max, Op

__all__ = [
    "Add",
    "BaseSchedule",
    "Concat",
    "DistributedSharding",
    "DualPipeV",
    "Eager1F1B",
    "FusedTask",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedBaseSchedule",
    "InterleavedGPipe",
    "KimiK2",
    "Last",
    "Max",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "Op",
    "ScheduleTasks",
    "Std1F1B",
    "Task",
    "TaskType",
    "ZeroBubble",
    "collect_task_times_ms",
    "cross_mpmd_all_reduce",
    "cross_mpmd_stack",
    "mark_stage_end",
    "mpmd_jit",
    "mpmd_jit_by_yield",
    "mpmd_jit_rev",
    "mpmd_jit_with_loop",
    "mpmd_to_spmd_reshard",
    "pipeline_enter_stage",
    "place_with",
    "spmd_to_mpmd_reshard",
    "treduce",
    "treduce_i",
]


# Messages name the line of the program that marked a stage, and not the function here.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))


def __getattr__(name: str) -> Any:
    raise AttributeError(explain(name, __all__))
