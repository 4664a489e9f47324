"""The hosts of a run on a Ray cluster: an actor on each owns its `Host`, for as long as the run lasts.

An actor answers each call with all that its host has to tell. So a call that starts a process and one that only asks
are alike to the driver, which waits for none of them.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import socket
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from jaxpp_flax.launch.host.host import Host, HostReport
from jaxpp_flax.launch.host.warm import NotForked
from jaxpp_flax.launch.logs import Logs, lines_of
from jaxpp_flax.launch.ray.cluster import RayHead
from jaxpp_flax.launch.ray.copies import HostCopies
from jaxpp_flax.launch.settings import LaunchError, LaunchSettings

__all__ = ["HostActor", "RayHost"]

Line = tuple[int, str, bool]  # the index of a process, what it has printed, and whether as an error
Answer = tuple[str, HostReport, list[Line]]

_POLL_SECONDS = 0.2
_LONGEST_REASON = 200  # Ray adds what may be the cause, and what may help
_MOST_LINES = 10_000  # that wait for the driver; then the processes wait too
_SECONDS_FOR_LAST_LINES = 1.0
# Until the interpreter that forks the processes has imported all, from a slow disk perhaps.
_START_SECONDS = 300.0


class HostActor:
    """The actor, with the `Host`."""

    def __init__(
        self,
        program: Sequence[str],
        devices_per_process: int,
        forks: bool,
        folder: str,
        environment: Mapping[str, str],
        keeps_state: bool,
    ) -> None:
        os.environ.update(environment)
        # Where the program's packages may have been brought by Ray, the driver's folder may be absent.
        with suppress(OSError):
            os.chdir(folder)
        if program[0] != "-m" and not Path(program[0]).is_file():
            raise LaunchError(
                f"there is no file {program[0]!r} in {os.getcwd()}. Each host needs the program at the same path: put "
                "it into a shared folder or into the image, or give Ray a `working_dir`."
            )
        # Ray blocks Ctrl-C for what it starts itself; what is started here would never hear of it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        self._lines: queue.Queue[Line] = queue.Queue(_MOST_LINES)
        self._readers: list[threading.Thread] = []
        address = importlib.import_module("ray").util.get_node_ip_address()
        self._host = Host(
            program, devices_per_process, forks=forks, address=address, follow=self._follow, keeps_state=keeps_state,
            link=self._link,
        )  # fmt: skip
        self._copies = None if self._host.memory is None else HostCopies(self._host.memory, address)

    def _follow(self, index: int, stream: IO[str], errors: bool) -> None:
        def read() -> None:
            for line in lines_of(stream):
                self._lines.put((index, line, errors))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        self._readers = [*filter(threading.Thread.is_alive, self._readers), reader]

    def _link(self, link: socket.socket) -> None:
        if self._copies is not None:
            self._copies.serve(link)

    def copies(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `HostCopies`, if this host keeps any."""
        return None if self._copies is None else getattr(self._copies, method)(*arguments)

    def call(self, method: str | None, *arguments: Any) -> Answer:
        """Call a method of the `Host`, or none; returns its address and report, and what its processes have printed."""
        if method is not None:
            getattr(self._host, method)(*arguments)
        lines: list[Line] = []
        deadline = time.monotonic() + _SECONDS_FOR_LAST_LINES
        while method == "end" and any(reader.is_alive() for reader in self._readers) and time.monotonic() < deadline:
            with suppress(queue.Empty):
                lines.append(self._lines.get(timeout=0.02))
        lines += [self._lines.get_nowait() for _ in range(self._lines.qsize())]
        return self._host.address, self._host.poll(), lines


class RayHost:
    """A host far away, as the driver of the run sees it: a `ProcessHost`.

    Args:
      ray: the module.
      actor: the handle of its `HostActor`.
      name, node: of the host, for messages; and of its node in Ray.
      logs: where its processes' lines are printed.
      head: of the cluster.
      timeout_s: how long it may leave a call without an answer.

    Attributes:
      asked: the time when it was asked to prepare.
      actor: its handle.
      address, lost: as of `Host`. The address is empty until the host has answered to `prepare`.
    """

    def __init__(self, ray: Any, actor: Any, name: str, node: str, logs: Logs, head: RayHead, timeout_s: float) -> None:
        self._ray, self.actor, self._logs, self._head, self._timeout = ray, actor, logs, head, timeout_s
        self.name, self.node, self.asked = name, node, time.monotonic()
        self.address = ""
        self.lost: str | None = None
        self._report = HostReport()
        self._calls: list[tuple[Any, float]] = []  # not answered yet, with the times when they were made
        self._asked = self._answered = 0.0

    def _ask(self, method: str | None, *arguments: Any) -> None:
        self._asked = time.monotonic()
        if self.lost is None:
            self._calls.append((self.actor.call.remote(method, *arguments), self._asked))

    def prepare(self) -> None:
        """As `Host.prepare`; the answer comes later."""
        self.asked = time.monotonic()
        self.address, self._report = "", HostReport()
        self._ask("prepare")

    def meet(self, life: int, hosts: Sequence[RayHost], place: int) -> None:
        """As `HostCopies.meet`."""
        self.actor.copies.remote("meet", life, [host.actor for host in hosts], place)

    def serve(self, settings: LaunchSettings) -> None:
        """As `Host.serve`."""
        self._ask("serve", settings)

    def start(self, settings: LaunchSettings) -> None:
        """As `Host.start`."""
        self._ask("start", settings)

    def tell(self, line: str) -> None:
        """As `Host.tell`."""
        self._ask("tell", line)

    def signal(self, index: int | None, number: int) -> None:
        """As `Host.signal`."""
        self._ask("signal", index, number)

    def poll(self) -> HostReport:
        """The latest news; asks for more, and does not wait for it."""
        self._head.check()
        if not self._calls and time.monotonic() - self._asked >= _POLL_SECONDS:
            self._ask(None)
        self._hear(self._timeout if self._report.processes else max(_START_SECONDS, self._timeout))
        return self._report

    def end(self) -> None:
        """As `Host.end`; the answer comes later."""
        self._ask("end")

    def has_ended(self) -> bool:
        """As `Host.has_ended`; also if it is lost."""
        self._hear(self._timeout)
        return not self._calls

    def give_up(self, why: str) -> None:
        """Count it as lost. Whatever is left of it ends with its actor, at the latest when Ray reaches it again."""
        self.lost, self._calls, self._report = self.lost or why, [], HostReport()
        if not self._head.is_lost:  # else the call would wait until Ray ends this process
            self._ray.kill(self.actor)

    def _hear(self, limit: float) -> None:
        """Take the answers that have come, in the order of the calls; give the host up after so many seconds without.

        It does not wait: while Ray waits, no signal is heard.
        """
        while self._calls and self._ray.wait([self._calls[0][0]], timeout=0.0)[0]:
            call, _ = self._calls.pop(0)
            self._answered = time.monotonic()
            try:
                self.address, self._report, lines = self._ray.get(call)
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, NotForked):  # another actor makes another interpreter
                    self.give_up(str(error.cause))
                    return
                raise LaunchError(f"host {self.name}: {error.cause}") from error
            except self._ray.exceptions.RayError as error:  # of the actor, or of an answer that is lost with it
                why = str(error).strip().splitlines()[-1].strip()
                if getattr(error, "actor_init_failed", False):
                    raise LaunchError(f"host {self.name}: {why}") from error
                self.give_up(f"Ray says: {textwrap.shorten(why, _LONGEST_REASON)}.")
                return
            for index, line, errors in lines:
                self._logs.print_line(index, line, errors)
        # One call after another is answered, so a call waits for those before it.
        if self._calls and time.monotonic() - max(self._calls[0][1], self._answered) > limit:
            self.give_up(f"it has not answered for {limit:g} s.")
