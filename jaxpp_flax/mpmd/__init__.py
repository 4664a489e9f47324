"""Named computations, each assigned to a named mesh: runs programs written for Shardy:MPMD on plain JAX.

>>> import jax, numpy as np, jax.numpy as jnp
>>> from jaxpp_flax import mpmd
>>> meshes = {f"m{i}": jax.sharding.Mesh(np.array([jax.devices()[i]]), ("data",)) for i in range(2)}
>>> config = mpmd.make_config(meshes, {"double": "m0", "square": "m1"})
>>> def f(x):
...     x = mpmd.named_computation(lambda x: 2 * x, name="double")(x)
...     return mpmd.named_computation(lambda x: x * x, name="square")(x)
>>> y = mpmd.jit(f, config)(jnp.ones(2))
>>> y, y.devices() == {jax.devices()[1]}
(Array([4., 4.], dtype=float32), True)
"""

from __future__ import annotations

import importlib
from typing import Any

from jaxpp_flax.messages import missing_name
from jaxpp_flax.mpmd.config import MpmdConfig, make_config
from jaxpp_flax.mpmd.jit import MpmdTraced, MpmdWrapped, jit
from jaxpp_flax.mpmd.lowered import MpmdCompiled, MpmdLowered
from jaxpp_flax.mpmd.ops import call, enumerated_for, fori_loop, named_computation, named_tensor
from jaxpp_flax.mpmd.options import PIPELINE_SCHEDULES, PartitioningOptions
from jaxpp_flax.mpmd.types import (
    FunctionIOMeshAssignment,
    FunctionNamedShardings,
    NameToMeshAssignment,
    Topology,
)

# Each of these has two names in programs.
Compiled, Config, Lowered = MpmdCompiled, MpmdConfig, MpmdLowered
FunctionMeshAssignment = FunctionIOMeshAssignment

__all__ = [
    "PIPELINE_SCHEDULES",
    "Compiled",
    "Config",
    "FunctionIOMeshAssignment",
    "FunctionMeshAssignment",
    "FunctionNamedShardings",
    "Lowered",
    "MpmdCompiled",
    "MpmdConfig",
    "MpmdLowered",
    "MpmdTraced",
    "MpmdWrapped",
    "NameToMeshAssignment",
    "PartitioningOptions",
    "Topology",
    "call",
    "enumerated_for",
    "fori_loop",
    "jit",
    "make_config",
    "named_computation",
    "named_tensor",
]


# Names of Shardy:MPMD that this package lacks, each with its replacement.
_RULES = (
    "fragment rules are not here. Write the order as a `jaxpp_flax.schedules.CustomSchedule`, and pass it as "
    "`make_config(pipeline_schedule=)`"
)
_REMEDIES = {
    **dict.fromkeys(("FragmentInfo", "FragmentMergeRule", "FragmentMergeRules", "FragmentOrigin"), _RULES),
    **dict.fromkeys(("FragmentScheduleRule", "FragmentScheduleRules", "PipelineSchedule", "pipeline"), _RULES),
    "pipeline_registry": "pass the name of a schedule as `make_config(pipeline_schedule=)`; `PIPELINE_SCHEDULES` has "
    "the names",
    "reduce": "sums over meshes are inferred. Pass its argument itself",
    "broadcast": "an array is sent to each mesh that reads it. Pass its argument itself",
    "MpmdJitShardingInfo": "a lowered program has its fields: `function_named_shardings`, `function_mesh_assignment`, "
    "`topology`",
    "mesh_names": "`function_mesh_assignment` of a lowered program has the names of the meshes",
    "Executable": "what `compile` returns runs by itself, and has the analyses of all meshes",
    "make_partitioning_options": "`PartitioningOptions` checks the options, and so does `make_config`",
}


def __getattr__(name: str) -> Any:
    if name == "flax":  # imported where it is used, so that programs without Flax need none
        return importlib.import_module(".flax", __name__)
    raise AttributeError(missing_name(__name__, name, _REMEDIES, __all__))
