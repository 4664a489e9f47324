"""`jaxpp.schedules`."""

from jaxpp_flax.api.schedules import (
    BaseSchedule,
    DualPipeV,
    Eager1F1B,
    FusedTask,
    GPipe,
    Interleaved1F1B,
    InterleavedBaseSchedule,
    InterleavedGPipe,
    InterleavedZeroBubble,
    KimiK2,
    ScheduleTasks,
    Std1F1B,
    Task,
    TaskType,
    ZeroBubble,
)

__all__ = [
    "BaseSchedule",
    "DualPipeV",
    "Eager1F1B",
    "FusedTask",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedBaseSchedule",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "KimiK2",
    "ScheduleTasks",
    "Std1F1B",
    "Task",
    "TaskType",
    "ZeroBubble",
]
