"""Start a program as several processes: on this machine, on a cluster, or on Ray.

`python -m jaxpp_flax.launch -n 4 script.py` runs an unchanged script as four processes on this machine. Under SLURM,
Open MPI or Kubernetes, start each process with `python -m jaxpp_flax.launch --cluster script.py`, or call `initialize`
at the start of the script. `jaxpp_flax.launch.ray` starts the processes on a Ray cluster.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxpp_flax.launch.process.connection import initialize
    from jaxpp_flax.launch.settings import LaunchError

__all__ = ["LaunchError", "initialize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported where it is used: before JAX is imported, the launcher says what Ctrl-C does meanwhile.
    from jaxpp_flax.launch.process import connection

    return getattr(connection, name)
