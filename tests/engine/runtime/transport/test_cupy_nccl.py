"""The NCCL transport over CuPy, with fakes in the signatures of two of its releases."""

from __future__ import annotations

import importlib
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax import doctor
from jaxpp_flax.engine.runtime.transport.base import Parcel, Tag, TransportError
from jaxpp_flax.engine.runtime.transport.cupy_nccl import Cupy
from jaxpp_flax.engine.runtime.transport.nccl import NcclTransport
from jaxpp_flax.processes import ProcessFailedError, ProcessGroup
from jaxpp_flax.processes.failures import Failure
from tests.engine.runtime.transport.fake_cupy import SIGNATURES, FakeCupy
from tests.engine.runtime.transport.test_nccl import on, parcel
from tests.engine.stores import MemoryStore

TAG = Tag("p", 3, 1, what="rank 1: what task fwd_1 needs of rank 0")


def two_ends(cupy: FakeCupy, sent: Parcel, monkeypatch: pytest.MonkeyPatch) -> list[NcclTransport]:
    cupy.install(monkeypatch)
    store = MemoryStore()
    ends = [NcclTransport(group=ProcessGroup(store, index, 2)) for index in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda end: end.connect([sent], 5.0), ends))
    return ends


@pytest.fixture
def sent() -> Parcel:
    return parcel([jnp.ones(4)], [(0, 1)])


@pytest.mark.parametrize(("release", "signed"), [(13, True), (13, False), (14, True)], ids=["13", "13-arm", "14"])
def test_arrays_arrive_with_every_release(release: int, signed: bool, sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    cupy = FakeCupy(release, signed)
    sender, receiver = two_ends(cupy, sent, monkeypatch)
    value = on(0, jnp.arange(4.0))
    sender.send([value], sent, TAG)
    (got,) = receiver.recv(sent, TAG)
    np.testing.assert_array_equal(got, np.asarray(value))
    assert got.devices() == {jax.devices()[1]}
    assert sorted(cupy.calls) == ["end", "end", "start", "start"]
    for end in (sender, receiver):
        end.close()
    assert [made.freed for made in cupy.made] == ["destroyed", "destroyed"]


def test_two_releases_of_cupy_in_one_run_are_named(sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    FakeCupy(13).install(monkeypatch)
    ProcessGroup(store, 0, 2).values.publish("nccl/0-1", Cupy().unique_id())
    FakeCupy(14).install(monkeypatch)
    receiver = NcclTransport(group=ProcessGroup(store, 1, 2))
    with pytest.raises(TransportError, match=r"CuPy 14\.0\.0 cannot read.*got tuple.*same version of CuPy in all"):
        receiver.connect([sent], 5.0)


def test_a_missing_nccl_is_told_at_once(monkeypatch: pytest.MonkeyPatch):
    FakeCupy(14, available=False).install(monkeypatch)
    with pytest.raises(ImportError, match=r"CuPy 14\.0\.0 cannot load\. Reason: .*pip install nvidia-nccl-cu12"):
        NcclTransport(group=ProcessGroup(None, 0, 1))


def test_a_peer_that_never_joins_is_named(sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    FakeCupy(14, alone=True).install(monkeypatch)
    sender = NcclTransport(group=ProcessGroup(MemoryStore(), 0, 2))
    with pytest.raises(TransportError, match=r"process 1 did not join NCCL communicator 0-1 .*within 0\.2 s.*doctor"):
        sender.connect([sent], 0.2)


def test_a_peer_that_fails_before_it_joins_ends_the_wait(sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    FakeCupy(14, alone=True).install(monkeypatch)
    group = ProcessGroup(MemoryStore(), 0, 2)
    threading.Timer(0.1, lambda: group.observe(Failure(1, "it was killed"))).start()
    with pytest.raises(ProcessFailedError, match=r"(?s)process 1: it was killed.*other end of NCCL communicator 0-1"):
        NcclTransport(group=group).connect([sent], 60.0)


@pytest.mark.parametrize(
    ("code", "text"), [(2, "NCCL_ERROR_SYSTEM_ERROR"), (9, "error 9, which this version of CuPy has no name for")]
)
def test_a_communicator_that_cannot_be_made_is_told(
    code: int, text: str, sent: Parcel, monkeypatch: pytest.MonkeyPatch
):
    FakeCupy(14, refused=code).install(monkeypatch)
    sender = NcclTransport(group=ProcessGroup(MemoryStore(), 0, 2))
    with pytest.raises(TransportError, match=rf"could not open NCCL communicator 0-1.*processes 0 and 1: .*{text}"):
        sender.connect([sent], 5.0)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ({"async_error": 6}, "NCCL_ERROR_REMOTE_ERROR"),
        ({"async_error": 9}, "error 9, which this version of CuPy has no name for"),
        ({"stream_status": 700}, "cudaErrorIllegalAddress"),
    ],
)
def test_errors_are_told_of_nccl_and_of_cuda(
    broken: dict[str, int], text: str, sent: Parcel, monkeypatch: pytest.MonkeyPatch
):
    cupy = FakeCupy(14)
    _, receiver = two_ends(cupy, sent, monkeypatch)
    for name, code in broken.items():
        setattr(cupy, name, code)
    with pytest.raises(TransportError, match=rf"task fwd_1 needs of rank 0, in step 3, .*{text}"):
        receiver.recv(sent, TAG)


def test_what_is_in_progress_is_no_error(sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    cupy = FakeCupy(14)
    sender, receiver = two_ends(cupy, sent, monkeypatch)
    sender.send([on(0, jnp.ones(4))], sent, TAG)
    cupy.async_error = 7  # ncclInProgress, which CuPy has no name for
    threading.Timer(0.1, lambda: setattr(cupy, "async_error", 0)).start()
    (got,) = receiver.recv(sent, TAG)
    np.testing.assert_array_equal(got, np.ones(4))


def test_a_last_send_that_fails_ends_the_run(sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxpp_flax.engine.runtime.transport.nccl._REPORT_SECONDS", 0.01)
    cupy = FakeCupy(14)
    sender, _ = two_ends(cupy, sent, monkeypatch)
    cupy.async_error = 6
    sender.send([on(0, jnp.ones(4))], sent, TAG)
    group = sender._group
    assert group.failed.wait(5.0)
    assert group.failure is not None
    assert group.failure.process == 0
    assert re.search("could not move .*from process 0 to process 1: NCCL_ERROR_REMOTE_ERROR", group.failure.message)
    sender.close()


def test_an_abort_waits_until_nobody_is_inside(sent: Parcel, monkeypatch: pytest.MonkeyPatch):
    cupy = FakeCupy(14)
    _, receiver = two_ends(cupy, sent, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receiver.recv, sent, TAG)
        time.sleep(0.05)  # it polls, and the fake is inside for all of a poll
        receiver._group.observe(Failure(0, "it was killed"))
        receiver.abandon(0)
        # An AssertionError of the fake is what a race gives.
        with pytest.raises(TransportError, match="process 0: it was killed"):
            received.result()
    receiver.abandon(0)
    receiver.close()
    assert cupy.made[0].freed == "" or cupy.made[1].freed == ""  # the other end's is its own
    assert "aborted" in {made.freed for made in cupy.made}


def test_the_transport_is_closed_behind_the_meeting_at_the_end():
    """Until then others may still receive what this process has sent."""
    from jaxpp_flax.engine.runtime.transport import connection

    closed: list[str] = []

    class Closing:
        name = "nccl"

        def close(self) -> None:
            closed.append("transport")

    group: Any = ProcessGroup(None, 0, 1)
    closing = connection.Connection(group, Closing(), connection.ConnectionSettings())  # type: ignore[arg-type]
    connection._end(closing, end_watch=False)
    assert closed == []
    group.close()
    assert closed == ["transport"]


@pytest.mark.parametrize(
    ("cupy", "has_gpu", "found", "wrong"),
    [
        (FakeCupy(14), True, r"CuPy 14\..* with NCCL \d+\.\d+\.\d+", False),
        (FakeCupy(14, version=23007), True, "which is reported to hang", True),
        (FakeCupy(14, available=False), True, "does not load: .*Reason", True),
        (FakeCupy(14, available=False), False, "does not load: .*Reason", False),
    ],
)
def test_the_doctor_looks_at_nccl(
    cupy: FakeCupy, has_gpu: bool, found: str, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cupy.install(monkeypatch)
    monkeypatch.setattr(doctor, "_NVIDIA_GPU", tmp_path if has_gpu else tmp_path / "none")
    [finding] = doctor.known_faults({})
    assert re.search(found, finding.text), finding.text
    assert bool(finding.remedy) == wrong


def test_the_fake_has_the_signatures_of_the_installed_cupy():
    cupy = pytest.importorskip("cupy")
    nccl: Any = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("CuPy finds no NCCL here")
    release = int(cupy.__version__.partition(".")[0])
    for path, line in SIGNATURES[release].items():
        member = nccl
        for name in path.split("."):
            member = getattr(member, name)
        assert member.__doc__.splitlines()[0] == line
    name = nccl.get_unique_id()
    assert (type(name), len(name)) == (bytes if release >= 14 else tuple, 128)
    with pytest.raises(KeyError):
        nccl.NcclError(9)
    assert isinstance(cupy.cuda.runtime.streamQuery(0), int)
