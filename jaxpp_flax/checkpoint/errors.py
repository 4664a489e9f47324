"""The errors of checkpoints: each names the checkpoint, what is wrong with it, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_flax.error_codes import documented


@documented("JPF400")
class CheckpointError(Exception):
    """The base class of all errors of checkpoints."""


@documented("JPF401")
class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


@documented("JPF402")
class UnfinishedCheckpointError(CheckpointError, FileNotFoundError):
    """The path holds only the remains of a save that was interrupted."""


@documented("JPF403")
class CorruptCheckpointError(CheckpointError, OSError):
    """A file of the checkpoint is missing, cut off, or cannot be read."""


@documented("JPF404")
class CheckpointSaveError(CheckpointError, OSError):
    """A save failed; earlier complete checkpoints are not changed."""


@documented("JPF405")
class DirectoryInUseError(CheckpointSaveError):
    """Another running job writes to this directory of checkpoints."""


@documented("JPF406")
class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint's leaves differ from the target's leaves; `faults` has one line for each wrong leaf.

    Args:
      message: the beginning of the text.
      faults: the wrong leaves.
      lines: what the text says of them, if it is not one line for each.

    Example:
      >>> print(CheckpointMismatchError("ckpt does not fit.", ["a: missing", "b: shape (2,), wanted (3,)"]))
      ckpt does not fit. 2 leaves are wrong:
        a: missing
        b: shape (2,), wanted (3,)
    """

    def __init__(self, message: str, faults: Sequence[str], lines: Sequence[str] | None = None) -> None:
        self.message, self.faults = message, tuple(faults)
        self._lines = self.faults if lines is None else tuple(lines)
        count = "1 leaf is" if len(self.faults) == 1 else f"{len(self.faults)} leaves are"
        super().__init__("\n  ".join([f"{message} {count} wrong:", *self._lines]))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.message, self.faults, self._lines))
