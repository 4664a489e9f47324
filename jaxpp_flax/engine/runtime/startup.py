"""The start of a program in several processes: they compare the program, connect, and wait for one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.program.description import describe_program
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.runtime.instruction_loop import Across
from jaxpp_flax.engine.runtime.shared_specs import SharedSpecs
from jaxpp_flax.engine.runtime.transport.base import Parcel
from jaxpp_flax.engine.runtime.transport.connection import process_link
from jaxpp_flax.processes.comparison import compare_hashes, compare_lines, describe_environment, value_text

__all__ = ["compare_values", "meet", "start"]

_REMEDY = (
    "Several processes read it, each its own value. Make it from the same seed and the same files in each, or in one "
    "process, and send it to the others by `jax.experimental.multihost_utils.broadcast_one_to_all`."
)


def meet(
    mesh: MpmdMesh,
    program: Program,
    argument_specs: Sequence[PartitionSpec],
    result_specs: Sequence[PartitionSpec | None],
) -> tuple[Across, SharedSpecs] | tuple[None, None]:
    """Compare the programs of all processes before any compilation; do nothing in a single process.

    Raises:
      ValueError: if the mesh has no device of this process.
      ProgramMismatchError: if the programs differ, or the settings of their compilation; it shows the first difference.
      BarrierTimeoutError, ProcessFailedError: if a process does not arrive.
    """
    process = jax.process_index()
    owners = sorted({device.process_index for device in mesh.jax_mesh.devices.flat})
    if owners == [process]:
        return None, None
    if process not in owners:
        raise ValueError(
            f"{mesh!r} has no device of process {process}: all are of {owners} of {jax.process_count()} processes. "
            "Every process of a run takes part in its steps: build the mesh from devices of all of them."
        )
    link = process_link()
    title = f"program {link.next_program()}"
    timeout = link.settings.start_timeout
    # Settings first: if they differ, the program mostly differs too, but its difference tells the user less.
    lines = [*describe_environment(), *describe_program(program, argument_specs, result_specs)]
    digest = compare_lines(link.group, title, lines, timeout)
    name = f"{title.replace(' ', '-')}-{digest}"
    return Across(link, title, name), SharedSpecs(link.group, mesh, name, timeout)


def start(across: Across, parcels: Sequence[Parcel], constants: Mapping[str, Any]) -> None:
    """Connect, wait until every process has compiled its tasks and has connected, and compare the constants.

    Args:
      across: the program.
      parcels: the parcels that this process sends or receives.
      constants: by name, the arrays that the step closes over: each process has made its own.

    Raises:
      ValuesMismatchError: naming the first constant that differs.
      BarrierTimeoutError: naming the processes that are missing.
      ProcessFailedError: naming the process that failed.
    """
    across.link.connect(parcels)
    across.link.group.barrier(f"the start of {across.title}", across.link.settings.start_timeout)
    # After the barrier, because this comparison has no deadline.
    compare_values(across, "the constants", constants)


def compare_values(across: Across, what: str, values: Mapping[str, Any]) -> None:
    """Check that each process has made equal values, for values that several processes read.

    Args:
      across: the program.
      what: a name for all the values, such as "the arguments".
      values: by name; a value is left out if this process has only a part of it.

    Raises:
      ValuesMismatchError: naming the first value that differs, and the processes.
    """
    # Also without values: this process may have placed its arrays already, while another one has some to compare.
    hashes = {name: value_text(value) for name, value in values.items()}
    compare_hashes(across.link.group, f"{what} of {across.title}", hashes, _REMEDY)
