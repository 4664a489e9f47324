"""Copies of the state in its host's memory, from which the next life of a run goes on.

Of several hosts, each also holds the copies of the host before it, so that the loss of a host loses nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import astuple
from typing import Any

import jax

from jaxpp_flax.checkpoint import CheckpointSaveError
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.memory.copies import HeldSlot, newest_copy, own_parts
from jaxpp_flax.checkpoint.memory.slots import SlotHead, Slots, free_bytes, rounded
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.messages import amount
from jaxpp_flax.processes.comparison import exchange_values, find_everywhere
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.trainers.checkpoints import Checkpointing, Resume
from jaxpp_flax.trainers.data.position import DataPosition, own_position
from jaxpp_flax.trainers.state.sources import MemoryCopy

__all__ = ["StateInMemory"]

# For a description that gets longer during the run, such as by the state of the data's iterator.
_ROOM = 1 << 16
_NO_EFFECT = (
    "Checkpoints(memory_every={}) has no effect here: it is for a run on Linux whose launcher starts it again after a "
    "failure, `python -m jaxpp_flax.launch -n 4 --max-restarts 3 ...`, or with --ray over hosts"
)
_ALONE = "the copies of the state in memory are on this host alone: there is no other one to hold them"
# A failed copy mostly has a lost host as its cause, of which this process hears.
_SECONDS_FOR_NEWS = 30.0


class StateInMemory:
    """Copies the state after steps, and finds the copy of an earlier life. One object for each loop.

    All processes make it at the same point of the loop, before any of them copies a state.

    Args:
      checkpoints: the trainer's own, with a directory.
      every: steps between two copies.
      file: descriptor of the file that outlives this process.
    """

    def __init__(self, checkpoints: Checkpointing, every: int, file: int) -> None:
        self._checkpoints, self._every, self._slots, self._group = checkpoints, every, Slots(file), process_group()
        self._link = self._group.memory_link
        index, count = self._group.process_index, self._group.process_count
        self._on_host = count if self._link is None else self._link.processes
        (self._host, self._place), self._hosts = divmod(index, self._on_host), count // self._on_host
        if self._link is not None:
            self._await_all_hosts()  # the last copy of an earlier `fit` may be under way
            if self._hosts == 1:
                checkpoints.display.message(_ALONE)
        store = checkpoints.need_store("Checkpoints(memory_every=)")
        self._owner = {"run": self._group.run_id, "directory": str(store.directory)}
        marked = sorted(self._slots.heads().items())
        # Each process looks at its share of what its host has.
        own = marked[self._place :: self._on_host]
        seen = [[*astuple(head), number, self._slots.is_intact(number)] for number, head in own]
        slots, self._damaged, last = list[HeldSlot](), list[int](), 0
        for process, share in enumerate(exchange_values(self._group, "the whole copies in memory", seen)):
            host = process // self._on_host
            for *fields, number, is_intact in share:
                head = SlotHead(*fields)
                last = max(last, head.serial)
                if is_intact:
                    slots.append(HeldSlot(number, head, None if host == self._host else host))
                else:
                    self._damaged.append(number)
        self._had_copies = bool(last)
        self._found = newest_copy(self._slots, slots, self._owner, self._fetch)
        # The next copy must not overwrite the newest one. Another process may have written one more when it was killed.
        self._serial = last
        if self._found is not None and (self._serial - self._found.serial) % 2:
            self._serial += 1
        self._has_copied = False
        self.has_resumed = False  # whether `resume` has gone on from a copy
        self.latest_on_disk = 0  # the step of the newest checkpoint then

    @classmethod
    def of(cls, checkpoints: Checkpointing, every: int | None) -> StateInMemory | None:
        """Return None if no copies are wanted, or none would ever be read, which the user is told."""
        if every is None:
            return None
        if (file := process_group().memory_file) is None:
            checkpoints.display.message(_NO_EFFECT.format(every))
            return None
        return cls(checkpoints, every, file)

    # ------------------------------------------------------------------ a later life

    @without_ambient_mesh
    def resume(self, how: Resume) -> DataPosition | None:
        """As `Checkpointing.resume`, from the copy of an earlier life if it is at least as new as any checkpoint."""
        checkpoints, found = self._checkpoints, self._found
        tell = checkpoints.display.message
        if self._group.attempt == 1 or checkpoints.held.step:
            if self._group.attempt > 1 and found is not None:
                at = checkpoints.held.step
                tell(f"the copy of step {found.step} in memory is not used: the trainer is at step {at} already")
            return checkpoints.resume(how)
        for process in sorted({number // 2 for number in self._damaged}):
            tell(f"a copy of the state in memory, by process {process}, is damaged, and not used")
        if found is None and self._had_copies:
            tell("the copies in memory are not used: of no step are those of all processes left")
        target = flatten(checkpoints.held.target())[0]
        if found is not None and not found.fits(target):
            tell(f"the copy of step {found.step} in memory has other leaves than this trainer, and is not used")
            found = None
        if found is not None and not checkpoints.saves_nonfinite:  # as no checkpoint of such a step is written
            bad = found.nonfinite(self._place, self._on_host)
            bad = next(filter(None, exchange_values(self._group, "whether the copy in memory is finite", bad)), None)
            if bad is not None:
                tell(f"the copy of step {found.step} in memory is not used: {bad} holds a value that is not finite")
                found = None
        store = checkpoints.need_store("fit(resume=True)")
        latest = exchange_values(self._group, "the latest step", store.latest())[0]
        if found is None or found.step < (latest or 0):
            return checkpoints.resume(how)
        checkpoints.held.meet("trainer.restore")
        with checkpoints.clock.part("restore"):
            checkpoints.held.take(MemoryCopy(found, target))
        first, positions = found.abouts[0], [about["data"] for about in found.abouts]
        alike = all(position == positions[0] for position in positions)
        position = own_position(positions[0] if alike else {"processes": positions})
        checkpoints.take_position(found.step, position)
        checkpoints.callbacks.restored(first["callbacks"])
        checkpoints.measured.add(found.step, first["metrics"] or {})
        self.has_resumed, self.latest_on_disk = True, latest or 0
        if self._group.on_memory is not None:
            self._group.on_memory()
        on_disk = "there is no checkpoint" if latest is None else f"the latest checkpoint is of step {latest}"
        tell(f"resumed from the copy of step {found.step} in memory; {on_disk}")
        return checkpoints.restored_position()

    # ------------------------------------------------------------------ copies

    def reserve(self) -> None:
        """Take the memory of two copies, before the first step.

        Raises:
          CheckpointSaveError: if the host has not as much; the message says how much it needs and has.
        """
        parts, about = self._content()
        size = sum(map(rounded, parts)) + len(about) + _ROOM
        sizes = exchange_values(self._group, "the size of a copy in memory", size)
        needed = 2 * sum(sizes[process] for process in self._held_here())
        of = "the state" if self._hosts == 1 else "its own state and of the previous host's"
        what = f"Checkpoints(memory_every={self._every}) keeps two copies of {of} in this host's memory"
        remedy = "Give the host, or the limit of its memory, more; train on more hosts; or leave memory_every= out."

        def take() -> None:
            missing = needed - self._slots.reserved()
            if self._place == 0 and missing > (free := free_bytes()):
                raise CheckpointSaveError(f"{what}: {amount(needed, 'B')}, and {amount(free, 'B')} are free. {remedy}")

        find_everywhere(self._group, "the memory for copies of the state", take, CheckpointSaveError)

        def allocate() -> None:
            try:
                for process in self._held_here()[self._place :: self._on_host]:
                    for turn in range(2):
                        self._slots.reserve(2 * process + turn, sizes[process])
            except OSError as error:
                raise CheckpointSaveError(f"{what}: {amount(needed, 'B')}, but {error}. {remedy}") from error

        find_everywhere(self._group, "taking that memory", allocate, CheckpointSaveError)

    @without_ambient_mesh
    def copy_if_due(self) -> None:
        """Copy the state in memory, once its step is done."""
        checkpoints = self._checkpoints
        if checkpoints.held.step % self._every:
            return
        with checkpoints.clock.part("device"):
            checkpoints.under_way.finish()  # no copy of a step whose loss ends the run
        with checkpoints.clock.part("save"):
            parts, about = self._content()
            if self._has_copied:
                self._await_others()
            self._serial, self._has_copied = self._serial + 1, True
            with jax.transfer_guard_device_to_host("allow"):  # the user asks for it
                self._slots.write(self._own(self._serial), self._serial, parts, about)
            if self._link is not None and self._hosts > 1:
                slot = self._slots.extent(self._own(self._serial))
                self._link.pass_on(slot.begin, slot.head, slot.size)

    def _content(self) -> tuple[list[Any], bytes]:
        checkpoints = self._checkpoints
        step, position = checkpoints.held.step, checkpoints.data.position
        parts, places = own_parts(flatten(checkpoints.held.memory)[0])
        about = {
            **self._owner, **places, "step": step, "processes": self._group.process_count,
            "data": None if position is None else position.to_json(), "callbacks": checkpoints.callbacks.to_json(),
            "metrics": checkpoints.measured.at(step),
        }  # fmt: skip
        return parts, json.dumps(about).encode()

    def _await_others(self) -> None:
        """Wait until all have the last copy: the next one overwrites the copy before it.

        Usually they have: a step needs values of all processes. One whose parameters are frozen may be ahead.
        """
        if self._hosts > 1:
            self._await_all_hosts()
        else:
            others = [2 * process + self._serial % 2 for process in range(self._group.process_count)]
            with self._group.waiting("the copies of the other processes in memory"):
                while not all((head := self._slots.head(of)) and head.serial >= self._serial for of in others):
                    self._group.check()
                    time.sleep(0.001)
        if self._had_copies:  # nobody needs those of earlier lives any more
            self._found, self._had_copies = None, False
            if self._place == 0:
                self._slots.keep({2 * process + turn for process in self._held_here() for turn in range(2)})

    def _held_here(self) -> list[int]:
        """Return the processes whose copies this host has in this life: its own, and those of the host before it."""
        return [
            process for host in sorted({self._host, (self._host - 1) % self._hosts})
            for process in range(host * self._on_host, (host + 1) * self._on_host)
        ]  # fmt: skip

    def _fetch(self, host: int, begin: int, size: int) -> None:
        """Bring bytes of another host's file."""
        if self._link is not None:
            self._link.fetch(host, begin, size)
            self._await_host()

    def _await_all_hosts(self) -> None:
        """Wait until each host has the last copy of the host before it."""
        self._await_host()
        self._group.barrier("the copies of the state between the hosts")

    def _await_host(self) -> None:
        """Wait until this host has done what this process asked for."""
        if self._link is None:
            return
        with self._group.waiting("a copy of the state between two hosts"):
            failure = self._link.finish(self._group.check)
            deadline = time.monotonic() + _SECONDS_FOR_NEWS
            while failure is not None:
                self._group.check()
                if time.monotonic() > deadline:
                    raise CheckpointSaveError(
                        f"a copy of the state between two hosts has failed: {failure}. Mend that, or leave "
                        "memory_every= out."
                    )
                time.sleep(0.1)

    def _own(self, serial: int) -> int:
        return 2 * self._group.process_index + serial % 2
