"""The coordination service of a run, in a process of its own: ``python -m jaxpp_flax.launch.coordinator``.

JAX would serve it inside process 0. If process 0 were killed, JAX would abort all the others at once, before they could
print which process died and what they waited for. Here, process 0 is like the others.

The service lives as long as its standard input is open, and then until the processes of the run have ended: they hear
of each other through it. The next run may use its port at once: when the standard input ends, it lets nobody new
in, and once the processes of its run have gone the service ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxpp_flax._compat_processes import coordination
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings

__all__ = ["arguments", "connections", "end", "is_taken", "reserve_port", "say_goodbye", "start"]

_GOODBYE = b"end\n"
_AFTER_GOODBYE_SECONDS = 5.0
_POLL_SECONDS = 0.2
_ESTABLISHED, _LISTENING = "01", "0A"  # as Linux writes a connection's state


def connections(port: int) -> frozenset[str] | None:
    """The sockets of this host's connections to this TCP port; None where the system does not tell."""
    return _sockets(port, _ESTABLISHED)


def is_taken(port: int) -> bool:
    """Whether a process of this host is known to listen on this TCP port."""
    return bool(_sockets(port, _LISTENING))


def _sockets(port: int, state: str) -> frozenset[str] | None:
    """The numbers of the sockets of this port in this state; None where the system does not tell."""
    lines: list[str] = []
    for name in ("tcp", "tcp6"):
        try:
            lines += Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue  # no such system, or no IPv6
    words = [line.split() for line in lines]
    found = (word[9] for word in words if int(word[1].rpartition(":")[2], 16) == port and word[3] == state)
    return frozenset(found) if lines else None


def _stop_listening(port: int) -> None:
    """Let nobody new in; who is connected stays so. Where the system does not tell this process's sockets: nothing."""
    names = {f"socket:[{number}]" for number in _sockets(port, _LISTENING) or ()}
    for descriptor in Path("/proc/self/fd").iterdir() if names else ():
        try:
            if os.readlink(descriptor) in names:
                with socket.socket(fileno=os.dup(int(descriptor.name))) as listener:
                    listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # closed meanwhile


def reserve_port(address: str) -> socket.socket:
    """A socket that holds a free port of this host while it is open; the service may listen there all the same."""
    reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        # Both holders must say so for two sockets to share a port; JAX's service does.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise LaunchError(f"--address {address}: this machine cannot listen there: {error}") from error
    return reserved


def arguments(settings: LaunchSettings, linger: float, address: str | None = None) -> list[str]:
    """The arguments of the service's process, which stays `linger` seconds after the process that started it has died.

    It listens at the address of the settings, or at another one that leads to the same port.
    """
    numbers = settings.num_processes, linger
    return [address or settings.coordinator_address, *map(str, numbers)]


def start(settings: LaunchSettings, linger: float, address: str) -> subprocess.Popen[bytes]:
    """Start the service's process."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxpp_flax.launch.coordinator", *arguments(settings, linger, address)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Errors that matter reach the processes of the run; its other output would only alarm.
        stderr=subprocess.DEVNULL,
        process_group=0,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def say_goodbye(service: subprocess.Popen[bytes]) -> None:
    """Let the service end soon: every process of the run has ended its program."""
    if service.stdin is not None and service.poll() is None:
        try:
            service.stdin.write(_GOODBYE)
            service.stdin.close()
        except OSError:
            return  # it has ended


def end(service: subprocess.Popen[bytes]) -> None:
    """End the service at once: nobody has come to use it."""
    service.kill()
    service.wait()
    if service.stdin is not None:
        service.stdin.close()


def main(given: Sequence[str]) -> None:
    """Serve until the standard input ends, and a while longer. The arguments are those that `arguments` gives."""
    # SLURM tells all processes of a job to end, and those of the run still need the service for a last checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    address, num_processes, linger = given[0], int(given[1]), float(given[2])
    stop = coordination.start_coordination_service(address, num_processes)
    if stop is None:
        raise LaunchError("this version of JAX hides its coordination service; process 0 must serve it.")
    said = sys.stdin.buffer.read()
    deadline = time.monotonic() + (_AFTER_GOODBYE_SECONDS if said.endswith(_GOODBYE) else linger)
    port = int(address.rpartition(":")[2])
    _stop_listening(port)
    of_this_run = connections(port)
    while time.monotonic() < deadline:
        now = connections(port)
        if of_this_run is not None and now is not None and not of_this_run & now:
            break
        time.sleep(_POLL_SECONDS)
    stop()


if __name__ == "__main__":
    main(sys.argv[1:])
