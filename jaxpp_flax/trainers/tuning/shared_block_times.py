"""The measured times of blocks: one process measures, and all use its times."""

from __future__ import annotations

import jax

from jaxpp_flax.assignment import AssignmentError
from jaxpp_flax.assignment.block_times import time_blocks
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.blocks import Marks, Work
from jaxpp_flax.processes.comparison import exchange_values
from jaxpp_flax.processes.group import process_group

__all__ = ["shared_block_times"]


def shared_block_times(marks: Marks, mesh: MpmdMesh) -> tuple[Work, ...]:
    """Measure each block's seconds on a rank of one process; all processes call this, and get the same times.

    Args:
      marks: the marks of the loop body.
      mesh: the mesh of the ranks.

    Raises:
      AssignmentError: if each rank has devices of several processes: one process alone cannot run a block there.
      ValueError: if the body cannot be cut at some mark.
    """
    if not mesh.jax_mesh.is_multi_process:
        return time_blocks(marks, mesh)
    owners = [{device.process_index for device in mesh.rank_devices(rank)} for rank in range(mesh.mpmd_dim)]
    rank = next((rank for rank, of in enumerate(owners) if len(of) == 1), None)
    if rank is None:
        raise AssignmentError(
            "cost='measured' times blocks on the devices of one rank, but each rank of this mesh has devices of "
            "several processes. Measure with a mesh in which a rank belongs to one process, "
            "`trainer.plan.save('plan.json')`, and pass assignment='plan.json'; or use cost='estimated'."
        )
    (owner,) = owners[rank]
    mine: dict[str, object] = {}
    if jax.process_index() == owner:
        try:
            mine["times"] = [[work.forward, work.backward] for work in time_blocks(marks, mesh, rank)]
        except ValueError as error:  # the other processes would wait for the times
            mine["error"] = str(error)
    answer = exchange_values(process_group(), "the times of blocks", mine)[owner]
    if "error" in answer:
        raise ValueError(answer["error"])
    return tuple(Work(forward, backward) for forward, backward in answer["times"])
