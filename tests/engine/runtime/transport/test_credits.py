"""A sender whose peer sends nothing back stays within a bound of it."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.program.waits import AHEAD
from jaxpp_flax.engine.runtime.transport.base import Parcel
from jaxpp_flax.engine.runtime.transport.credits import Credits
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
    assert not sender.signs
    assert not receiver.waits
    waited = [(c.number, c.parcel) for listed in sender.waits.values() for c in listed]
    assert waited == [(c.number, c.parcel) for listed in receiver.signs.values() for c in listed]
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


def test_in_a_global_order_every_process_walks_every_confirmation():
    transfers = [(n, [parcel(0, 1), parcel(1, 2)]) for n in range(12)]
    everyone = [Credits.of(transfers, process, in_global_order=True) for process in (0, 1, 2)]
    assert everyone[0].signs
    assert everyone[0].signs == everyone[1].signs == everyone[2].signs
    assert [len(found.parcels) for found in everyone] == [8, 12, 4]  # process 0 both receives and awaits its four
    assert not everyone[2].waits


@pytest.mark.processes
@pytest.mark.parametrize(("count", "transport"), [(2, "transfer"), (3, "device_put")])
def test_a_loop_of_forwards_does_not_run_ahead(tmp_path: Path, count: int, transport: str):
    environment = {"JAXPP_FLAX_TRANSPORT": transport}
    first, *others = run_processes(count, "run_forwards.py", str(tmp_path), environment=environment)
    assert all(other.strip().endswith("good") for other in others)
    line, end = first.strip().splitlines()[-2:]
    assert end == "good"
    assert int(line.removeprefix("at most ")) <= AHEAD
