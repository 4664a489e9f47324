"""The watch of a thousand processes on virtual time: what it asks of the store, and how soon all know of a failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.processes.watch import Watch
from tests.helpers import slow

TIMEOUT, SILENCE = 30.0, 18.0  # the default, and 60 % of it


class KilledError(Exception):
    """A process of the simulation dies inside a call to the store."""


class CountingStore:
    """A store that counts requests, and the entries that it sends."""

    def __init__(self) -> None:
        self.folders: dict[str, dict[str, bytes]] = {}
        self.requests = self.entries = 0
        self.after_claim: Callable[[str], None] = lambda key: None

    def _place(self, key: str) -> tuple[dict[str, bytes], str]:
        root, folder, rest = key.split("/", 2)
        self.requests += 1
        return self.folders.setdefault(f"{root}/{folder}", {}), rest

    def set(self, key: str, value: bytes) -> None:
        folder, rest = self._place(key)
        folder[rest] = value

    def get(self, key: str, timeout_s: float) -> bytes | None:
        folder, rest = self._place(key)
        self.entries += 1
        return folder.get(rest)

    def list(self, folder: str) -> dict[str, bytes]:
        found = dict(self.folders.get(folder, {}))
        self.requests, self.entries = self.requests + 1, self.entries + len(found)
        return found

    def claim(self, key: str, value: bytes) -> bytes:
        folder, rest = self._place(key)
        found = folder.setdefault(rest, value)
        self.after_claim(key)
        return found

    def delete(self, key: str) -> None:
        folder, rest = self._place(key)
        folder.pop(rest, None)


@dataclass
class Simulation:
    """Processes that exchange their heartbeats once a second, one after another."""

    count: int
    report: float = 60.0
    stuck: float = 1e9
    store: CountingStore = field(default_factory=CountingStore)
    dead: set[int] = field(default_factory=set)
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        store: Any = self.store
        self.groups = [ProcessGroup(store, index, self.count) for index in range(self.count)]
        self.watches = [
            Watch(group, store, TIMEOUT, lambda failure: None, report_s=self.report, stuck_s=self.stuck)
            for group in self.groups
        ]
        self.second = 0

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second += 1
            for index, watch in enumerate(self.watches):
                if index not in self.dead:
                    try:
                        watch.exchange(self.begin + self.second + index / self.count)
                    except KilledError:
                        self.dead.add(index)

    def seconds_until_all_know(self) -> int:
        """Run until each living process knows of a failure; the seconds from now."""
        begun = self.second
        while any(g.failure is None for i, g in enumerate(self.groups) if i not in self.dead):
            self.run(1)
            assert self.second < begun + 5 * TIMEOUT, "not all processes ever know"
        return self.second - begun

    def failures(self) -> set[tuple[int | None, str]]:
        """What the living processes know."""
        found = [group.failure for i, group in enumerate(self.groups) if i not in self.dead]
        return {(f.process, f.message[:15]) for f in found if f is not None}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    """The place of the main thread is the same for all processes of a simulation."""
    monkeypatch.setattr("jaxpp_flax.processes.beats.main_thread_location", lambda: "train (train.py:7)")


def load(count: int) -> tuple[float, float]:
    """The requests and the sent entries of one second, for each process."""
    run = Simulation(count)
    run.run(3)
    requests, entries = run.store.requests, run.store.entries
    run.run(5)
    return (run.store.requests - requests) / 5 / count, (run.store.entries - entries) / 5 / count


def test_the_load_on_the_store_grows_with_the_number_of_processes_and_not_with_its_square():
    few, many = load(16), load(1024)
    # A heartbeat and the news, for each process; all heartbeats and one more entry, for the watcher.
    assert many == pytest.approx((2.0, 2.0), abs=0.01)
    assert few == pytest.approx((2.0, 2.0), abs=0.2)


@pytest.mark.parametrize("victim", [0, slow(7)])
def test_of_a_thousand_all_know_of_a_silent_one_within_two_seconds_of_its_silence(victim: int):
    run = Simulation(1024)
    run.run(3)
    run.dead.add(victim)  # 0 is the watcher itself
    assert SILENCE <= run.seconds_until_all_know() <= SILENCE + 2
    assert run.failures() == {(victim, "no sign of life")}


def test_a_report_reaches_a_thousand_processes_within_a_second():
    run = Simulation(1024)
    run.run(3)
    run.groups[700].report_failure("ValueError: no more disk")
    assert run.seconds_until_all_know() == 1
    assert run.failures() == {(700, "ValueError: no ")}


def test_a_watcher_that_dies_as_it_takes_over_is_followed_by_another():
    run = Simulation(32)
    run.run(3)
    run.dead.add(0)

    def die(key: str) -> None:
        if key.endswith("terms/2"):
            run.store.after_claim = lambda key: None
            raise KilledError

    run.store.after_claim = die
    assert 2 * SILENCE <= run.seconds_until_all_know() <= 2 * SILENCE + 3
    assert len(run.dead) == 2
    assert run.failures() == {(0, "no sign of life")}


def test_if_process_0_begins_late_another_one_watches():
    run = Simulation(4)
    run.dead.add(0)
    run.run(int(SILENCE) + 3)
    run.dead.remove(0)
    run.run(3)
    assert [watch._judge is not None for watch in run.watches].count(True) == 1
    assert run.watches[0]._judge is None
    assert run.failures() == set()


def test_one_that_lives_but_is_awaited_is_named_by_all_others_and_then_ends_the_run(
    capsys: pytest.CaptureFixture[str],
):
    run = Simulation(3, report=5.0, stuck=20.0)
    run.groups[1].begun = lambda: "task fwd_1 (rank 1, stage 1, microbatch 3) in step 7"
    with run.groups[2].waiting("activations of microbatch 3", on=1, run=7, number=12):
        run.run(12)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 4, said  # two processes, after 5 and after 10 seconds
        assert re.match(
            r"jaxpp_flax: process 1: it lives, but all wait for it: process 2 has waited [56] s for activations of "
            r"microbatch 3 \(from process 1\)\. It last began task fwd_1 \(rank 1, stage 1, microbatch 3\) in step 7, ",
            said[0],
        ), said[0]
        assert "and was at train (train.py:7)" in said[0]
        assert run.failures() == set()
        assert run.seconds_until_all_know() <= 10
    assert run.failures() == {(1, "it lives, but a")}
