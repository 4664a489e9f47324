"""The types of JaxPP's versions with Ray workers, for programs that call `isinstance`. They have no instances."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["ArrayRef", "RemoteMpmdMesh"]


class _NeverMade:
    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"no {type(self).__name__} can be made: {self.instead}.")


class RemoteMpmdMesh(_NeverMade):
    """A mesh of Ray workers in JaxPP: a type for `isinstance`, without instances.

    Raises:
      NotImplementedError: always; the message names the replacement.

    Example:
      >>> isinstance(3, RemoteMpmdMesh)
      False
    """

    instead = (
        "it starts workers through Ray from one controller. One process drives all of its own devices: build "
        '`MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data", "model")), "stage")`; with several hosts, run the same '
        "program on each of them under `jax.distributed.initialize()`"
    )


class ArrayRef(_NeverMade):
    """An array of a Ray worker in JaxPP: a type for `isinstance`, without instances.

    Raises:
      NotImplementedError: always; the message names the replacement.
    """

    instead = "it names an array of a Ray worker. A step returns `MpmdArray`s, which can be read in this process"
