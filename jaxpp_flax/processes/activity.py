"""Where a program is: in a save, in a compilation, in the user's own code; for want of a known wait."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

__all__ = ["place_of_main_thread"]

_PATHS = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(f"{path}{os.sep}" for path in [str(Path(__file__).resolve().parents[1]), *_PATHS])


def place_of_main_thread() -> str:
    """The user's innermost line that the main thread is at, and what it calls there."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    return "an unknown place" if frame is None else place_of(frame)


def place_of(frame: FrameType) -> str:
    """The user's innermost line, and what is called there.

    >>> def step():
    ...     return place_of(sys._getframe())
    >>> step().startswith("step (<doctest")
    True
    """
    called: FrameType | None = None
    user: FrameType | None = frame
    while user is not None and not _is_users(user):
        called, user = user, user.f_back
    if user is None:
        return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    inside = "" if called is None else f", inside {called.f_code.co_qualname}"
    return f"{user.f_code.co_qualname} ({user.f_code.co_filename}:{user.f_lineno}){inside}"


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<frozen"):
        return False
    return not file.startswith(_LIBRARIES) and "site-packages" not in file and "dist-packages" not in file
