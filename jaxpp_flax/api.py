"""The engine under the names of NVIDIA's `jaxpp.api`: code written for it runs by changing that import alone.

Example:
  >>> import jaxpp_flax.api as jaxpp
  >>> jaxpp.Std1F1B(2).tasks(2)[1]
  [FusedTask(fwd_1__0, bwd_1__0), FusedTask(fwd_1__1, bwd_1__1)]
"""

from jaxpp_flax.engine.array import MpmdArray, MpmdSharding
from jaxpp_flax.engine.jit import mpmd_jit, mpmd_jit_with_loop
from jaxpp_flax.engine.loop import Add, Concat, Last, Max, Op, treduce, treduce_i
from jaxpp_flax.engine.markers import mark_stage_end, pipeline_enter_stage
from jaxpp_flax.engine.mesh import MpmdMesh
from jaxpp_flax.engine.reshard import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from jaxpp_flax.schedules import Eager1F1B, GPipe, Interleaved1F1B, Std1F1B
from jaxpp_flax.schedules import Schedule as BaseSchedule

__all__ = [
    "Add",
    "BaseSchedule",
    "Concat",
    "Eager1F1B",
    "GPipe",
    "Interleaved1F1B",
    "Last",
    "Max",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "Op",
    "Std1F1B",
    "mark_stage_end",
    "mpmd_jit",
    "mpmd_jit_with_loop",
    "mpmd_to_spmd_reshard",
    "pipeline_enter_stage",
    "spmd_to_mpmd_reshard",
    "treduce",
    "treduce_i",
]
