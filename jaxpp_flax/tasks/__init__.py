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

from jax.extend import source_info_util

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.tasks.function import MpmdFunction, mpmd
from jaxpp_flax.tasks.lowered import CompiledMpmdFun, LoweredMpmdFun
from jaxpp_flax.tasks.operations import TransferFuture, task, transfer
from jaxpp_flax.tasks.regroup import slice, stack

__all__ = [
    "CompiledMpmdFun",
    "LoweredMpmdFun",
    "MpmdFunction",
    "MpmdMesh",
    "TransferFuture",
    "mpmd",
    "slice",
    "stack",
    "task",
    "transfer",
]

# Messages name the user's line that calls a task, not ours.
source_info_util.register_exclusion(str(Path(__file__).resolve().parent))
