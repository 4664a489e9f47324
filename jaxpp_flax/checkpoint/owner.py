"""One job at a time owns a directory of checkpoints: the lock file `.owner` names its process.

A job that was queued again may start while its first run is still alive; both would save the same steps. The second run
is refused while the first is alive. It becomes the owner if the first process is gone, or, if this machine cannot see
that process, if the lock file is older than `STALE_SECONDS`. The owner renews the file at its steps and saves.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxpp_flax.checkpoint.errors import DirectoryInUseError

FILE_NAME = ".owner"
STALE_SECONDS = 600.0
"""The age of a lock file, in seconds, from which on an owner on another host is taken for dead."""

_RENEW_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, described so that any process of the same machine can find out if it is alive."""

    host: str
    place: str  # the boot of the machine and the container; a process number is unique in them
    process: int  # the process number in this place
    started: str  # the start time of the process, in the clock of its kernel; "" if not known
    since: str  # the time when the process became the owner, in its own clock

    @classmethod
    def of(cls, process: int) -> Owner:
        """Describe a process of this machine."""
        return cls(
            host=socket.gethostname(),
            place=_place(),
            process=process,
            started=_start_time(process),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    def is_same_process(self, other: Owner) -> bool:
        """Return True if both describe one process; the time when it became the owner does not count."""
        return replace(self, since="") == replace(other, since="")

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

        `tell` is called with a message before a wait, and with the name of a dead owner that is replaced.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        own = Owner.of(os.getpid())
        while not self._create(own):
            content = _read(self._path)
            if content is None:
                continue  # the owner has just released the directory
            owner = _parse(content)
            if owner is not None and owner.is_same_process(own):
                break  # another trainer of this process has taken it
            self._displace(owner, content, tell)
        self._own, self._renewed = own, time.monotonic()

    def renew(self) -> None:
        """Show that the owner is alive, at most once a minute; cheap enough for each step."""
        if self._own is not None and time.monotonic() - self._renewed > _RENEW_SECONDS:
            self._renewed = time.monotonic()
            with contextlib.suppress(OSError):  # without the file or the disk, the next save tells
                os.utime(self._path)

    def check(self) -> None:
        """Make sure that this process still owns the directory: its file may have grown old in a long step."""
        if self._own is None:
            return
        try:
            content = _read(self._path)
        except OSError:
            return  # then the save raises the error
        if content is None:  # another trainer of this process has released the directory
            self._create(self._own)
            return
        owner = _parse(content)
        if owner is not None and not owner.is_same_process(self._own):
            raise DirectoryInUseError(
                f"{self._directory} belongs to another job by now ({owner}), which has taken it while this one "
                f"({self._own}) did no step for {STALE_SECONDS:.0f} s. This one saves nothing there any more: end it, "
                "or give it a directory of its own."
            )

    def release(self) -> None:
        """Give the directory back."""
        own, self._own = self._own, None
        with contextlib.suppress(OSError):  # the next job will find that this one has ended
            owner = None if own is None else _parse(_read(self._path) or "")
            if own is not None and owner is not None and owner.is_same_process(own):
                self._path.unlink()

    def _create(self, own: Owner) -> bool:
        """Write the file, unless it exists."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, json.dumps(asdict(own)).encode())
        except OSError:  # a full disk: an empty file would name no owner to check
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _displace(self, owner: Owner | None, content: str, tell: Callable[[str], None]) -> None:
        """Remove the file of an owner that has died."""
        lives, name = (None, "a job that cannot be read") if owner is None else (owner.lives(), str(owner))
        if lives or (lives is None and self._is_renewed(name, tell)):
            raise DirectoryInUseError(
                f"{self._directory} belongs to another job that is running: {name}. Two of them would write the same "
                "steps over each other's. Use another directory, or end that job first; it gives the directory "
                f"back by itself when it ends (if it has ended, remove {self._path})."
            )
        aside = self._path.with_name(f"{FILE_NAME}.{secrets.token_hex(4)}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return  # another job was faster: the next read finds its file
        if _read(aside) != content and not self._path.exists():
            aside.rename(self._path)  # the file of another job, which was faster
            return
        aside.unlink(missing_ok=True)
        tell(f"{self._directory} was left by {name}, which has ended: this job takes it")

    def _is_renewed(self, name: str, tell: Callable[[str], None]) -> bool:
        """Wait until the file is old, or gone; return True if its owner renews it before."""
        first = _write_time(self._path)
        left = 0.0 if first is None else first + STALE_SECONDS - time.time()
        if left <= 0:
            return False
        tell(f"{self._directory} has an owner, {name}: waiting up to {left:.0f} s for a sign of life")
        end = time.monotonic() + left
        while time.monotonic() < end:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            if (now := _write_time(self._path)) != first:
                return now is not None
        return False


def _read(path: Path) -> str | None:
    """Return the content of a lock file; None without a file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _parse(content: str) -> Owner | None:
    """Return the owner that a lock file names; None if it cannot be read."""
    try:
        return Owner(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _write_time(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


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
