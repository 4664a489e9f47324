"""`jaxpp.core`: its functions; the internals of its compiler are not here."""

from jaxpp_flax.api import DistributedSharding, mpmd_jit_by_yield, mpmd_jit_rev, mpmd_jit_with_loop

__all__ = ["DistributedSharding", "mpmd_jit_by_yield", "mpmd_jit_rev", "mpmd_jit_with_loop"]
