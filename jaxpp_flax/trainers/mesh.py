"""The devices of a trainer: ranks along one axis of a mesh, and the division of batches inside a rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.trainers.errors import MeshError

__all__ = [
    "BATCH_AXES", "STAGE_AXIS", "batch_spec", "build_mesh", "default_axes", "describe_mesh", "inner_sizes",
    "layout_of", "num_batch_shards", "wrap_mesh",
]  # fmt: skip

STAGE_AXIS = "stage"
BATCH_AXES = ("data", "fsdp")
"""The axes of a mesh that divide the examples of a microbatch."""


def default_axes(num_ranks: int) -> dict[str, int]:
    """Return the axes inside a rank if the user names none: all devices are used, and those of a rank share its work.

    Raises:
      MeshError: if the ranks cannot divide the devices evenly.

    Example:
      >>> default_axes(len(jax.devices()))
      {}
    """
    count = len(jax.devices())
    if count > num_ranks and count % num_ranks:
        fits = [ranks for ranks in range(1, count + 1) if count % ranks == 0]
        each = count // num_ranks
        raise MeshError(
            f"{count} devices ({jax.devices()[0].platform}) cannot be divided evenly among {num_ranks} ranks: "
            f"{', '.join(map(str, fits))} ranks are possible (num_stages=; or MeshOptions(num_ranks=) with an "
            f"interleaved schedule). Or say how many devices each rank takes: mesh={{'data': {each}}} takes "
            f"{each * num_ranks} of the {count}{'' if each == 1 else ', and mesh={} one for each rank'}."
        )
    return {"data": count // num_ranks} if count >= 2 * num_ranks else {}


def build_mesh(num_ranks: int, axes: Mapping[str, int] | None = None) -> MpmdMesh:
    """Make a mesh of `num_ranks` ranks, each with `axes` inside; an axis of size -1 takes all remaining devices.

    Raises:
      MeshError: if there are too few devices, or the axes do not divide their number.

    Example:
      >>> build_mesh(4, {"data": 2})
      MpmdMesh({'stage': 4, 'data': 2}, mpmd_axis_name='stage')
    """
    sizes, available = dict(axes or {}), jax.devices()
    if STAGE_AXIS in sizes:
        raise MeshError(f"mesh axes {sizes} name {STAGE_AXIS!r}, the axis of the ranks: give num_stages instead.")
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise MeshError(f"mesh axis {name!r} has size {size}; it must be at least 1, or -1 for the other devices.")
    if num_ranks > len(available):
        raise MeshError(
            f"{num_ranks} ranks (groups of devices) need at least as many devices, but there are {len(available)} "
            f"({available[0].platform}). Use at most num_stages={len(available)}; or an interleaved schedule with "
            f"several stages on each rank: schedule='interleaved_1f1b', "
            f"mesh=MeshOptions(num_ranks={len(available)}). "
            f"{_more_devices(num_ranks)}"
        )
    known = num_ranks * math.prod(size for size in sizes.values() if size != -1)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise MeshError(f"mesh axes {sizes} have size -1 for {open_axes}; at most one axis may have size -1.")
    if open_axes:
        if len(available) % known:
            raise MeshError(
                f"{len(available)} devices cannot be divided into {num_ranks} ranks with mesh axes {sizes}: "
                f"{len(available)} is no multiple of {known}. Choose sizes that divide them, or build a mesh yourself."
            )
        sizes[open_axes[0]] = len(available) // known
    needed = num_ranks * math.prod(sizes.values())
    if needed > len(available):
        raise MeshError(
            f"{num_ranks} ranks with mesh axes {sizes} need {needed} devices, but there are {len(available)}. "
            f"Use smaller axes or fewer stages. {_more_devices(needed)}"
        )
    shape = (num_ranks, *sizes.values())
    chosen = _of_every_process(available, needed)
    return MpmdMesh(Mesh(np.array(chosen).reshape(shape), (STAGE_AXIS, *sizes)), STAGE_AXIS)


def _more_devices(needed: int) -> str:
    """Return advice to get this number of devices. Under the launcher, an option of it sets virtual devices."""
    launcher, count = "python -m jaxpp_flax.launch", jax.process_count()
    if count > 1:
        return (
            f"Or start the run with as many: under `{launcher}`, -n {needed} for one in each process, or "
            f"--devices-per-process {math.ceil(needed / count)} for so many in each of the {count}."
        )
    return (
        f"For several processes, start the script by `{launcher} -n {needed} script.py`. In this one, on CPU, "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes virtual devices (under the launcher, "
        f"--devices-per-process {needed} does)."
    )


def _of_every_process(available: Sequence[Any], needed: int) -> list[Any]:
    """Return `needed` devices, in order: the same number of each process if possible, so that each takes part."""
    by_process: dict[int, list[Any]] = {}
    for device in available:
        by_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(needed, len(by_process))
    if rest or any(len(devices) < share for devices in by_process.values()):
        return list(available[:needed])
    return [device for devices in by_process.values() for device in devices[:share]]


def wrap_mesh(mesh: Any, num_ranks: int | None) -> MpmdMesh:
    """Convert the user's mesh to an `MpmdMesh`, and check the number of ranks.

    Raises:
      MeshError: if the mesh has no axis of stages, or this axis has another size.
    """
    if isinstance(mesh, Mesh):
        if STAGE_AXIS not in mesh.axis_names:
            raise MeshError(
                f"the mesh has axes {dict(mesh.shape)}, but none called {STAGE_AXIS!r} that counts the ranks. "
                f"Name an axis {STAGE_AXIS!r}, or pass an MpmdMesh(mesh, axis_name)."
            )
        mesh = MpmdMesh(mesh, STAGE_AXIS)
    if not isinstance(mesh, MpmdMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or an MpmdMesh, got {type(mesh).__name__}.")
    if num_ranks is not None and mesh.mpmd_dim != num_ranks:
        raise MeshError(
            f"the mesh has {mesh.mpmd_dim} ranks along {mesh.mpmd_axis_name!r}, but the arguments need {num_ranks}. "
            f"Make that axis {num_ranks} long, or use MeshOptions(num_ranks={mesh.mpmd_dim}) "
            "(several stages on each rank need an interleaved schedule)."
        )
    return mesh


def inner_sizes(mesh: MpmdMesh) -> dict[str, int]:
    """Return the axes inside a stage, without the stage axis, and their sizes.

    Example:
      >>> inner_sizes(build_mesh(4, {"data": 2}))
      {'data': 2}
    """
    return {axis: size for axis, size in mesh.jax_mesh.shape.items() if axis != mesh.mpmd_axis_name}


def layout_of(mesh: MpmdMesh) -> dict[str, int]:
    """Return the axes of a mesh with their sizes, that of the ranks first, under the name of `STAGE_AXIS`.

    Example:
      >>> layout_of(build_mesh(4, {"data": 2}))
      {'stage': 4, 'data': 2}
    """
    return {STAGE_AXIS: mesh.mpmd_dim, **inner_sizes(mesh)}


def describe_mesh(mesh: MpmdMesh) -> str:
    """Return the ranks, the axes inside them and the devices, for messages.

    Example:
      >>> text = describe_mesh(build_mesh(2, {"data": 2}))
      >>> text.partition(",")[0]
      '2 ranks x data 2'
    """
    devices = list(mesh.jax_mesh.devices.flat)
    platform = devices[0].platform
    axes = "".join(f" x {name} {size}" for name, size in inner_sizes(mesh).items())
    count = len(devices) if mesh.is_described else len(jax.devices(platform))
    if mesh.is_described:
        used = f"{count} devices that are only described: {devices[0].device_kind}"
    elif len(devices) == count:
        used = f"all {count} devices"
    else:
        used = f"{len(devices)} of {count} devices: {', '.join(str(device.id) for device in devices)}"
    return f"{mesh.mpmd_dim} ranks{axes}, {used} ({platform})"


def _batch_axes(mesh: MpmdMesh) -> tuple[str, ...]:
    return tuple(name for name in BATCH_AXES if name in mesh.jax_mesh.axis_names and name != mesh.mpmd_axis_name)


def batch_spec(mesh: MpmdMesh, ndim: int) -> PartitionSpec:
    """Return the spec of a leaf on a rank: of shape (num_microbatches, microbatch, ...) or (num_microbatches,)."""
    axes = _batch_axes(mesh)
    return PartitionSpec(None, axes) if axes and ndim > 1 else PartitionSpec()


def num_batch_shards(mesh: MpmdMesh | None) -> int:
    """Return the number of parts that the examples of a microbatch are cut into."""
    return math.prod(mesh.jax_mesh.shape[name] for name in _batch_axes(mesh)) if mesh is not None else 1
