"""`jaxpp.types`."""

from jaxpp_flax.api import MpmdSharding
from jaxpp_flax.api.schedules import Task, TaskType

__all__ = ["MpmdSharding", "Task", "TaskType"]
