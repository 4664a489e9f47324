"""What hosts copy to one another, with actors that are called at once: no Ray is needed."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpp_flax.checkpoint.memory.slots import Slots
from jaxpp_flax.launch.ray import copies
from jaxpp_flax.launch.ray.copies import HostCopies
from jaxpp_flax.processes.memory_link import MemoryLink


class Hosts:
    """Three hosts. `link` connects to one of them, as its process does."""

    def __init__(self) -> None:
        self.files = [os.memfd_create(f"host {place}") for place in range(3)]
        self.slots = [Slots(file) for file in self.files]
        self.copies = [HostCopies(file) for file in self.files]
        self.links = list[MemoryLink]()
        self.written = list[tuple[int, int, int]]()  # the host, the first byte, and how many
        self.actors = [SimpleNamespace(copies=SimpleNamespace(remote=self.remote(place))) for place in range(3)]
        self.meet(1)

    def remote(self, place: int) -> Any:
        def call(method: str, *arguments: Any) -> Any:
            if method == "write":
                self.written.append((place, arguments[1], arguments[2].size))
            try:
                return getattr(self.copies[place], method)(*arguments)
            except ValueError as error:
                return error

        return call

    def meet(self, life: int) -> None:
        for place, host in enumerate(self.copies):
            host.meet(life, self.actors, place)

    def link(self, place: int) -> MemoryLink:
        ours, theirs = socket.socketpair()
        self.copies[place].serve(theirs)
        self.links.append(MemoryLink(ours.detach(), 1))
        return self.links[-1]


def get(calls: Any) -> Any:
    """As `ray.get`, of results that are there."""
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, ValueError):
            raise call
    return calls


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(copies, "_PIECE", 10_000)
    made = Hosts()
    yield made
    for link in made.links:
        link.close()
    for file in made.files:
        os.close(file)


def wait(link: MemoryLink) -> str | None:
    return link.finish(lambda: None)


def pass_on(hosts: Hosts, link: MemoryLink, number: int, serial: int) -> str | None:
    hosts.slots[2].write(number, serial, [np.arange(6_000, dtype=np.float32) + serial], b"about it")
    slot = hosts.slots[2].extent(number)
    link.pass_on(slot.begin, slot.head, slot.size)
    return wait(link)


def test_a_slot_goes_to_the_next_host_with_its_mark_last(hosts: Hosts):
    link = hosts.link(2)
    for number, serial in ((4, 6), (5, 7), (4, 8)):
        assert pass_on(hosts, link, number, serial) is None
        assert hosts.slots[0].is_intact(number)  # after the last host comes the first one
        assert hosts.slots[0].head(number) == hosts.slots[2].head(number)
    assert hosts.slots[0].about(4) == b"about it"
    assert {host for host, _, _ in hosts.written} == {0}
    begin = hosts.slots[2].extent(4).begin
    places = [(first - begin, size) for _, first, size in hosts.written[-5:]]
    assert places == [(0, 4096), (4096, 10_000), (14_096, 10_000), (24_096, 4_008), (0, 4096)]


def test_bytes_of_another_host_come_to_the_same_place(hosts: Hosts):
    pass_on(hosts, hosts.link(2), 4, 6)
    place = hosts.slots[0].extent(4)
    link = hosts.link(1)
    link.fetch(0, place.begin + place.head, place.values + place.about)
    assert wait(link) is None
    head = hosts.slots[0].head(4)
    assert hosts.slots[1].head(4) is None  # it is no slot of this host
    np.testing.assert_array_equal(hosts.slots[1].values(4, head), hosts.slots[0].values(4))
    assert hosts.slots[1].about(4, head) == b"about it"


def test_an_earlier_life_changes_nothing_any_more(hosts: Hosts):
    link = hosts.link(2)
    pass_on(hosts, link, 4, 6)
    hosts.meet(2)
    assert pass_on(hosts, link, 4, 8) == "this copy is of life 1, and life 2 has begun"
    assert hosts.slots[0].is_intact(4)
    head = hosts.slots[0].head(4)
    assert head is not None
    assert head.serial == 6
    link.fetch(0, 0, 10)
    assert wait(link) == "this copy is of life 1, and life 2 has begun"
