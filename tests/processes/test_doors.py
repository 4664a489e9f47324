"""The doors of processes: which of those that stay closed say that a process has ended."""

from __future__ import annotations

import time

import pytest

from jaxpp_flax.processes import doors
from jaxpp_flax.processes.doors import Doors, open_door


def test_only_a_door_that_was_open_and_stays_closed_says_that_a_process_has_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "_CERTAIN_SECONDS", 0.2)
    (first, known), (second, unknown) = open_door("127.0.0.1"), open_door("127.0.0.1")
    found, heard = Doors(), time.monotonic()
    found.learn([known, ""], 5.0)
    assert not found.has_closed(known, 5.0, heard)
    first.close()
    second.close()
    found.learn([known, unknown], 5.0)  # as if a firewall refused it from the beginning
    assert not found.has_closed(known, 5.0, heard)  # the network may be reset for a second
    time.sleep(0.3)
    assert not found.has_closed(known, 5.0, time.monotonic())  # a sign of life came since
    assert not found.has_closed(unknown, 5.0, heard)
    time.sleep(0.3)
    assert found.has_closed(known, 5.0, heard)
    assert not found.has_closed(unknown, 5.0, heard)
