"""Programs whose tasks are written by hand: which rank computes what, in which order, and what it sends.

>>> import jax, jax.numpy as jnp, numpy as np
>>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
>>> from jaxpp_flax import tasks
>>> mesh = tasks.MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
>>> on = [NamedSharding(submesh, PartitionSpec()) for submesh in mesh.unstack]
>>> @tasks.mpmd(mesh, in_shardings=on[0])
... def double_then_square(x):
...     x = tasks.task(lambda x: 2 * x, out_shardings=on[0], name="double")(x)
...     x = tasks.transfer(x, out_shardings=on[1]).done()
...     return tasks.task(lambda x: x * x, out_shardings=on[1], name="square")(x)
>>> double_then_square(jnp.ones(2))
Array([4., 4.], dtype=float32)
"""

from pathlib import Path
from typing import Any

from jax.extend import source_info_util

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.messages import missing_name
from jaxpp_flax.tasks.function import MpmdFunction, mpmd
from jaxpp_flax.tasks.lowered import CompiledMpmdFun, LoweredMpmdFun
from jaxpp_flax.tasks.operations import TransferFuture, task, transfer

__all__ = [
    "CompiledMpmdFun",
    "LoweredMpmdFun",
    "MpmdFunction",
    "MpmdMesh",
    "TransferFuture",
    "mpmd",
    "task",
    "transfer",
]

# Messages name the user's line that calls a task, not ours.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))

_JOIN = "a task runs on one rank. `transfer` the values to it, join or cut them there, and send the results on"
_REMEDIES = {"stack": _JOIN, "slice": _JOIN}


def __getattr__(name: str) -> Any:
    raise AttributeError(missing_name(__name__, name, _REMEDIES, __all__))
