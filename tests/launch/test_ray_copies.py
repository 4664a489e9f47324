"""What hosts copy to one another, with actors that are called at once: no Ray is needed."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxpp_flax.checkpoint.memory.slots import Slots
from jaxpp_flax.launch.ray import copies
from jaxpp_flax.launch.ray.copies import HostCopies
from jaxpp_flax.processes.memory_link import MemoryLink
from tests.running import wait_for


class Hosts:
    """Three hosts. `link` connects to one of them, as its process does."""

    def __init__(self) -> None:
        self.files = [os.memfd_create(f"host {place}") for place in range(3)]
        self.slots = [Slots(file) for file in self.files]
        self.copies = [HostCopies(file, "127.0.0.1") for file in self.files]
        self.links = list[MemoryLink]()
        self.written = list[tuple[int, int, int]]()  # the host, the first byte, and how many
        self.actors = list[Any]()
        for place, host in enumerate(self.copies):
            self.actors.append(SimpleNamespace(copies=SimpleNamespace(remote=partial(call, host))))
            host.write = self.recorded(place, host.write)  # type: ignore[method-assign]
        self.meet(1)

    def recorded(self, place: int, write: Callable[..., None]) -> Callable[..., None]:
        def record(life: int, begin: int, data: Any) -> None:
            write(life, begin, data)
            self.written.append((place, begin, len(data)))

        return record

    def meet(self, life: int) -> None:
        for place, host in enumerate(self.copies):
            host.meet(life, self.actors, place)

    def link(self, place: int) -> MemoryLink:
        ours, theirs = socket.socketpair()
        self.copies[place].serve(theirs)
        self.links.append(MemoryLink(ours.detach(), 1))
        return self.links[-1]


def call(host: HostCopies, method: str, *arguments: Any) -> Any:
    return getattr(host, method)(*arguments)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda result: result))
    monkeypatch.setattr(copies, "_PIECE", 10_000)
    made = Hosts()
    yield made
    for link in made.links:
        link.close()
    for host in made.copies:
        host.close()
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


def closes(connection: socket.socket) -> bool:
    with suppress(ConnectionResetError):  # more was on its way
        return connection.recv(100) == b""
    return True


def failure_at_host_0(hosts: Hosts, why: str) -> str:
    address, port, _ = hosts.copies[0].endpoint()
    return f"the host at {address}, port {port}: {why}"


def test_of_an_earlier_life_nothing_is_taken_or_waited_for(hosts: Hosts):
    address, port, secret = hosts.copies[0].endpoint()
    with socket.create_connection((address, port), 10.0) as under_way:
        under_way.sendall(f'{secret}\n1\n["write", 0, 4]\n'.encode())
        link = hosts.link(2)
        assert pass_on(hosts, link, 4, 6) is None
        hosts.copies[0].meet(2, hosts.actors, 0)  # the others, so far, know of no other life
        assert closes(under_way)
    assert "port" in str(pass_on(hosts, link, 4, 8))
    head = hosts.slots[0].head(4)
    assert head is not None
    assert head.serial == 6
    assert (0, 0, 4) not in hosts.written


def test_what_fails_at_the_next_host_is_told(hosts: Hosts):
    write, full = hosts.copies[0].write, [True]

    def fail_once(life: int, begin: int, data: Any) -> None:
        if full and begin != hosts.slots[2].extent(4).begin and full.pop():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(life, begin, data)

    hosts.copies[0].write = fail_once  # type: ignore[method-assign]
    link = hosts.link(2)
    assert pass_on(hosts, link, 4, 6) == failure_at_host_0(hosts, "[Errno 28] No space left on device")
    assert hosts.slots[0].head(4) is None
    assert pass_on(hosts, link, 4, 8) is None
    assert hosts.slots[0].is_intact(4)


def test_a_write_that_the_system_leaves_unfinished_goes_on(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    whole = os.pwrite
    monkeypatch.setattr(copies.os, "pwrite", lambda file, data, begin: whole(file, data[: len(data) // 2 + 1], begin))
    assert pass_on(hosts, hosts.link(2), 4, 6) is None
    assert hosts.slots[0].is_intact(4)


def test_a_slot_has_no_mark_if_the_connection_ends_meanwhile(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    link = hosts.link(2)
    assert pass_on(hosts, link, 4, 6) is None
    send = copies._send_file

    def send_less(link: socket.socket, file: int, begin: int, size: int) -> None:
        send(link, file, begin, size // 2)
        link.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(copies, "_send_file", send_less)
    assert pass_on(hosts, link, 4, 8) == failure_at_host_0(hosts, "[Errno 32] Broken pipe")
    wait_for(lambda: hosts.slots[0].head(4) is None, "the slot without its mark", 10.0)
    link.fetch(0, 4096, 10_000)
    assert wait(link) == failure_at_host_0(hosts, "the other host has closed the connection")


def test_whoever_does_not_know_the_secret_is_refused(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copies, "_SECONDS_TO_CONNECT", 0.2)
    address, port, secret = hosts.copies[0].endpoint()
    for said in (b"0" * len(secret) + b"\n", b"{}\n", secret.encode()[:-1] + b"\n", b""):
        with socket.create_connection((address, port), 10.0) as stranger:
            stranger.sendall(said + b'1\n["write", 0, 3]\nabc["finish"]\n' if said else b"")
            assert closes(stranger)
    assert hosts.written == []


def test_a_host_goes_on_listening_until_it_is_closed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch):
    listener, failures = hosts.copies[0]._listener, [OSError(errno.EMFILE, "Too many open files")]
    accept = type(listener).accept

    def fail_once(self: socket.socket) -> Any:
        if self is listener and failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(type(listener), "accept", fail_once)
    for serial in (6, 7):  # the accept that is under way already is none that fails
        assert pass_on(hosts, hosts.link(2), 4, serial) is None
    assert failures == []
    hosts.copies[0].close()
    why = failure_at_host_0(hosts, "[Errno 111] Connection refused")
    assert pass_on(hosts, hosts.link(2), 4, 8) == why


def test_a_process_that_ends_before_its_answer_ends_its_service(hosts: Hosts):
    ours, theirs = socket.socketpair()
    hosts.copies[2].serve(theirs)
    ours.sendall(b'["fetch", 0, 0, 1]\n' * 2)
    ours.recv(4)
    ours.close()
    wait_for(lambda: theirs.fileno() < 0, "the end of the service", 10.0)
