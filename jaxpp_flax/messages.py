"""Parts of messages: names near an unknown one, lists cut short, numbers, the user's line; and warnings."""

from __future__ import annotations

import difflib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

__all__ = [
    "amount",
    "error_location",
    "is_users",
    "known_names",
    "listed",
    "missing_name",
    "near_names",
    "users_line",
    "warn_user",
]

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def near_names(name: str, names: Iterable[str]) -> str:
    """A hint for an unknown name, with a space before it; empty where no known name is near.

    Example:
      >>> near_names("blok_1", ["block_1", "head"]), near_names("tail", ["block_1"])
      (" Did you mean 'block_1'?", '')
    """
    near = difflib.get_close_matches(name, list(names), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Iterable[str]) -> str:
    """The same hint, and then the names that are known.

    Example:
      >>> known_names("blok_1", ["block_1", "head"])
      " Did you mean 'block_1'? Known: block_1, head."
    """
    known = list(known)
    return f"{near_names(name, known)} Known: {listed(known, 20, str) or 'none'}."


def listed(items: Sequence[Any], most: int = 12, text: Callable[[Any], str] = repr) -> str:
    """The first items with commas between them, and how many more there are.

    Example:
      >>> listed(["a", "b", "c"], most=2)
      "'a', 'b' and 1 more"
    """
    shown = ", ".join(map(text, items[:most]))
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


def amount(value: float | None, unit: str) -> str:
    """A number with three digits and a prefix; "?" for one that is not known.

    Example:
      >>> amount(0.00123, "s"), amount(2.5e9, "FLOP"), amount(4096, "B"), amount(None, "s")
      ('1.23 ms', '2.5 GFLOP', '4.1 kB', '?')
    """
    if value is None or value != value:
        return "?"
    if value == 0:
        return f"0 {unit}".strip()
    for factor, prefix in _PREFIXES:
        if abs(value) >= factor * (1 - 1e-9) and (unit or factor >= 1):
            return f"{value / factor:.3g} {prefix}{unit}".strip()
    return f"{value:.3g} {unit}".strip()


def missing_name(module: str, name: str, remedies: Mapping[str, str], known: Sequence[str]) -> str:
    """Return the message for a name that a module lacks: what to do instead, or the known names near it.

    Example:
      >>> missing_name("a.b", "old", {"old": "call `new`"}, [])
      'a.b has no old: call `new`.'
    """
    if name in remedies:
        return f"{module} has no {name}: {remedies[name]}."
    return f"module {module!r} has no attribute {name!r}.{near_names(name, known)}"


# -- the line of the user's program

_LIBRARIES = {"jaxpp_flax", "jax", "flax", *sys.stdlib_module_names}


def is_users(frame: FrameType) -> bool:
    """Return whether a call is one of the user's program: neither of this package nor of an installed one."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    file = frame.f_code.co_filename
    return package not in _LIBRARIES and "site-packages" not in file and "dist-packages" not in file


def users_line(innermost_first: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of the user's code among calls, and the function that this line calls."""
    called = ""
    for frame, line in innermost_first:
        if is_users(frame):
            return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{line}){called}"
        called = f", inside {frame.f_code.co_name}"
    return "no line of your program: it starts, or it has ended"


def error_location(error: BaseException) -> str:
    """Return the innermost line of the user's code in an error's traceback, and the function that this line calls."""
    return users_line(reversed([*traceback.walk_tb(error.__traceback__)]))


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and show the line of the user's program that led here.

    `stacklevel=` counts calls: it is wrong as soon as a function is called from two depths.
    """
    frame = sys._getframe(1)
    while frame.f_back and not is_users(frame):
        frame = frame.f_back
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
