"""What cannot be verified: each is found before a step of the pipeline runs."""

from __future__ import annotations

from jaxpp_flax.error_codes import documented

__all__ = ["VerifyError"]


@documented("JPF203")
class VerifyError(ValueError):
    """The step cannot be compared with the plain one: the loss is not deterministic, or the state not finite."""
