"""A stable code for each error class, and the command and the entry of the documentation that its traceback names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["ERROR_INDEX", "code_of", "documented"]

ERROR_INDEX = "https://jaxpp-flax.readthedocs.io/en/stable/troubleshooting/errors.html"

_Class = TypeVar("_Class", bound=type[Exception])


def documented(code: str) -> Callable[[_Class], _Class]:
    """Give an error class its code. The traceback of an error ends with it and its entry's address.

    Codes never change and are never used again: people search for them.

    Args:
      code: ``JPF`` and three digits.

    Example:
      >>> @documented("JPF999")
      ... class ExampleError(ValueError):
      ...     pass
      >>> ExampleError("stage 3 has no devices").__notes__[0].split(", or ")
      ['JPF999: `python -m jaxpp_flax explain JPF999`',
       'https://jaxpp-flax.readthedocs.io/en/stable/troubleshooting/errors.html#jpf999']
    """

    def document(cls: _Class) -> _Class:
        own = vars(cls).get("__init__")

        def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
            if own is not None:
                own(self, *args, **kwargs)
            else:
                super(cls, self).__init__(*args, **kwargs)
            # A documented base class comes here too, with the same error.
            if not getattr(self, "__notes__", None) and not isinstance(self, Warning):
                given = code_of(type(self))
                self.add_note(f"{given}: `python -m jaxpp_flax explain {given}`, or {ERROR_INDEX}#{given.lower()}")

        def text_with_code(self: Any) -> str:
            return f"{Exception.__str__(self)} [{code_of(type(self))}]"

        added: dict[str, Any] = {"_code": code, "__init__": initialize}
        if issubclass(cls, Warning):  # the line that `warnings` prints has no notes
            added["__str__"] = text_with_code
        for name, value in added.items():
            setattr(cls, name, value)
        return cls

    return document


def code_of(cls: type[BaseException]) -> str:
    """The code of an error class, or "" for a class without one."""
    return getattr(cls, "_code", "")
