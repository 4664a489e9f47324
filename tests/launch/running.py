"""Starts real processes through the launcher, and looks for what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes.prepared import Started, server_of
from tests.running import MARK, PATIENCE, ROOT, wait_for

# The launcher in forks of one interpreter (`quick.py`), and as users start it, where it is the start that is tested.
QUICK = ("-m", "tests.launch.quick")
REAL = (sys.executable, "-m", "jaxpp_flax.launch")


def environment(mark: str) -> dict[str, str]:
    """The environment of a program that a test starts: one CPU device, this checkout, and a mark to find it by."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("JAXPP_FLAX_", "SLURM_", "OMPI_"))
    }
    kept.pop("XLA_FLAGS", None)
    kept.pop("PYTHONUNBUFFERED", None)
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), MARK: mark}


def marked(mark: str) -> dict[int, str]:
    """The command lines of all living processes with this mark, those that lost their parents included."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended, or is somebody else's
    return found


def _status(process: int) -> list[str]:
    """What the system tells of a process after its name; nothing if it has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent(process: int) -> int:
    """The process that has started this one; 0 if it has ended."""
    status = _status(process)
    return int(status[1]) if status else 0


def by_start(processes: Iterable[int]) -> list[int]:
    """Processes in the order in which they have started. Their ids tell it only until these begin again from 300."""

    def started(process: int) -> tuple[int, int]:
        status = _status(process)
        return int(status[19]) if status else sys.maxsize, process  # those that have ended come last

    return sorted(processes, key=started)


def forks(mark: str) -> list[int]:
    """What the launcher has forked from its warm interpreter: the coordination service, and then the run's processes.

    The interpreter started before them all.
    """
    launcher, *others = by_start(marked(mark)) or [0]
    return [process for process in others if parent(process) == launcher][1:]


LISTENING, CONNECTED = "0A", "01"  # of a TCP socket, as /proc writes it


def addresses(processes: list[int], state: str = LISTENING) -> list[str]:
    """The addresses, as /proc writes them, at which these processes have TCP sockets in a state."""
    found: list[str] = []
    for process in processes:
        sockets: set[str] = set()
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                sockets.add(os.readlink(descriptor))
        for table in ("tcp", "tcp6"):  # of the network that the process is in
            for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == state and f"socket:[{words[9]}]" in sockets:
                    found.append(words[1].rpartition(":")[0])
    return found


@dataclass
class Run:
    """A launcher that is running."""

    popen: subprocess.Popen[bytes] | Started
    out: Path
    err: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def wait_for_output(self, text: str, times: int = 1, since: int = 0) -> None:
        """Wait until the processes have printed `text` so often, of all that they print after so many characters."""
        wait_for(
            lambda: self.stdout.count(text, since) >= times or self.popen.poll() is not None,
            f"{text!r} (stderr: {self.stderr})",
        )
        assert self.stdout.count(text, since) >= times, (
            f"it ended before printing {text!r}: {self.stdout}\n{self.stderr}"
        )

    def process_ids(self) -> dict[int, int]:
        """The ids of the run's processes by index, from their lines `pid 1234`."""
        lines = [line.split() for line in self.stdout.splitlines() if " pid " in line]
        return {int(words[0].strip("[]")): int(words[2]) for words in lines}

    def kill(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one process of the run, not to its group."""
        os.kill(self.process_ids()[index], number)

    def finish(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.popen.wait(timeout=PATIENCE)

    def check_nothing_is_left(self, seconds: float = 30.0) -> None:
        """Neither a process of the run, nor one that these started."""
        wait_for(lambda: not marked(self.mark), f"the end of {marked(self.mark)}", seconds)


@contextmanager
def started(folder: Path, command: list[str], **more: str) -> Iterator[Run]:
    """A command, running; whatever is left of it at the end is killed.

    Without an interpreter before it, a script, or "-m" and a module, runs in a fork of one that has imported all.
    """
    mark = uuid.uuid4().hex
    own = {**environment(mark), **more}
    out, err = folder / f"{mark}.out", folder / f"{mark}.err"
    popen: Any
    with out.open("wb") as stdout, err.open("wb") as stderr:
        if command[0] == "-m" or command[0].endswith(".py"):
            popen = server_of(0).start(command, own, folder, {1: stdout.fileno(), 2: stderr.fileno()}, group=True)
        else:
            popen = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=own, cwd=folder, start_new_session=True)
    try:
        yield Run(popen, out, err, mark)
    finally:
        for process in marked(mark):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        popen.wait()


@contextmanager
def launched(
    folder: Path,
    source: str,
    *options: str,
    arguments: tuple[str, ...] = (),
    failure_timeout: float = 20.0,
    launcher: tuple[str, ...] = QUICK,
) -> Iterator[Run]:
    """A script, running as several processes under the launcher.

    The failure timeout is below the launcher's default: processes wait for shares of it before they end, and on a busy
    machine they print within a share of it what they waited for.
    """
    script = folder / "script.py"
    script.write_text(source, encoding="utf-8")
    options = ("--failure-timeout", str(failure_timeout), *options)
    with started(folder, [*launcher, *options, str(script), *arguments]) as run:
        yield run
