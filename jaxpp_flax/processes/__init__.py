"""The processes of a run: barriers, exchanged values, the report of failures, and the comparison of programs.

The modules, from the lowest up: `waits` (the waits of a process, in words), `store` (the key-value store), `barriers`
(barriers, exchanges and shared values in the store), `beats` (the heartbeat of a process), `failures` (errors that
another process's failure causes), `verdicts` (which process is lost or hangs), `watch` (it writes and reads the
heartbeats), `memory_link` (copies of state at other hosts), `group` (`ProcessGroup`, the interface to these),
`comparison` (programs and values that must be equal).

The names exported here are enough for code that computes. Transports, checkpoints, the training loop and the launcher
import the modules.
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
