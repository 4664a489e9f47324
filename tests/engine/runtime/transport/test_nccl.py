"""The NCCL transport with a fake of NCCL and CUDA: what is sent where, in which order, and every dtype."""

from __future__ import annotations

import ctypes
import gc
import queue
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.program.waits import AHEAD
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, TransportError
from jaxpp_flax.engine.runtime.transport.connection import Connection, ConnectionSettings, DistributedProgram
from jaxpp_flax.engine.runtime.transport.credits import Credits
from jaxpp_flax.engine.runtime.transport.nccl import NcclTransport
from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.processes.failures import Failure
from tests.engine.stores import MemoryStore

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.bool_, jnp.int8, jnp.uint8, jnp.int32, jnp.uint32, jnp.complex64]


class FakeBuffer:
    """Host memory in place of a device's: on CPU a JAX array's pointer is a host address too."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.full(nbytes, 0xAA, np.uint8)

    @property
    def pointer(self) -> int:
        return self.memory.ctypes.data

    def as_jax(self) -> jax.Array:
        return jnp.array(self.memory)


class FakeNccl:
    """Channels by name, each a queue of groups; notes every call."""

    def __init__(self) -> None:
        self.channels: dict[bytes, queue.Queue[list[bytes]]] = {}
        self.joined: list[tuple[bytes, bool, int]] = []
        self.broken = self.busy = False

    def unique_id(self) -> bytes:
        return b"name-%d" % len({name for name, *_ in self.joined})

    def communicator(self, unique_id: bytes, *, sending: bool, device: Any) -> FakeCommunicator:
        self.joined.append((unique_id, sending, device.id))
        # Both ends ask at once, each in a thread of its own: they must get one queue.
        return FakeCommunicator(self, self.channels.setdefault(unique_id, queue.Queue()))

    def empty(self, nbytes: int, device: Any) -> FakeBuffer:
        return FakeBuffer(nbytes)


class FakeCommunicator:
    def __init__(self, nccl: FakeNccl, channel: queue.Queue[list[bytes]]) -> None:
        self.nccl, self.channel = nccl, channel
        self.waiting: list[Sequence[tuple[int, int]]] = []
        self.leaving: list[Sequence[tuple[int, int]]] = []
        self.aborted = False

    def group(self, moves: Sequence[tuple[int, int]], *, sending: bool) -> None:
        (self.leaving if sending else self.waiting).append(moves)

    def is_done(self) -> bool:
        if self.nccl.broken:
            raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")
        if self.nccl.busy:
            return False
        while self.leaving:  # as in a stream, memory is read some time after the call
            self.channel.put([ctypes.string_at(pointer, nbytes) for pointer, nbytes in self.leaving.pop(0)])
        while self.waiting and not self.channel.empty():
            for (pointer, nbytes), data in zip(self.waiting.pop(0), self.channel.get(), strict=True):
                assert nbytes == len(data)
                ctypes.memmove(pointer, data, nbytes)
        return not self.waiting

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        pass


def parcel(values: Sequence[Any], devices: Sequence[tuple[int, int]], source: int = 0, target: int = 1) -> Parcel:
    """`values` from process 0's devices to process 1's, given by index."""
    at = [(SingleDeviceSharding(jax.devices()[a]), SingleDeviceSharding(jax.devices()[b])) for a, b in devices]
    shapes = tuple(jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=b) for v, (_, b) in zip(values, at, strict=True))
    return Parcel(source, target, shapes, tuple(a for a, _ in at))


def two_ends(*parcels: Parcel) -> tuple[FakeNccl, NcclTransport, NcclTransport]:
    nccl, store = FakeNccl(), MemoryStore()
    ends = [NcclTransport(nccl, ProcessGroup(store, index, 2)) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:  # each waits for names that the other gives
        list(pool.map(lambda end: end.connect(parcels, 5.0), ends))
    return nccl, ends[0], ends[1]


def on(device: int, value: Any) -> jax.Array:
    return jax.device_put(value, jax.devices()[device])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
def test_every_dtype_arrives_bit_for_bit(dtype: Any):
    values = [on(0, (np.arange(np.prod(s, dtype=int)).reshape(s) % 3 - 1).astype(dtype)) for s in ((), (3,), (2, 5))]
    sent = parcel(values, [(0, 1)] * 3)
    _, sender, receiver = two_ends(sent)
    sender.send(values, sent, Tag("p", 0, 1))
    for got, value in zip(receiver.recv(sent, Tag("p", 0, 1)), values, strict=True):
        assert (got.dtype, got.shape) == (value.dtype, value.shape)
        assert got.devices() == {jax.devices()[1]}
        assert np.asarray(got).tobytes() == np.asarray(value).tobytes()
    sender.close()


def test_keys_travel_as_their_integers():
    data = on(0, jax.random.key_data(jax.random.split(jax.random.key(3), 2)))
    sent = parcel([data], [(0, 1)])
    _, sender, receiver = two_ends(sent)
    sender.send([data], sent, Tag("p", 0, 1))
    keys = jax.random.wrap_key_data(receiver.recv(sent, Tag("p", 0, 1))[0])
    assert (jax.random.key_data(keys) == jax.random.key_data(jax.random.split(jax.random.key(3), 2))).all()


def test_parcels_of_a_pair_arrive_in_order_even_when_the_first_is_computed_last():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, a: jnp.tanh(a @ a), x))(jnp.eye(200))
    values = [on(0, slow), on(0, jnp.float32(2)), on(0, jnp.float32(3))]
    parcels = [parcel([value], [(0, 1)]) for value in values]
    _, sender, receiver = two_ends(*parcels)
    for number, (value, sent) in enumerate(zip(values, parcels, strict=True)):
        sender.send([value], sent, Tag("p", 0, number))
    for number, (value, sent) in enumerate(zip(values, parcels, strict=True)):
        (got,) = receiver.recv(sent, Tag("p", 0, number))
        np.testing.assert_array_equal(got, np.asarray(value))


class Unfinished:
    """A value that is still being computed: on a GPU its address is known before what stands there."""

    def __init__(self, value: jax.Array) -> None:
        self.value, self.is_done = value, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def block_until_ready(self) -> None:
        self.is_done = True


def test_nothing_is_sent_before_it_is_computed():
    values: list[Any] = [Unfinished(on(0, jnp.full(4, 7.0))), Unfinished(on(0, jnp.full(2, 8.0)))]
    sent = parcel(values, [(0, 1)] * 2)
    _, sender, receiver = two_ends(sent)
    sender.send(values, sent, Tag("p", 0, 1))
    for got, wanted in zip(receiver.recv(sent, Tag("p", 0, 1)), values, strict=True):
        assert wanted.is_done
        np.testing.assert_array_equal(got, wanted.value)
    sender.close()


def test_one_communicator_for_each_ordered_pair_of_devices_opened_in_ascending_order():
    a, b = on(2, jnp.ones(2)), on(0, jnp.zeros(3))
    both = parcel([a, b, b], [(2, 3), (0, 1), (0, 1)])
    back = parcel([a], [(3, 2)], source=1, target=0)
    nccl, sender, receiver = two_ends(both, back)
    # Each end on its own: nothing orders what one of them does after the other has come to a communicator.
    assert [(sending, device) for _, sending, device in nccl.joined if device in (0, 2)] == [
        (True, 0), (True, 2), (False, 2),
    ]  # fmt: skip
    assert [(sending, device) for _, sending, device in nccl.joined if device in (1, 3)] == [
        (False, 1), (False, 3), (True, 3),
    ]  # fmt: skip
    sender.send([a, b, b], both, Tag("p", 0, 1))
    got = receiver.recv(both, Tag("p", 0, 1))
    for have, want in zip(got, [a, b, b], strict=True):
        np.testing.assert_array_equal(have, want)


def test_a_value_is_kept_alive_until_it_is_sent():
    sent = parcel([jnp.ones(4)], [(0, 1)])
    nccl, sender, receiver = two_ends(sent)
    nccl.busy = True
    value = on(0, jnp.full(4, 7.0))
    held = weakref.ref(value)
    sender.send([value], sent, Tag("p", 0, 1))
    del value
    (communicator,) = [pair.communicator for pair in sender._pairs.values()]
    while not communicator.leaving:
        time.sleep(0.001)
    is_held = held() is not None
    nccl.busy = False  # else the sender's thread would never end
    assert is_held, "its memory may be used for something else while NCCL reads it"
    np.testing.assert_array_equal(receiver.recv(sent, Tag("p", 0, 1))[0], np.full(4, 7.0))
    sender.close()
    gc.collect()
    assert held() is None


def test_a_sender_stays_near_a_receiver_that_sends_nothing_back():
    """The instruction loop gives both ends credits, which NCCL moves like any parcel."""
    value = on(0, jnp.full(4, 7.0))
    sent = parcel([value], [(0, 1)])
    credits, backs = (Credits.of([(n, [sent]) for n in range(20)], process) for process in (0, 1))
    _, *ends = two_ends(sent, *backs.parcels)
    programs = [DistributedProgram(Connection(end._group, end, ConnectionSettings()), "program 1", "p") for end in ends]
    sender, receiver = programs
    offered: list[int] = []

    def send() -> None:
        for n in range(20):
            credits.wait(n, sender, 0)
            offered.append(n)
            sender.connection.transport.send([value], sent, sender.tag(n, 0, ""))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        for n in range(20):
            time.sleep(0.02)  # a sender without a limit is done by then
            assert len(offered) - n <= AHEAD
            (got,) = receiver.connection.recv(sent, receiver.tag(n, 0, ""))
            backs.sign(n, receiver, 0)
            np.testing.assert_array_equal(got, np.asarray(value))
        sending.result(timeout=60.0)
    assert offered == [*range(20)]
    for program in programs:
        program.connection.watchdog.stop()
        program.connection.transport.close()


def test_a_failed_peer_ends_a_receive_and_the_error_names_what_was_awaited():
    sent = parcel([jnp.ones(4)], [(0, 1)])
    nccl = FakeNccl()
    group = ProcessGroup(MemoryStore(), 1, 2)
    group.values.publish("nccl/0-1", b"name")
    receiver = NcclTransport(nccl, group)
    receiver.connect([sent], 1.0)
    group.observe(Failure(0, "it was killed"))
    with pytest.raises(TransportError, match=r"(?s)task fwd_1 needs of rank 0.*step 4.*process 0: it was killed"):
        receiver.recv(sent, Tag("p", 4, 1, what="rank 1: what task fwd_1 needs of rank 0"))


def test_an_error_of_nccl_is_told():
    sent = parcel([jnp.ones(4)], [(0, 1)])
    nccl, _, receiver = two_ends(sent)
    nccl.broken = True
    with pytest.raises(TransportError, match=r"NCCL_ERROR_SYSTEM_ERROR\. Look .*NCCL_DEBUG=INFO.*TRANSPORT=device_put"):
        receiver.recv(sent, Tag("p", 0, 1))


def test_half_bytes_are_refused():
    value = on(0, jnp.ones(4, jnp.int4))
    sent = parcel([value], [(0, 1)])
    _, sender, _ = two_ends(sent)
    with pytest.raises(TypeError, match=r"whole bytes.*int4\[4\]"):
        sender.send([value], sent, Tag("p", 0, 1))


def test_cupy_is_named_where_it_is_missing():
    with pytest.raises(ImportError, match=r"jaxpp-flax\[cuda12\]"):
        NcclTransport(group=ProcessGroup(None, 0, 1))
