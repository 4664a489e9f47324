"""A warm interpreter: it has imported what training needs, and each process of a run starts as a fork of it.

The imports take longer than all else that a process does before it traces its program. No backend of JAX and no library
of an accelerator is loaded here: a fork could not use them. Python's own `forkserver` would unpickle, would end each
process without its exit handlers, and would pass it off as a worker of `multiprocessing`; so this is a loop of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpp_flax.launch.host.signals import describe_end, is_stopped, kill_group
from jaxpp_flax.launch.settings import LaunchError

__all__ = ["Forked", "NotForked", "WarmInterpreter", "inherited", "show_command"]

_IMPORTED = (
    "jax", "flax.nnx", "optax", "orbax.checkpoint", "jaxpp_flax.api", "jaxpp_flax.checkpoint",
    "jaxpp_flax.launch.child", "jaxpp_flax.launch.coordinator", "jaxpp_flax.trainers",
)  # fmt: skip
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 8
_FIRST_INHERITED = 100  # no interpreter that has just imported has as many open files
_LONGEST_COMMAND = 1000  # of a fork, as `ps` shows it
_POLL_SECONDS = 0.1
_MOST_SECONDS_STOPPED = 5.0
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37  # of Linux


def inherited(descriptor: int) -> int:
    """A copy of an open file, with a number that is free in every new process: there it gets the same one."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_INHERITED)


class Forked:
    """A child of this process that did not start by `subprocess.Popen`: what the launcher uses of that."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, minus the signal that ended it; None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end."""
        return self._wait(0) or 0

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if found else None
        return self.returncode


class NotForked(LaunchError):  # noqa: N818 the launcher catches it
    """The warm interpreter did not fork: it has ended, a signal has stopped it, or the user wants the end of the run.

    Attributes:
      status: as `Popen.returncode`; 0 if the user wants the end.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @classmethod
    def of(cls, end: str, status: int = 0) -> NotForked:
        """With the end of the interpreter in words."""
        text = f"the interpreter that forks the run's processes {end} (`--no-fork` starts each process by itself)."
        return cls(text, status)


class WarmInterpreter:
    """The interpreter, and the connection to it. It ends with the connection.

    What it has forked becomes a child of this process, and lives on when the interpreter is stopped or killed.

    Args:
      signals: grows when the user wants the end of the run.
    """

    def __init__(self, signals: Sequence[int] = ()) -> None:
        self._signals = signals
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._popen: subprocess.Popen[bytes] | Forked = subprocess.Popen(
                [sys.executable, "-m", "jaxpp_flax.launch.host.warm", str(theirs.fileno()), " " * _LONGEST_COMMAND],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    @property
    def has_ended(self) -> bool:
        """Whether it forks no more."""
        return self._popen.poll() is not None

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> Forked:
        """Start a module's `main` with arguments, as the leader of a group of processes.

        Args:
          module, arguments: what runs.
          environment: of it. What imports have read of the environment is the launcher's, but the number of devices.
          descriptors: its numbers of open files, and this process's.

        Raises:
          NotForked: if it cannot, or the user wants the end.
        """
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        request |= {"cwd": os.getcwd(), "numbers": list(descriptors)}
        pid = b""
        try:
            with _adopting(), contextlib.suppress(ConnectionError):
                socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], list(descriptors.values()))
                while not pid.endswith(b"\n"):
                    self._await_reply()
                    if not (more := self._connection.recv(_MOST_BYTES)):
                        break
                    pid += more
        finally:
            if pid and not pid.endswith(b"\n"):  # forked, but not given to this process
                kill_group(int(pid))
        if not pid.endswith(b"\n"):
            status = self._popen.wait()
            raise NotForked.of(describe_end(status), status)
        return Forked(int(pid))

    def _await_reply(self) -> None:
        """Wait until it says something, or has ended."""
        stopped_since: float | None = None
        reply = select.poll()
        reply.register(self._connection, select.POLLIN)
        while not reply.poll(1e3 * _POLL_SECONDS):
            if self._signals:
                self.close()
                raise NotForked.of("is ended")
            if not is_stopped(self._popen.pid):
                stopped_since = None
            elif stopped_since is None:
                stopped_since = time.monotonic()
            elif time.monotonic() - stopped_since > _MOST_SECONDS_STOPPED:
                self.close()
                raise NotForked.of("was stopped (SIGSTOP), and then killed", -signal.SIGSTOP)

    def close(self) -> None:
        """End it, and a fork that is still on its way to this process."""
        self._connection.close()
        if self._popen.returncode is None:  # else its number may be another's
            kill_group(self._popen.pid)
            self._popen.wait()


@contextlib.contextmanager
def _adopting() -> Generator[None]:
    """Inside, this process becomes the parent of those whose parent, a child of this one, ends.

    Raises:
      LaunchError: if the system knows no such thing.
    """
    system, before = ctypes.CDLL(None), ctypes.c_int()
    system.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if system.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise LaunchError("this system lets no process adopt others (prctl). Give --no-fork.")
    try:
        yield
    finally:
        system.prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


# -- in the interpreter


def main(connection: socket.socket) -> None:
    """Import, and fork at each request."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}  # it ends with the launcher
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # the program says what it misses
            importlib.import_module(name)
    gc.freeze()  # what is imported stays shared with the forks
    request = serve(connection)
    if request is not None:
        for number, handler in before.items():
            signal.signal(number, handler)
        become(request)


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer until the connection ends; returns in the forks too, with what each is to run."""
    while True:
        text, received = b"", list[int]()
        while not text.endswith(b"\n"):
            part, more, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
            if not part:
                return None
            text, received = text + part, received + more
        # The fork of a fork, which becomes the launcher's own child: that needs nothing more of this interpreter.
        if (between := fork()) == 0:
            if (pid := fork()) == 0:
                connection.close()
                return {**json.loads(text), "received": received}
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too: it may be signalled before it has come to that
            with contextlib.suppress(OSError):  # the launcher has gone
                connection.sendall(str(pid).encode())
            os._exit(0)
        for descriptor in received:
            os.close(descriptor)
        if os.waitpid(between, 0)[1] != 0:
            raise ChildProcessError("this interpreter could not fork; see above")
        with contextlib.suppress(OSError):
            connection.sendall(b"\n")


def fork() -> int:
    """`os.fork`, without JAX's warning of its threads, which are not there yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\)")
        return os.fork()


def become(request: Mapping[str, Any]) -> None:
    """Run a module as Python itself would, in this fork, which ends after it as any interpreter does."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for descriptor, number in zip(request["received"], request["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    if (devices := os.environ.get("JAX_NUM_CPU_DEVICES")) is not None:
        jax.config.update("jax_num_cpu_devices", int(devices))
    show_command([sys.executable, "-m", request["module"], *request["arguments"]])
    # The seed of strings' hashes is the same in all forks of a life: an order that hangs on it, of a set of names say,
    # is too. That does no harm; a program that needs it fails on a cluster, where each process has a seed of its own.
    np.random.seed()  # else the global generators of all processes would be equal; Python seeds its own
    importlib.import_module(request["module"]).main(request["arguments"])


def show_command(command: Sequence[str]) -> None:
    """Let `ps` show a fork's own command, written over that of the interpreter, and no longer than that.

    The name of a thread, which the system lets a process change, has 15 letters.
    """
    first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    if room := last - first:  # 0 where the system does not tell
        ctypes.memmove(first, "\0".join(command).encode()[: room - 1].ljust(room, b"\0"), room)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
