"""How the processes of a run find, compare, await and end one another.

The files, from the lowest up: `waits` (the waits of a process, in words), `store` (the key-value store), `barriers`
(barriers, exchanges and shared values in the store), `beats` (what a process tells of itself), `failures` (errors that
another process's failure causes), `verdicts` (who is lost or stands still), `watch` (which tells and hears it),
`group` (`ProcessGroup`, which puts these together), `comparison` (programs and values that must be equal).

The names exported here suffice for code that computes. Transports, checkpoints, the training loop and the launcher
import the files.
"""

from jaxpp_flax.processes.comparison import compare_hashes, exchange_values, value_hash, value_text
from jaxpp_flax.processes.group import ProcessGroup, errors_naming_failed_process, process_group
from jaxpp_flax.processes.store import BarrierTimeoutError, CoordinationError, ProcessFailedError

__all__ = [
    "BarrierTimeoutError",
    "CoordinationError",
    "ProcessFailedError",
    "ProcessGroup",
    "compare_hashes",
    "errors_naming_failed_process",
    "exchange_values",
    "process_group",
    "value_hash",
    "value_text",
]
