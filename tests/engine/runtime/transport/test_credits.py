"""A sender whose peer sends nothing back stays within a bound of it."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.runtime.transport.base import Parcel
from jaxpp_flax.engine.runtime.transport.credits import AHEAD, Credits
from tests.processes.running import run_processes


def parcel(source: int, target: int) -> Parcel:
    devices = [SingleDeviceSharding(device) for device in jax.devices()[:3]]
    shape = jax.ShapeDtypeStruct((2,), "float32", sharding=devices[target])
    return Parcel(source, target, (shape,), (devices[source],))


@pytest.mark.parametrize("count", [AHEAD - 1, AHEAD, AHEAD + 1, 40])
def test_both_ends_know_the_same_confirmations(count: int):
    """Nothing is sent that nobody asks for, and the other way round."""
    transfers = [(10 + n, [parcel(0, 1)]) for n in range(count)]
    sender, receiver = (Credits.of(transfers, process) for process in (0, 1))
    assert not sender.sends
    assert not receiver.waits
    waited = [(c.number, c.parcel) for listed in sender.waits.values() for c in listed]
    assert waited == [(c.number, c.parcel) for listed in receiver.sends.values() for c in listed]
    assert bool(waited) == (count > AHEAD)
    for number, listed in sender.waits.items():
        (confirmation,) = listed
        assert AHEAD // 2 <= number - confirmation.number <= AHEAD
        assert (confirmation.parcel.source, confirmation.parcel.target) == (1, 0)


def test_who_sends_back_needs_none():
    transfers = [(n, [parcel(0, 1) if n % 2 else parcel(1, 0), parcel(0, 2)]) for n in range(40)]
    assert {c.parcel.source for listed in Credits.of(transfers, 0).waits.values() for c in listed} == {2}
    # A result that goes back at the end ties nothing before it.
    one_way = [(n, [parcel(0, 1)]) for n in range(40)]
    assert len(Credits.of([*one_way, (40, [parcel(1, 0)])], 0).waits) == len(Credits.of(one_way, 0).waits) == 18


@pytest.mark.processes
def test_a_loop_of_forwards_does_not_run_ahead(tmp_path):
    first, second = run_processes(2, "run_forwards.py", str(tmp_path))
    assert second.strip().endswith("good")
    line, end = first.strip().splitlines()[-2:]
    assert end == "good"
    assert int(line.removeprefix("at most ")) <= AHEAD
