"""Pipeline parallelism for JAX and Flax: mark the layers, choose a schedule, train.

`PipelineTrainer` and `PipelineStage` are for Flax models. The engine below them, `mpmd_jit_with_loop`, pipelines any
JAX function with a `treduce` loop; `jaxpp_flax.tasks` runs tasks that you place and order yourself. More names are in
`jaxpp_flax.linen`, `jaxpp_flax.trainers`, `jaxpp_flax.layers`, `jaxpp_flax.pretrained` and `jaxpp_flax.schedules`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

# Names are imported when they are first used: the launcher, its coordination service and the tools for schedules need
# neither Flax nor Orbax, and start in a third of the time.
if TYPE_CHECKING:
    from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
    from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
    from jaxpp_flax.engine.jit import mpmd_jit, mpmd_jit_with_loop
    from jaxpp_flax.engine.runtime.reshard import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
    from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
    from jaxpp_flax.engine.tracing.markers import mark_stage_end, pipeline_enter_stage
    from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max, Op, treduce, treduce_i
    from jaxpp_flax.layers import PipelineStage, pipeline_stage
    from jaxpp_flax.schedules import Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B
    from jaxpp_flax.trainers import (
        Callback,
        Checkpoints,
        DictTracker,
        JsonlTracker,
        PipelineTrainer,
        Tracker,
        TrainState,
        WholeBatchLoss,
        group_by_length,
    )

    __version__: str

__all__ = [
    # training a Flax model
    "PipelineTrainer",
    "TrainState",
    "WholeBatchLoss",
    "Microbatches",
    "group_by_length",
    "Checkpoints",
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

# The module that each name comes from.
_HOME = {
    "MpmdArray": "engine.arrays.mpmd_array",
    "mpmd_jit": "engine.jit",
    "mpmd_jit_with_loop": "engine.jit",
    "Add": "engine.tracing.treduce",
    "Concat": "engine.tracing.treduce",
    "Last": "engine.tracing.treduce",
    "Max": "engine.tracing.treduce",
    "Op": "engine.tracing.treduce",
    "treduce": "engine.tracing.treduce",
    "treduce_i": "engine.tracing.treduce",
    "mark_stage_end": "engine.tracing.markers",
    "pipeline_enter_stage": "engine.tracing.markers",
    "MpmdMesh": "engine.arrays.mesh",
    "MpmdSharding": "engine.arrays.mesh",
    "mpmd_to_spmd_reshard": "engine.runtime.reshard",
    "spmd_to_mpmd_reshard": "engine.runtime.reshard",
    "PipelineStage": "layers",
    "pipeline_stage": "layers",
    "Eager1F1B": "schedules",
    "GPipe": "schedules",
    "Interleaved1F1B": "schedules",
    "Schedule": "schedules",
    "Std1F1B": "schedules",
    "Callback": "trainers",
    "Checkpoints": "trainers",
    "DictTracker": "trainers",
    "JsonlTracker": "trainers",
    "Microbatches": "engine.tracing.bodies.microbatches",
    "PipelineTrainer": "trainers",
    "Tracker": "trainers",
    "TrainState": "trainers",
    "WholeBatchLoss": "trainers",
    "group_by_length": "trainers",
}

# After `import jaxpp_flax` alone, its packages and modules are attributes too.
if not TYPE_CHECKING:  # type checkers see the imports above, and would take any name for one of these

    def __getattr__(name: str) -> object:
        if name in _HOME:
            value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
            globals()[name] = value
            return value
        if name == "__version__":
            return version("jaxpp_flax")
        if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        from pkgutil import iter_modules  # no program calls this, and each one would import it

        return sorted({*globals(), *_HOME, *(module.name for module in iter_modules(__path__))})
