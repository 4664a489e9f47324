"""Slots in memory, written by hand: what counts as a copy, and what does not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.checkpoint.memory.copies import HeldSlot, StateCopy, newest_copy, own_parts
from jaxpp_flax.checkpoint.memory.slots import Slots
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.placing import place_on_ranks

OWNER = {"run": "this", "directory": "here"}


@pytest.fixture
def slots() -> Iterator[Slots]:
    file = os.memfd_create("slots")
    yield Slots(file)
    os.close(file)


def write(slots: Slots, process: int, serial: int, leaves: dict[str, Any], processes: int = 1, **owner: Any) -> None:
    parts, about = own_parts(leaves)
    about = {**OWNER, **about, "step": serial, "processes": processes, **owner}
    slots.write(2 * process + serial % 2, serial, parts, json.dumps(about).encode())


def found(slots: Slots) -> StateCopy | None:
    return newest_copy(slots, held(slots), OWNER)


def held(slots: Slots, host: int | None = None) -> list[HeldSlot]:
    return [HeldSlot(number, head, host) for number, head in slots.heads().items() if slots.is_intact(number)]


def serial(slots: Slots) -> int | None:
    return None if (copy := found(slots)) is None else copy.serial


def test_the_newest_copy_is_found_and_a_slot_is_used_again(slots: Slots):
    assert serial(slots) is None
    for number in (1, 2, 3):
        write(slots, 0, number, {"w": jnp.full(5, number, jnp.bfloat16)})
        copy = found(slots)
        assert copy is not None
        assert copy.serial == copy.step == number
        placed = copy.place("w", jax.ShapeDtypeStruct((5,), jnp.bfloat16))
        assert placed.dtype == jnp.bfloat16
        assert placed.tolist() == [number] * 5


def test_a_slot_without_its_mark_counts_as_nothing(slots: Slots):
    write(slots, 0, 1, {"w": jnp.ones(5)})
    write(slots, 0, 2, {"w": jnp.ones(5)})
    slots.reserve(0, 1)[:8] = 0  # as in a process that is killed while it writes
    assert serial(slots) == 1


@pytest.mark.parametrize("where", ["value", "description"])
def test_a_changed_bit_is_found(slots: Slots, where: str):
    write(slots, 0, 1, {"w": jnp.ones(500)})
    write(slots, 0, 2, {"w": jnp.ones(500)})
    slots.reserve(0, 1)[4096 + (900 if where == "value" else 2048 + 9)] ^= 1
    assert serial(slots) == 1


def test_a_copy_that_one_process_has_not_written_counts_as_nothing(slots: Slots):
    for process in range(2):  # a part that no leaf lacks: a process that has none knows where its data stands
        write(slots, process, 1, {"w": jnp.ones(3)} if process == 0 else {}, processes=2)
    assert serial(slots) == 1
    write(slots, 0, 2, {"w": jnp.ones(3)}, processes=2)
    assert serial(slots) == 1
    write(slots, 1, 2, {}, processes=2)
    assert serial(slots) == 2


@pytest.mark.parametrize("owner", [{"run": "other"}, {"directory": "elsewhere"}])
def test_a_slot_of_another_run_is_never_taken(slots: Slots, owner: dict[str, str]):
    write(slots, 0, 1, {"w": jnp.ones(3)})
    write(slots, 0, 2, {"w": jnp.ones(3)}, 1, **owner)
    assert serial(slots) == 1


def test_a_leaf_of_one_layout_is_read_into_another_one(slots: Slots):
    devices = np.array(jax.devices()[:4])
    mesh = MpmdMesh(Mesh(devices.reshape(2, 2), ("stage", "data")), "stage")
    value = np.arange(64, dtype=np.float32).reshape(4, 16)
    leaves = {
        "on one rank": place_on_ranks(value, MpmdSharding(mesh, {1}, PartitionSpec("data"))),
        "on both ranks": place_on_ranks(value, MpmdSharding(mesh, {0, 1}, PartitionSpec())),
        "keys": place_on_ranks(jax.random.split(jax.random.key(3), 4), MpmdSharding(mesh, {0}, PartitionSpec())),
        "empty": jnp.zeros((0, 3)),
        "number": jnp.int32(7),
    }
    write(slots, 0, 1, leaves)
    copy = found(slots)
    assert copy is not None
    assert copy.fits(leaves)
    assert not copy.fits({**leaves, "more": jnp.ones(2)})
    assert not copy.fits({**leaves, "number": jnp.float32(7)})
    # A replica is held once.
    held = sum(head.size for head in slots.heads().values())
    assert held == 2 * value.nbytes + 64 + 64
    other = NamedSharding(Mesh(devices.reshape(4, 1), ("x", "y")), PartitionSpec(None, "x"))
    for path in ("on one rank", "on both ranks"):
        placed = copy.place(path, jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=other))
        assert placed.sharding == other
        np.testing.assert_array_equal(placed, value)
    onto = MpmdSharding(mesh, {0, 1}, PartitionSpec())
    again = copy.place("keys", jax.ShapeDtypeStruct((4,), leaves["keys"].dtype, sharding=onto))
    assert again.mpmd_idxs == (0, 1)
    np.testing.assert_array_equal(
        jax.random.key_data(again.first_mpmd_replica), jax.random.key_data(leaves["keys"].first_mpmd_replica)
    )
    for path in ("empty", "number"):
        np.testing.assert_array_equal(copy.place(path, leaves[path]), leaves[path])


def test_what_is_read_does_not_change_with_the_slot(slots: Slots):
    write(slots, 0, 1, {"w": jnp.arange(4096.0)})
    copy = found(slots)
    assert copy is not None
    placed = copy.place("w", jax.ShapeDtypeStruct((4096,), jnp.float32))
    write(slots, 0, 3, {"w": jnp.zeros(4096)})
    np.testing.assert_array_equal(placed, np.arange(4096.0))


def test_a_process_brings_from_other_hosts_what_it_reads_and_no_more(slots: Slots):
    theirs, fetched = os.memfd_create("their slots"), list[tuple[int, int]]()
    other = Slots(theirs)
    for number in (1, 2):
        write(slots, 0, number, {"mine": jnp.full(5, number)}, processes=2)
        write(other, 1, number, {"a": jnp.full(3, number), "b": jnp.full(4000, number)}, processes=2)
    write(Slots(slots._file), 1, 0, {"old": jnp.ones(2000)})  # of an earlier life, where one is brought

    def fetch(host: int, begin: int, size: int) -> None:
        assert host == 7
        fetched.append((begin, size))
        os.pwrite(slots._file, os.pread(theirs, size, begin), begin)

    held_here = [slot for slot in held(slots) if slot.head.serial]
    copy = newest_copy(slots, [*held_here, *held(other, host=7)], OWNER, fetch)
    assert copy is not None
    assert copy.step == 2
    assert {number: head.serial for number, head in slots.heads().items()} == {0: 2, 1: 1}  # what is brought in parts
    del fetched[:]
    for path, size in (("mine", 5), ("b", 4000), ("b", 4000)):
        assert copy.place(path, jax.ShapeDtypeStruct((size,), jnp.int32)).tolist() == [2] * size
    ((begin, size),) = fetched  # once, and "a" not at all
    assert size == 16000
    slots.keep({0, 1})
    assert os.pread(slots._file, size, begin) == bytes(size)
    assert serial(slots) is None
    os.close(theirs)
