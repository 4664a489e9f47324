"""The errors: of what cannot be verified, before a step of the pipeline runs; and of a step that gave other bits."""

from __future__ import annotations

from jaxpp_flax.error_codes import documented

__all__ = ["ReplayError", "VerifyError"]


@documented("JPF203")
class VerifyError(ValueError):
    """The step cannot be compared with the plain one: the loss is random, the state not finite, or a mesh needed."""


@documented("JPF204")
class ReplayError(RuntimeError):
    """A step that ran again from the same state gave other bits: a device computes wrongly, or an operation varies."""
