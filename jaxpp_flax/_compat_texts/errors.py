"""What errors of JAX, XLA, TensorStore and services say: their classes are those of many errors, so words decide.

Where a new version words an error otherwise, it is not recognised: it reaches the user as it was raised, without the
advice of this package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

__all__ = [
    "MeshFault",
    "has_entry",
    "has_no_entry",
    "has_timed_out",
    "is_of_jax",
    "is_of_storage",
    "is_out_of_reach",
    "is_uneven_split",
    "lacks_backend",
    "lacks_product",
    "may_come_from_a_peer",
    "mesh_fault",
    "names_axes",
    "names_mesh",
    "unbound_axis",
]


class MeshFault(Enum):
    """What a step does that JAX does not take under the mesh of its trace."""

    UNKNOWN_AXIS = auto()  # it names an axis that the mesh lacks
    EXPLICIT_ONLY = auto()  # it asks for a sharding in types, on Auto axes
    ANOTHER_MESH = auto()  # it names a mesh beside that of the trace


def mesh_fault(error: BaseException) -> MeshFault | None:
    """Return the fault that a ValueError of a trace under a mesh tells; None for other errors."""
    text = str(error)
    if "not found in mesh" in text:
        return MeshFault.UNKNOWN_AXIS
    if "of type Auto" in text:
        return MeshFault.EXPLICIT_ONLY
    return MeshFault.ANOTHER_MESH if "context mesh" in text.lower() else None


def names_axes(error: BaseException, axes: Mapping[str, int]) -> bool:
    """Return whether an error shows a mesh of these axes: JAX writes it as `Mesh('data': 2, ...)`."""
    return ", ".join(f"{axis!r}: {size}" for axis, size in axes.items()) in str(error)


def names_mesh(error: BaseException) -> bool:
    """Return whether an error is about meshes: without one, JAX raises a RuntimeError or a ValueError for axes."""
    return "mesh" in str(error)


def unbound_axis(error: NameError) -> str | None:
    """Return the axis name that a collective uses and nothing binds; None for other errors of names."""
    found = re.search(r"unbound axis name: ([^\s.]+)", str(error))
    return found and found[1]


def is_uneven_split(error: ValueError) -> bool:
    """Return whether an array cannot be sharded as asked, since the shards would differ in size."""
    return re.search("divisible|evenly divide", str(error)) is not None


def lacks_product(error: ValueError) -> bool:
    """Return whether JAX has no matrix product of this precision on the platform, as on CPU for some in float16."""
    return re.search("precision .* is not supported by dot_general", str(error)) is not None


def lacks_backend(error: RuntimeError) -> bool:
    """Return whether JAX asked for devices of a platform that none is attached of."""
    return "Unknown backend" in str(error)


def has_timed_out(error: RuntimeError) -> bool:
    """Return whether a wait for the coordination service ended without an answer: gRPC's code for it."""
    return "DEADLINE_EXCEEDED" in str(error)


def has_no_entry(error: RuntimeError) -> bool:
    """Return whether the coordination service answered that its store has no such entry."""
    return "NOT_FOUND" in str(error)


def has_entry(error: RuntimeError) -> bool:
    """Return whether the coordination service answered that its store has such an entry already."""
    return "ALREADY_EXISTS" in str(error)


def is_out_of_reach(error: RuntimeError) -> bool:
    """Return whether no connection led to the coordination service, or the one that did has broken."""
    return "UNAVAILABLE" in str(error)


# Words in errors of JAX that another process's death may cause: wait for the news of it. What awaited a connection that
# this package has given up says "InjectFailure" on JAX 0.12.
_OF_A_PEER = (
    "unavailable", "connect", "socket", "peer", "gloo", "poison", "aborted", "cancelled", "transferring", "recv",
    "broken pipe", "injectfailure",
)  # fmt: skip


def may_come_from_a_peer(error: BaseException) -> bool:
    """Return whether another process's death may have caused an error of JAX.

    Example:
      >>> may_come_from_a_peer(RuntimeError("INTERNAL: SocketServer: Connection closed"))
      True
      >>> may_come_from_a_peer(RuntimeError("recv() failed errno: 107 err: Transport endpoint is not connected"))
      True
      >>> may_come_from_a_peer(ValueError("shape"))
      False
    """
    text = str(error).lower()
    return any(word in text for word in _OF_A_PEER)


def is_of_jax(error: BaseException) -> bool:
    """Return whether JAX's runtime raised an error, or another error repeats its text with the name of its class."""
    text = f"{type(error).__name__}: {error}".lower()
    return "jaxruntimeerror" in text or "xlaruntimeerror" in text


# TensorStore raises a ValueError in every case; it begins with a code. Others, as "DATA_LOSS", are of the content.
_OF_STORAGE = (
    "ABORTED", "CANCELLED", "DEADLINE_EXCEEDED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED",
    "UNAVAILABLE",
)  # fmt: skip


def is_of_storage(error: BaseException) -> bool:
    """Return whether TensorStore's error tells that the storage did not answer, not that its content is wrong.

    Example:
      >>> is_of_storage(ValueError("RESOURCE_EXHAUSTED: Failed to open: Too many open files"))
      True
      >>> is_of_storage(ValueError("NOT_FOUND: Metadata does not exist"))
      False
    """
    return str(error).startswith(_OF_STORAGE)
