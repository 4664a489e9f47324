"""One job at a time owns a directory of checkpoints: the lock file `.owner` names its process.

A job that was queued again may start while its first run is still alive; both would save the same steps. The second run
is refused while the first is alive. It becomes the owner if the first process is gone, or, if this machine cannot see
that process, if it has not renewed the file for `STALE_SECONDS`. The owner renews the file at its steps and saves.

The file is written on the condition that it has not changed: TensorStore has that for disks and for buckets.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tensorstore

from jaxpp_flax.checkpoint.errors import DirectoryInUseError
from jaxpp_flax.checkpoint.format.locations import storage_of

FILE_NAME = ".owner"
STALE_SECONDS = 600.0
"""The age of a lock file, in seconds, from which on an owner on another host is taken for dead."""

_RENEW_SECONDS = 60.0
# TensorStore would try for a quarter of an hour to reach a bucket, and a step of the run waits for it.
_FEW_RETRIES = {"gcs_request_retries": {"max_retries": 4}}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, described so that any process of the same machine can find out if it is alive."""

    host: str
    place: str  # the boot of the machine and the container; a process number is unique in them
    process: int  # the process number in this place
    started: str  # the start time of the process, in the clock of its kernel; "" if not known
    since: str  # the time when the process became the owner, in its own clock
    renewed: float = 0.0  # the time of its last sign of life, in seconds since 1970

    @classmethod
    def of(cls, process: int) -> Owner:
        """Describe a process of this machine."""
        return cls(
            host=socket.gethostname(),
            place=_place(),
            process=process,
            started=_start_time(process),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            renewed=time.time(),
        )

    def is_same_process(self, other: Owner) -> bool:
        """Return True if both describe one process; the times in them do not count."""
        return replace(self, since="", renewed=0.0) == replace(other, since="", renewed=0.0)

    def lives(self) -> bool | None:
        """Return True if the process exists, False if it is gone; None if this machine cannot tell."""
        if not self.started or (self.host, self.place) != (socket.gethostname(), _place()):
            return None
        return _start_time(self.process) == self.started

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class Ownership:
    """This process's claim to a directory: `take` makes the claim, `renew` and `check` keep it, `release` ends it.

    Example:
      >>> import tempfile
      >>> ownership = Ownership(Path(tempfile.mkdtemp()))
      >>> ownership.take(print)
      >>> ownership.check()
      >>> ownership.release()
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._path = directory, directory / FILE_NAME
        self._own: Owner | None = None
        self._renewed = 0.0

    def take(self, tell: Callable[[str], None]) -> None:
        """Become the owner of the directory, which is made if it does not exist; a living owner is never replaced.

        If this is the owner already, only `check` that it still is.

        `tell` is called with a message before a wait, and with the name of a dead owner that is replaced.
        """
        if self._own is not None:
            self.check()
            return
        own = Owner.of(os.getpid())
        while True:
            found = self._read()
            if found.owner is not None and found.owner.is_same_process(own):
                break  # another trainer of this process has taken it
            if found.exists:
                self._refuse_if_alive(found, tell)
            if self._write(own, found):
                if found.exists:
                    tell(f"{self._directory} was left by {found}, which has ended: this job takes it")
                break
            # Else another job was faster, or the owner has given a sign of life: the next read tells.
        self._own, self._renewed = own, time.monotonic()

    def renew(self) -> None:
        """Show that the owner is alive, at most once a minute; cheap enough for each step."""
        if self._own is not None and time.monotonic() - self._renewed > _RENEW_SECONDS:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):  # without the file or the disk, the next save tells
                found = self._read()
                if found.owner is not None and found.owner.is_same_process(self._own):
                    self._write(replace(found.owner, renewed=time.time()), found)

    def check(self) -> None:
        """Make sure that this process still owns the directory: its file may have grown old in a long step."""
        if self._own is None:
            return
        try:
            found = self._read()
        except OSError:
            return  # then the save raises the error
        if not found.exists:  # another trainer of this process has released the directory
            self._write(replace(self._own, renewed=time.time()), found)
        elif found.owner is not None and not found.owner.is_same_process(self._own):
            raise DirectoryInUseError(
                f"{self._directory} belongs to another job now ({found}). That job took it while this one "
                f"({self._own}) did no step for {STALE_SECONDS:.0f} s. This job no longer saves there: end it, "
                "or give it another directory."
            )

    def release(self) -> None:
        """Give the directory back."""
        own, self._own = self._own, None
        with contextlib.suppress(OSError):  # the next job will find that this one has ended
            found = self._read() if own is not None else None
            if found is not None and found.owner is not None and own is not None and found.owner.is_same_process(own):
                self._write(None, found)

    def _refuse_if_alive(self, found: _Found, tell: Callable[[str], None]) -> None:
        """Raise an error if the owner lives; wait for a sign of life from a process that this machine cannot see."""
        lives = False if found.owner is None else found.owner.lives()
        if lives or (lives is None and self._is_renewed(found, tell)):
            raise DirectoryInUseError(
                f"{self._directory} belongs to another job that is running: {found}. Both would write the same "
                "steps. Use another directory, or end that job first; it gives the directory "
                f"back by itself when it ends (if it has ended, remove {self._path})."
            )

    def _is_renewed(self, found: _Found, tell: Callable[[str], None]) -> bool:
        """Wait until the file is old, or gone; return True if its owner renews it before."""
        left = 0.0 if found.owner is None else found.owner.renewed + STALE_SECONDS - time.time()
        if left <= 0:
            return False
        tell(f"{self._directory} has an owner, {found}: waiting up to {left:.0f} s for a sign of life")
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            if (now := self._read()).version != found.version:
                return now.exists
        return False

    def _read(self) -> _Found:
        with _errors_of_the_system():
            result = self._storage().read(FILE_NAME).result()
        owner = None
        with contextlib.suppress(ValueError, TypeError):  # a file that nobody wrote whole
            owner = Owner(**json.loads(result.value))
        return _Found(exists=result.state == "value", owner=owner, version=result.stamp.generation)

    def _write(self, owner: Owner | None, found: _Found) -> bool:
        """Write or remove (None) the file; return False if it is not the one that was found any more."""
        value = None if owner is None else json.dumps(asdict(owner)).encode()
        with _errors_of_the_system():
            stamp = self._storage().write(FILE_NAME, value, if_equal=found.version).result()
        return stamp.generation != b""

    def _storage(self) -> Any:
        context = tensorstore.Context(_FEW_RETRIES)  # pyright: ignore[reportAttributeAccessIssue]
        store = tensorstore.KvStore  # pyright: ignore[reportAttributeAccessIssue]
        return store.open(storage_of(self._directory), context=context).result()


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What is in the place of the lock file; `owner` is None without a file, or if nobody can read it."""

    exists: bool
    owner: Owner | None
    version: bytes

    def __str__(self) -> str:
        return "a job that cannot be read" if self.owner is None else str(self.owner)


@contextlib.contextmanager
def _errors_of_the_system() -> Iterator[None]:
    """Raise TensorStore's errors as those of the operating system: it has `ValueError` for all of them."""
    try:
        yield
    except ValueError as error:
        raise OSError(str(error)) from error


def _start_time(process: int) -> str:
    """Return the start time of a process of this machine; "" if it has ended, or on a system without `/proc`."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _place() -> str:
    """Return the boot and the container: process numbers are unique in them."""
    parts: list[str] = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
