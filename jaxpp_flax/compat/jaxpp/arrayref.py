"""`jaxpp.arrayref`, of the versions with Ray workers."""

from jaxpp_flax.api import ArrayRef

__all__ = ["ArrayRef"]
