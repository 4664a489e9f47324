"""The types of JaxPP's versions with Ray workers, for programs that ask for an instance of them. None can be made."""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = ["ArrayRef", "RemoteMpmdMesh"]


class _NeverMade:
    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"no {type(self).__name__} can be made: {self.instead}.")


class RemoteMpmdMesh(_NeverMade):
    """A mesh of Ray workers. No object is one.

    Raises:
      NotImplementedError: always, with what to use.

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
    """An array of a Ray worker. No object is one.

    Raises:
      NotImplementedError: always, with what to use.
    """

    instead = "it names an array of a Ray worker. A step returns `MpmdArray`s, which can be read in this process"
