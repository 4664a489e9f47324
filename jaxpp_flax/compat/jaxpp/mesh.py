"""`jaxpp.mesh`."""

from jaxpp_flax.api import MpmdMesh, RemoteMpmdMesh

__all__ = ["MpmdMesh", "RemoteMpmdMesh"]
