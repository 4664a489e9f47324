"""Start a program as several processes: on this machine, on a cluster, or on Ray.

`python -m jaxpp_flax.launch -n 4 script.py` runs an unchanged script as four processes on this machine. Under SLURM,
Open MPI or Kubernetes, start each process with `python -m jaxpp_flax.launch --cluster script.py`, or call `initialize`
at the start of the script. `jaxpp_flax.launch.ray` starts the processes on a Ray cluster.
"""

from jaxpp_flax.launch.process.connection import initialize
from jaxpp_flax.launch.settings import LaunchError

__all__ = ["LaunchError", "initialize"]
