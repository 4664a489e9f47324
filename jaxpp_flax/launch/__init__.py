"""Starting several processes of one program: on this machine, on a cluster, or on Ray.

`python -m jaxpp_flax.launch -n 4 script.py` runs an unchanged script as four processes here; under SLURM, Open MPI or
Kubernetes, `python -m jaxpp_flax.launch --cluster script.py` or a call of `initialize` at the script's start finds the
others. `jaxpp_flax.launch.ray` does the same on a Ray cluster.
"""

from jaxpp_flax.launch.process.connection import initialize
from jaxpp_flax.launch.settings import LaunchError

__all__ = ["LaunchError", "initialize"]
