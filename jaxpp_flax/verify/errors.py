"""The errors: a step cannot be verified (raised before the pipeline runs), or a replayed step has different bits."""

from __future__ import annotations

from jaxpp_flax.error_codes import documented

__all__ = ["ReplayError", "VerifyError"]


@documented("JPF203")
class VerifyError(ValueError):
    """The step cannot be verified: it is not deterministic, its state is not finite, or the model needs a mesh."""


@documented("JPF204")
class ReplayError(RuntimeError):
    """A replay of a step has different bits: a device computes wrongly, or an operation is not deterministic."""
