"""Pipeline schedules: the tasks of each rank, and their order.

Pure Python over small task objects. Nothing here needs JAX.

A rank is a group of devices that runs one or more stages. In the formulas of the docstrings, ``p`` is
the number of ranks, ``m`` the number of microbatches, and ``v`` the number of stages on each rank. The
times of a stage are ``f`` for a forward, ``b`` for a whole backward, ``i`` for an input gradient and
``w`` for a weight gradient. In the drawings, a letter and the number of a microbatch name each pass; a
small letter is a rank's second stage, and dots are idle time.

>>> from jaxpp_flax import schedules
>>> schedules.by_name("1f1b", 2).tasks(2)[0]
[fwd_0__0, fwd_0__1, bwd_0__0, bwd_0__1]
"""

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.families.basic import Eager1F1B, GPipe, GPipe1F1BLast, Std1F1B, ZeroBubble, ZeroBubbleH2
from jaxpp_flax.schedules.families.custom import CustomSchedule, normalize
from jaxpp_flax.schedules.families.interleaved import (
    Circular,
    CircularReversed,
    Interleaved1F1B,
    InterleavedGPipe,
    KimiK2,
)
from jaxpp_flax.schedules.families.v_shaped import ZBV, DualPipeV
from jaxpp_flax.schedules.names import by_name, names
from jaxpp_flax.schedules.order import merge_order
from jaxpp_flax.schedules.residuals import ResidualPlan, StageResiduals
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.costs import Costs, Link, Transfer
from jaxpp_flax.schedules.simulation.microbatch_order import MicrobatchOrder, order_by_cost
from jaxpp_flax.schedules.simulation.simulate import Event, Timeline, replay, simulate
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind
from jaxpp_flax.schedules.tools.drawing import Units, draw, sketch
from jaxpp_flax.schedules.tools.table import read_csv, write_csv
from jaxpp_flax.schedules.validate import validate

__all__ = [
    "Circular",
    "CircularReversed",
    "Costs",
    "CustomSchedule",
    "DualPipeV",
    "Eager1F1B",
    "Event",
    "FusedTask",
    "GPipe",
    "GPipe1F1BLast",
    "Interleaved1F1B",
    "InterleavedGPipe",
    "KimiK2",
    "Link",
    "MicrobatchOrder",
    "ResidualPlan",
    "Schedule",
    "ScheduleError",
    "StageResiduals",
    "Std1F1B",
    "Task",
    "TaskKind",
    "Timeline",
    "Transfer",
    "ZBV",
    "ZeroBubble",
    "ZeroBubbleH2",
    "by_name",
    "draw",
    "Units",
    "merge_order",
    "names",
    "normalize",
    "order_by_cost",
    "read_csv",
    "replay",
    "simulate",
    "sketch",
    "validate",
    "write_csv",
]
