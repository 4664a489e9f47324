"""The base of groups of options, and the error of a value that does not fit."""

from __future__ import annotations

from typing import Self

__all__ = ["Options", "misfit"]


class Options:
    """Options without a short form: None means the default values."""

    @classmethod
    def of(cls, value: Self | None) -> Self:
        """Convert the trainer's argument."""
        if value is None:
            return cls()
        if not isinstance(value, cls):
            raise misfit(cls.__name__.lower(), value, f"{cls.__name__}(...)")
        return value


def misfit(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {type(value).__name__}: {value!r}.")
