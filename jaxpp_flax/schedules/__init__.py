"""Pipeline schedules: which rank runs which task, in what order.

Pure Python over small task objects. Nothing here needs JAX.

In the formulas of the docstrings ``p`` is the number of ranks, ``m`` of microbatches, ``v`` of stages
on each rank, and ``f``, ``b``, ``i``, ``w`` are a stage's times of forward, whole backward, input
gradient and weight gradient. In the drawings a letter and a microbatch name each pass, a small letter
is a rank's second stage, and dots are idle time.

>>> from jaxpp_flax import schedules
>>> schedules.by_name("1f1b", 2).tasks(2)[0]
[fwd_0__0, fwd_0__1, bwd_0__0, bwd_0__1]
"""

from .automatic import Found, search
from .basic import Eager1F1B, GPipe, Std1F1B
from .circular import Circular, CircularReversed, GPipe1F1BLast, LatencyHiding1F1B
from .costs import Costs, Link, Transfer
from .custom import CustomSchedule, normalize
from .drawing import draw
from .errors import ScheduleError
from .interleaved import Interleaved1F1B, InterleavedGPipe, KimiK2
from .measure import measured_costs
from .names import by_name, names
from .order import merge_order
from .schedule import Schedule
from .simulate import Event, Summary, Timeline, replay, simulate, summarize
from .table import read_csv, write_csv
from .task import FusedTask, Task, TaskKind
from .v_shaped import ZBV, DualPipeV
from .validate import validate
from .zero_bubble import ZeroBubble, ZeroBubbleH2

__all__ = [
    "Circular",
    "CircularReversed",
    "Costs",
    "CustomSchedule",
    "DualPipeV",
    "Eager1F1B",
    "Event",
    "Found",
    "FusedTask",
    "GPipe",
    "GPipe1F1BLast",
    "Interleaved1F1B",
    "InterleavedGPipe",
    "KimiK2",
    "LatencyHiding1F1B",
    "Link",
    "Schedule",
    "ScheduleError",
    "Std1F1B",
    "Summary",
    "Task",
    "TaskKind",
    "Timeline",
    "Transfer",
    "ZBV",
    "ZeroBubble",
    "ZeroBubbleH2",
    "by_name",
    "draw",
    "measured_costs",
    "merge_order",
    "names",
    "normalize",
    "read_csv",
    "replay",
    "search",
    "simulate",
    "summarize",
    "validate",
    "write_csv",
]
