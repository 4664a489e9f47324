"""What becomes of the processes of a run when the coordination service, or their connection to it, is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.launch.running import Run, marked, started
from tests.processes.faults import says
from tests.running import free_port

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
from jaxpp_flax.launch import initialize
group = initialize(coordinator_address=sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
"""
BARRIERS = """
import time
from pathlib import Path
for number in range(10**6):
    over = Path("over").exists()
    if any(group.exchange("the round", b"x" * over)):
        break
    if number % 20 == 19:
        print("round", number, flush=True)
print("all rounds", flush=True)
"""
WAIT = """
if group.process_index == 1:
    print("at the barrier", flush=True)
group.barrier("the save" if group.process_index == 1 else "the start of all processes")
"""


class Network:
    """Between a process and the service: what connects here reaches the service, until it is reset."""

    def __init__(self, service: int) -> None:
        self.port, self._service = free_port(), service
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.listen()

    def listen(self) -> None:
        """Let connections through."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=[self._listener], daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._service))
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def refuse(self) -> None:
        """Reset all connections, and refuse new ones."""
        with contextlib.suppress(OSError):  # it refuses already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for near, far in self._pairs:
            for end in (near, far):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._pairs.clear()


@contextmanager
def two(folder: Path, source: str) -> Iterator[tuple[list[Run], Network]]:
    """Two processes; process 1 reaches the service of process 0 through a network."""
    (folder / "script.py").write_text(source, encoding="utf-8")
    service = free_port()
    network = Network(service)
    with ExitStack() as stack:
        runs = [
            stack.enter_context(started(folder, ["script.py", f"127.0.0.1:{port}", str(index)]))
            for index, port in enumerate([service, network.port])
        ]
        yield runs, network
        network.refuse()


def test_a_connection_that_is_reset_for_more_than_a_second_ends_nobody(tmp_path: Path):
    with two(tmp_path, SCRIPT + BARRIERS) as (runs, network):
        for _ in range(2):
            runs[1].wait_for_output("round", times=runs[1].stdout.count("round") + 2)
            network.refuse()
            time.sleep(1.2)
            network.listen()
            time.sleep(3.0)
        runs[1].wait_for_output("round", times=runs[1].stdout.count("round") + 2)
        (tmp_path / "over").touch()
        assert [run.finish() for run in runs] == [0, 0], runs[1].stderr
    assert all("all rounds" in run.stdout for run in runs)
    assert "Terminating process" not in runs[1].stderr


def test_process_0_that_is_killed_with_its_service_is_named_by_its_host(tmp_path: Path):
    with two(tmp_path, SCRIPT + WAIT) as (runs, network):
        runs[1].wait_for_output("at the barrier")
        time.sleep(2.5)  # the first heartbeats
        for process in marked(runs[0].mark):
            os.kill(process, signal.SIGKILL)
        network.refuse()
        killed = time.monotonic()
        assert runs[1].finish() == 69
        seconds = time.monotonic() - killed
    assert "(the host of process 0) has ended, maybe with all that ran beside it" in runs[1].stderr
    assert "Process 1 was waiting for the save" in runs[1].stderr
    assert says("process 0 with its container").search(runs[1].stderr)
    # Three seconds without an answer, and three for the main thread; the rest is for machines that are busy.
    assert seconds < 15.0


def test_a_process_that_is_killed_while_another_is_at_a_barrier_is_named_soon(tmp_path: Path):
    with two(tmp_path, SCRIPT + WAIT.replace("1", "0")) as (runs, _):
        runs[0].wait_for_output("at the barrier")
        time.sleep(2.5)  # the first heartbeats
        runs[1].popen.kill()
        killed = time.monotonic()
        assert runs[0].finish() == 69
        seconds = time.monotonic() - killed
    assert says("a killed one at a barrier").search(runs[0].stderr)
    # 18 seconds of silence are awaited where the door says nothing.
    assert seconds < 15.0
