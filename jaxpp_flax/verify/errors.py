"""What cannot be verified: each is found before a step of the pipeline runs."""

from __future__ import annotations

__all__ = ["VerifyError"]


class VerifyError(ValueError):
    """The step cannot be compared with the plain one: the loss is not deterministic, or the state not finite."""
