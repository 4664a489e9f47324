"""The types of JaxPP's versions with Ray workers, for programs that ask for an instance of them. None can be made."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ArrayRef", "RemoteMpmdMesh"]


class RemoteMpmdMesh:
    """A mesh of Ray workers. No object is one.

    Raises:
      NotImplementedError: always, with what to use.

    Example:
      >>> isinstance(3, RemoteMpmdMesh)
      False
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("RemoteMpmdMesh")


class ArrayRef:
    """An array of a Ray worker. No object is one.

    Raises:
      NotImplementedError: always, with what to use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("ArrayRef")


_REMEDIES = {
    "RemoteMpmdMesh": "it starts workers through Ray from one controller. One process drives all of its own devices: "
    'build `MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data", "model")), "stage")`; with several hosts, run the '
    "same program on each of them under `jax.distributed.initialize()`",
    "ArrayRef": "it names an array of a Ray worker. A step returns `MpmdArray`s, which can be read in this process",
}


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"no {name} can be made: {_REMEDIES[name]}.")
