"""A warm interpreter: it has imported what training needs, and each process of a run starts as a fork of it.

The imports take longer than all else that a process does before it traces its program. No backend of JAX and no library
of an accelerator is loaded here: a fork could not use them. Python's own `forkserver` would unpickle, would end each
process without its exit handlers, and would pass it off as a worker of `multiprocessing`; so this is a loop of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp_flax.launch.host.signals import kill_group
from jaxpp_flax.launch.settings import LaunchError

__all__ = ["Forked", "WarmInterpreter", "inherited"]

_IMPORTED = (
    "jax", "flax.nnx", "optax", "orbax.checkpoint", "jaxpp_flax.api", "jaxpp_flax.checkpoint",
    "jaxpp_flax.launch.child", "jaxpp_flax.launch.coordinator", "jaxpp_flax.trainers",
)  # fmt: skip
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 8
_FIRST_INHERITED = 100  # no interpreter that has just imported has as many open files


def inherited(descriptor: int) -> int:
    """A copy of an open file, with a number that is free in every new process: there it gets the same one."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_INHERITED)


class Forked:
    """A process that a warm interpreter has forked: what the launcher uses of `subprocess.Popen`."""

    def __init__(self, warm: WarmInterpreter, pid: int) -> None:
        self._warm, self.pid = warm, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, minus the signal that ended it; None while it runs."""
        return self._ask("poll")

    def wait(self) -> int:
        """Wait for its end."""
        return self._ask("wait") or 0

    def _ask(self, how: str) -> int | None:
        if self.returncode is None:
            try:
                self.returncode = self._warm.ask({how: self.pid})["status"]
            except LaunchError:  # nobody will hear of its end
                kill_group(self.pid)
                self.returncode = -signal.SIGKILL
        return self.returncode


class WarmInterpreter:
    """The interpreter, and the connection to it. It ends with the connection; what it has forked lives on."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "jaxpp_flax.launch.host.warm", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], descriptors: Mapping[int, int]
    ) -> Forked:
        """Start a module's `main` with arguments, as the leader of a group of processes.

        Args:
          module, arguments: what runs.
          environment: of it. What imports have read of the environment is the launcher's, but the number of devices.
          descriptors: its numbers of open files, and this process's.
        """
        request = {"module": module, "arguments": list(arguments), "environment": dict(environment)}
        request |= {"cwd": os.getcwd(), "numbers": list(descriptors)}
        return Forked(self, self.ask(request, list(descriptors.values()))["pid"])

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request with open files, and wait for the reply.

        Raises:
          LaunchError: if the interpreter has ended.
        """
        reply = b""
        with contextlib.suppress(OSError):
            socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], descriptors)
            reply = self._connection.recv(_MOST_BYTES)
        if not reply:
            raise LaunchError(
                f"the interpreter that forks the run's processes has ended, with status {self._popen.wait()}. See its "
                "output above; `--no-fork` starts each process by itself."
            )
        return json.loads(reply)

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._popen.wait()


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
        request = json.loads(text)
        if "module" not in request:
            found, status = os.waitpid(request.get("poll") or request["wait"], os.WNOHANG if "poll" in request else 0)
            reply = {"status": os.waitstatus_to_exitcode(status) if found else None}
        else:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"os\.fork\(\)")  # JAX's, of threads that it has not started yet
                pid = os.fork()
            if pid == 0:
                connection.close()
                return {**request, "received": received}
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # here too: it may be signalled before it has come to that
            for descriptor in received:
                os.close(descriptor)
            reply = {"pid": pid}
        connection.sendall(json.dumps(reply).encode())


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
    np.random.seed()  # else the global generators of all processes would be equal; Python seeds its own
    importlib.import_module(request["module"]).main(request["arguments"])


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
