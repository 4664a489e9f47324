"""How far a process has come, in a page of memory that outlives it: whoever started it reads it after its death."""

from __future__ import annotations

import contextlib
import mmap
import struct
import tempfile
from typing import IO

from jaxpp_flax.launch.settings import LaunchError

__all__ = ["Progress"]

_STEPS, _FROM_MEMORY = struct.Struct("qq"), struct.Struct("q")
_SIZE = _STEPS.size + _FROM_MEMORY.size


class Progress:
    """The first and the furthest step that a process has begun, and whether its state came from memory.

    Args:
      descriptor: an open file of the page; None: a new page.

    Raises:
      LaunchError: if there is no room for a new one.

    Example:
      >>> page = Progress()
      >>> Progress(page.descriptor).begin(7), Progress(page.descriptor).begin(8)
      (None, None)
      >>> page.first, page.last, page.close()
      (7, 8, None)
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._file: IO[bytes] | None = None
        if descriptor is None:
            self._file = _new_page()
            descriptor = self._file.fileno()
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, _SIZE)

    def begin(self, step: int) -> None:
        """Note that the process has begun a step, counted from 1."""
        # One that goes back to an earlier state repeats steps; what it had reached stays so.
        _STEPS.pack_into(self._page, 0, self.first or step, max(self.last, step))

    def goes_on_from_memory(self) -> None:
        """Note that the process goes on from a copy in memory."""
        _FROM_MEMORY.pack_into(self._page, _STEPS.size, 1)

    @property
    def is_from_memory(self) -> bool:
        """Whether it goes on from a copy in memory."""
        return bool(_FROM_MEMORY.unpack_from(self._page, _STEPS.size)[0])

    @property
    def first(self) -> int:
        """The first step that it has begun; 0: none."""
        return _STEPS.unpack_from(self._page)[0]

    @property
    def last(self) -> int:
        """The furthest step that it has begun; 0: none."""
        return _STEPS.unpack_from(self._page)[1]

    def close(self) -> None:
        """Give the page up."""
        self._page.close()
        if self._file is not None:
            self._file.close()


def _new_page() -> IO[bytes]:
    """A file with room of its own: where a mapped page finds none, the first write to it kills the process."""
    try:
        with contextlib.ExitStack() as undone:
            page = undone.enter_context(tempfile.TemporaryFile())
            page.write(bytes(_SIZE))
            page.flush()
            undone.pop_all()  # its owner closes it
    except OSError as error:
        folder = tempfile.tempdir or "a folder of temporary files"  # None if there is none
        raise LaunchError(
            f"there is no room for the page of a process's steps in {folder}: {error}. Make room there, or let TMPDIR "
            "name another folder."
        ) from error
    return page
