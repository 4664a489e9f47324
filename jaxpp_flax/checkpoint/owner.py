"""One job at a time owns a directory of checkpoints. The file `.owner` names the job, which keeps counting in the file.

A job that was queued again may start while its first run is still alive; both would save the same steps. The second run
is refused while the first is alive. If the first has died, on this host or another, the second becomes the owner.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxpp_flax.checkpoint.errors import DirectoryInUseError

FILE_NAME = ".owner"

_BEAT_SECONDS = 5.0
# Some owners cannot be checked (on another host, or stopped). After this time without a count, they are replaced.
_PATIENCE = 30.0
_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, described so that any other process can find out if it is alive."""

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
            started=_status(process)[1],
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    def is_same_process(self, other: Owner) -> bool:
        """Return True if both describe one process; the time when it became the owner does not count."""
        return replace(self, since="") == replace(other, since="")

    def lives(self) -> bool | None:
        """Return True if the process is alive and running, False if not; None if this machine cannot tell."""
        if (self.host, self.place) != (socket.gethostname(), _place()):
            return None
        state, started = _status(self.process)
        if state in ("", "Z", "X") or started != self.started:
            return False
        return None if state in "Tt?" else True  # a stopped process may never continue

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since}"


class Ownership:
    """This process's claim to a directory: `take` makes the claim, a thread keeps it, `release` ends it.

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
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, tell: Callable[[str], None]) -> None:
        """Become the owner of the directory, which is made if it does not exist; a living owner is never replaced.

        `tell` is called with a message if the wait takes long, and with the name of a dead owner that is replaced.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        own = Owner.of(os.getpid())
        while not self._create(own):
            found = _read(self._path)
            if found is None:
                continue  # the owner has just released the directory
            if found[0] is not None and found[0].is_same_process(own):
                break  # another trainer of this process has taken it
            self._displace(found, tell)
        self._own = own
        self._ended = threading.Event()
        beat = functools.partial(self._beat, own, self._ended)
        self._thread = threading.Thread(target=beat, name="jaxpp_flax owner", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Make sure that this process still owns the directory: it may have been stopped for some time."""
        owner = self._owner()
        if self._own is not None and owner is not None and not owner.is_same_process(self._own):
            raise DirectoryInUseError(
                f"{self._directory} belongs to another job by now ({owner}), which has taken it while this one "
                f"({self._own}) stood still for more than {_PATIENCE:.0f} s. This one saves nothing there any more: "
                "end it, or give it a directory of its own."
            )

    def release(self) -> None:
        """Give the directory back."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        own, owner = self._own, self._owner()
        self._own = self._thread = None
        if own is not None and owner is not None and owner.is_same_process(own):
            with contextlib.suppress(OSError):  # the next job will find that this one has ended
                self._path.unlink()

    def _owner(self) -> Owner | None:
        """Read the owner from the file; None if the file cannot be read: then a save cannot be written either."""
        try:
            found = _read(self._path)
        except OSError:
            return None
        return None if found is None else found[0]

    def _create(self, own: Owner) -> bool:
        """Write the file, unless it exists."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, f"{0:0{_DIGITS}}\n{json.dumps(asdict(own))}\n".encode())
        except OSError:  # a full disk: an empty file would name no owner to check
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return True

    def _displace(self, found: tuple[Owner | None, str], tell: Callable[[str], None]) -> None:
        """Remove the file of an owner that has died."""
        owner = found[0]
        lives = None if owner is None else owner.lives()
        if lives is None:
            tell(
                f"{self._directory} has an owner, {owner or 'which cannot be read'}: waiting up to {_PATIENCE:.0f} s "
                "for a sign of life"
            )
            lives = self._moves(found)
        if lives:
            raise DirectoryInUseError(
                f"{self._directory} belongs to another job that is running: {owner}. Two of them would write the same "
                "steps over each other's. Use another directory, or end that job first; it gives the directory "
                f"back by itself when it ends (if it has ended, remove {self._path})."
            )
        aside = self._path.with_name(f"{FILE_NAME}.{secrets.token_hex(4)}")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return  # another job was faster: the next read finds its file
        taken = _read(aside)
        if taken != found and not self._path.exists():
            aside.rename(self._path)  # the file of another job, which was faster
            return
        aside.unlink(missing_ok=True)
        tell(
            f"{self._directory} was left by {owner or 'a job that cannot be read'}, which has ended: this job takes it"
        )

    def _moves(self, found: tuple[Owner | None, str]) -> bool:
        """Wait up to `_PATIENCE` seconds for a change of the file; return True if the same owner has counted on."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            time.sleep(min(0.2, _PATIENCE / 10))
            if (now := _read(self._path)) != found:
                return now is not None and now[0] == found[0]
        return False

    def _beat(self, own: Owner, ended: threading.Event) -> None:
        count = 0
        while not ended.wait(_BEAT_SECONDS):
            count += 1
            try:
                found = _read(self._path)
                if found is None:  # another trainer of this process has released the directory
                    self._create(own)
                elif found[0] is not None and not found[0].is_same_process(own):
                    return  # the next save raises
                else:
                    with self._path.open("r+b") as file:
                        file.write(f"{count:0{_DIGITS}}".encode())
            except OSError:
                continue  # a full disk, a lost mount: the next save raises


def _read(path: Path) -> tuple[Owner | None, str] | None:
    """Return the owner (None if not readable) and its count; None without a file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    count, _, rest = text.partition("\n")
    try:
        return Owner(**json.loads(rest)), count
    except (ValueError, TypeError):
        return None, text


def _status(process: int) -> tuple[str, str]:
    """Return the state of a process of this machine, as a letter of Linux, and the start time.

    The state is "" if there is no such process, and "?" if the system only tells that the process exists.
    """
    if Path("/proc/self/stat").exists():
        try:
            text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "", ""
        fields = text.rpartition(")")[2].split()
        return fields[0], fields[19]
    try:
        os.kill(process, 0)
    except OSError as error:
        return "" if isinstance(error, ProcessLookupError) else "?", ""
    return "?", ""


def _place() -> str:
    """Return the boot and the container: process numbers are unique in them."""
    parts: list[str] = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
