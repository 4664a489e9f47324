"""The supervision, with hosts that do as they are told: what is blamed when a host is lost."""

from __future__ import annotations

import io
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from jaxpp_flax.launch.host.host import HostReport
from jaxpp_flax.launch.host.supervised_process import ProcessState
from jaxpp_flax.launch.job import Job
from jaxpp_flax.launch.logs import Logs
from jaxpp_flax.launch.settings import LaunchSettings
from jaxpp_flax.launch.supervision import supervise


@dataclass
class Told:
    """A host with one process, which goes from one state to the next at each look; then the host is lost, or is not."""

    name: str
    statuses: Sequence[int | None]
    is_lost: bool = False
    lost: str | None = None
    address: str = "10.0.0.1:4000"
    index: int = 0
    heard: list[str] = field(default_factory=list[str])
    seconds_to_end: float = 0.0
    ended_at: float = 0.0

    def serve(self, settings: LaunchSettings) -> None: ...

    def start(self, settings: LaunchSettings) -> None:
        self.index = settings.process_id

    def poll(self) -> HostReport:
        status, *rest = self.statuses
        self.statuses = rest or [status]
        if self.is_lost and not rest:
            self.lost = "Ray says: it is gone."
            return HostReport()
        return HostReport((ProcessState(self.index, status, first=3, last=5),))

    def tell(self, line: str) -> None:
        self.heard.append(line)

    def signal(self, index: int | None, number: int) -> None:
        self.statuses = [-number]

    def end(self) -> None:
        self.ended_at = time.monotonic()

    def has_ended(self) -> bool:
        return time.monotonic() - self.ended_at >= self.seconds_to_end


@pytest.mark.parametrize(
    "other",
    [[None], [None, None, -signal.SIGABRT], [None, 69]],
    ids=["still runs", "aborted without the service", "ended because of it"],
)
def test_a_lost_host_is_the_cause_with_its_processes(other: list[int | None]):
    errors = io.StringIO()
    logs = Logs(2, Console(file=errors, width=1000), io.StringIO())
    lives = [
        [Told("a", [None] * 4, is_lost=True), there := Told("b", other)],
        [Told("c", [None, 0]), Told("b", [None, 0])],
    ]
    job = Job(program=[__file__], num_processes=1, max_restarts=1, failure_timeout=0.5)
    assert supervise(job, logs, [], lambda: lives.pop(0)) == 0
    assert (
        "host a is lost, with process 0 of 2: Ray says: it is gone. That was at step 5; restart 1" in errors.getvalue()
    )
    if other == [None]:
        assert there.heard == ["- host a is lost, with process 0 of 2: Ray says: it is gone."]


def test_a_process_that_does_not_end_after_the_program_of_another_is_killed_and_ends_well():
    errors = io.StringIO()
    logs = Logs(2, Console(file=errors, width=1000), io.StringIO())
    hosts = [Told("a", [None, 0]), Told("b", [None])]  # b never tells that its program is over
    job = Job(program=[__file__], num_processes=1, grace=0.3)
    assert supervise(job, logs, [], lambda: hosts) == 0
    assert "process 1 of 2 has ended its program, but is still running" in errors.getvalue()


@pytest.mark.parametrize("asked", [False, True])
def test_all_hosts_are_ended_at_once_and_who_asks_for_the_end_does_not_wait(asked: bool):
    logs = Logs(2, Console(file=io.StringIO(), width=1000), io.StringIO())
    hosts = [Told(name, [0], seconds_to_end=1.0) for name in "abc"]
    signals, begin = list[int](), time.monotonic()
    if asked:
        hosts[0].has_ended = lambda: bool(signals.append(signal.SIGINT))  # type: ignore[method-assign]
    assert supervise(Job(program=[__file__], num_processes=1), logs, signals, lambda: hosts) == 0
    assert (time.monotonic() - begin < 1.0) == asked
    assert max(host.ended_at for host in hosts) - begin < 0.9  # none waits for the end of another one
