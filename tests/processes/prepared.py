"""Programs of tests start in forks of interpreters that have imported JAX, Flax, Optax, Orbax and this package.

These imports take longer than most of what several processes are started for. The forks are made before any backend
or thread exists, and each sets its own environment, devices and connection; it ends as an ordinary interpreter does.
Processes of one run are forks of different interpreters: what depends on the hashes of strings, such as the order of a
set, differs between them, as it does in earnest.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.running import MARK, ROOT

__all__ = ["Server", "Started", "fork_server", "server_of", "start_program"]

LONGEST_REQUEST = 1 << 20
MOST_DESCRIPTORS = 8
LONGEST_COMMAND = 1000
UNMARKED = "0" * 32
IMPORTED = (
    "jax", "flax.nnx", "optax", "orbax.checkpoint", "jaxpp_flax.api", "jaxpp_flax.checkpoint", "jaxpp_flax.launch",
    "jaxpp_flax.trainers", "tests.engine.toys",
)  # fmt: skip
# JAX reads these when it is imported: a program that needs other values than the tests' gets an interpreter of its own.
READ_BY_IMPORTS = ("JAX_", "PYTHON")
# Except for these, which are read, or set by `run`, when the program begins.
SET_LATER = ("JAX_NUM_CPU_DEVICES", "JAX_LOCAL_DEVICE_IDS")


class Started:
    """One program that runs; what the tests use of `subprocess.Popen`."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, minus the signal that ended it, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"status of": self.pid})["status"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
          subprocess.TimeoutExpired: if it still runs after `timeout` seconds.
        """
        begin = time.monotonic()
        while (status := self.poll()) is None:
            if timeout is not None and time.monotonic() - begin > timeout:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing if it has ended: its number is its own until `poll` has told its end."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """By SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Server:
    """An interpreter with the imports, and the connection to it; it ends all that it has started when this closes."""

    def __init__(self, connection: socket.socket, ended: Callable[[], int]) -> None:
        self.environment = dict(os.environ)
        self._connection, self._ended = connection, ended

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with this environment would have imported the same."""
        return all(
            self.environment.get(name) == environment.get(name)
            for name in {*self.environment, *environment}
            if name.startswith(READ_BY_IMPORTS) and name not in ("PYTHONPATH", "PYTHONUNBUFFERED", *SET_LATER)
        )

    def start(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        descriptors: Mapping[int, int],
        **more: Any,
    ) -> Started:
        """Start a script, or "-m" and a module, with arguments.

        Args:
          program, environment, cwd: of it.
          descriptors: its own numbers of open files, and this process's.
          more: `group`: whether it leads a process group of its own; `cores` that it may use.
        """
        request = {"program": list(program), "environment": dict(environment), "cwd": str(cwd)}
        request |= {"numbers": list(descriptors), **more}
        return Started(self, self.ask(request, list(descriptors.values()))["pid"])

    def ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Send a request with open files, and wait for the reply."""
        socket.send_fds(self._connection, [json.dumps(request).encode() + b"\n"], descriptors)
        if not (reply := self._connection.recv(LONGEST_REQUEST)):
            raise RuntimeError(f"the interpreter that starts programs has ended with status {self._ended()}")
        return json.loads(reply)

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._ended()


@functools.cache
def server_of(index: int) -> Server:
    """Started with the first program that asks for it, and closed with the tests."""
    connection, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            # Room for what its forks run, and for their marks: see `show`.
            [sys.executable, "-m", "tests.processes.prepared", str(theirs.fileno()), "-" * LONGEST_COMMAND],
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: UNMARKED},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
    server = Server(connection, process.wait)
    atexit.register(server.close)
    return server


def fork_server() -> Server:
    """For a program that was started here, before it has threads: the same for programs that it starts itself.

    They outlive it, as those of any other program do.
    """
    connection, theirs = socket.socketpair()
    if (pid := fork()) == 0:
        connection.close()
        with theirs:
            request = serve(theirs, ends_them=False)
        run(request)
        sys.exit()
    theirs.close()
    return Server(connection, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def fork() -> int:
    """`os.fork`, without JAX's warning of its threads, which are not there yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\)")
        return os.fork()


def start_program(
    program: Sequence[str], *, index: int, environment: Mapping[str, str], cwd: Path, output: int
) -> Started | subprocess.Popen[bytes]:
    """Start a script, or "-m" and a module, with arguments, in a fork of interpreter `index`.

    What it prints goes to the descriptor `output`.
    """
    server = server_of(index)
    if not server.fits(environment):
        return subprocess.Popen(
            [sys.executable, *program],
            env=environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return server.start(program, environment, cwd, {1: output, 2: output})


def serve(connection: socket.socket, *, ends_them: bool) -> dict[str, Any]:
    """Answer until the connection ends; returns in the forks alone, with what each is to run."""
    children: set[int] = set()
    while True:
        text, received = b"", list[int]()
        while not text.endswith(b"\n"):
            part, more, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, MOST_DESCRIPTORS)
            if not part:
                leave(children if ends_them else set())
            text, received = text + part, received + more
        request = json.loads(text)
        if "program" in request:
            if (pid := fork()) == 0:
                connection.close()
                place(received, request["numbers"])
                return request
            children.add(pid)
            if request.get("group"):
                os.setpgid(pid, pid)  # here too: it may be asked for before the fork has come to it
            for descriptor in received:
                os.close(descriptor)
            connection.sendall(json.dumps({"pid": pid}).encode())
        else:
            pid, status = os.waitpid(request["status of"], os.WNOHANG)
            children.discard(pid)
            ended = os.waitstatus_to_exitcode(status) if pid else None
            connection.sendall(json.dumps({"status": ended}).encode())


def place(received: list[int], numbers: list[int]) -> None:
    """Give the received descriptors the numbers that they are to have."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in received]  # no number is taken twice
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def leave(children: set[int]) -> NoReturn:
    """End those that still run, and this process."""
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit()


def show(program: Sequence[str], environment: Mapping[str, str]) -> None:
    """Let /proc tell the command and the mark of a fork, as of an interpreter of its own: written over the server's."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    arguments, after_arguments, variables, after_variables = map(int, places)
    room = after_arguments - arguments
    command = "\0".join([sys.executable, *program]).encode()[: room - 1]
    ctypes.memmove(arguments, command.ljust(room, b"\0"), room)
    at = ctypes.string_at(variables, after_variables - variables).index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(variables + at, environment.get(MARK, UNMARKED).encode(), len(UNMARKED))


def run(request: dict[str, Any]) -> None:
    """As Python itself would run the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request.get("group"):
        os.setpgid(0, 0)
    show(request["program"], request["environment"])
    if request.get("cores"):
        os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # of the environment now
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        sys.modules["jax"].config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))
    os.chdir(request["cwd"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    program = request["program"]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def main() -> None:
    """Import what programs of the tests do, and fork for each of them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end, and this with them
    for name in IMPORTED:
        importlib.import_module(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        print(f"the imports have started {threads - 1} threads, which a fork would not have", file=sys.stderr)
    gc.freeze()  # the pages of what is imported stay shared
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        request = serve(connection, ends_them=True)
    run(request)


if __name__ == "__main__":
    main()
