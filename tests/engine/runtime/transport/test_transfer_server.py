"""The transfer server's connection to the others; what it moves is tested by real processes (tests/processes)."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from jaxpp_flax.engine.runtime.transport.base import Parcel, TransportError
from jaxpp_flax.engine.runtime.transport.transfer_server import TransferServer


class Addresses:
    """In place of the processes: this one is process 0, and process 1 tells `other`."""

    process_index = 0

    def __init__(self, other: str) -> None:
        self.other = other

    def exchange(self, name: str, value: bytes, timeout_s: float) -> list[bytes]:
        return [value, self.other.encode()]


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_a_process_out_of_reach_is_refused_before_the_first_step(source: int, target: int):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, but nobody listens
        other = f"127.0.0.1:{nobody.getsockname()[1]}"
        group: Any = Addresses(other)
        server = TransferServer("127.0.0.1", group)
        message = rf"process 0 cannot reach process 1, .* {other}: .*refused.*in process 1: initialize\(bind_address"
        with pytest.raises(TransportError, match=message):
            server.connect([Parcel(source, target, (), ())], 5.0)
        server.close()
