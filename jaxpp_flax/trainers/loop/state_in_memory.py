"""Copies of the state in its host's memory, from which the next life of a run goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import jax

from jaxpp_flax.checkpoint import CheckpointSaveError
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.memory.copies import newest_copy, own_parts
from jaxpp_flax.checkpoint.memory.slots import Slots, free_bytes, rounded
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
    "Checkpoints(memory_every={}) has no effect here: it is for a run on one host of Linux whose launcher starts it "
    "again after a failure, `python -m jaxpp_flax.launch -n 4 --max-restarts 3 ...`"
)


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
        index, count = self._group.process_index, self._group.process_count
        heads = self._slots.heads()
        marked = sorted(heads)
        mine = list(filter(self._slots.is_intact, marked[index::count]))  # each process looks at its share
        intact = set[int]().union(*exchange_values(self._group, "the whole copies in memory", mine))
        self._damaged = [number for number in marked if number not in intact]
        store = checkpoints.need_store("Checkpoints(memory_every=)")
        self._owner = {"run": self._group.run_id, "directory": str(store.directory)}
        self._found = newest_copy(self._slots, intact, self._owner)
        # The next copy must not overwrite the newest one. Another process may have written one more when it was killed.
        self._serial = max((head.serial for head in heads.values()), default=0)
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
        target = flatten(checkpoints.held.target())[0]
        if found is not None and not found.fits(target):
            tell(f"the copy of step {found.step} in memory has other leaves than this trainer, and is not used")
            found = None
        if found is not None and not checkpoints.saves_nonfinite:  # as no checkpoint of such a step is written
            bad = found.nonfinite(self._group.process_index, self._group.process_count)
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
        needed = 2 * sum(exchange_values(self._group, "the size of a copy in memory", size))
        what = f"Checkpoints(memory_every={self._every}) keeps two copies of the state in this host's memory"
        remedy = "Give the host, or the limit of its memory, more; train on more hosts; or leave memory_every= out."

        def take() -> None:
            missing = needed - self._slots.reserved()
            if self._group.process_index == 0 and missing > (free := free_bytes()):
                raise CheckpointSaveError(f"{what}: {amount(needed, 'B')}, and {amount(free, 'B')} are free. {remedy}")

        find_everywhere(self._group, "the memory for copies of the state", take, CheckpointSaveError)

        def allocate() -> None:
            try:
                for turn in range(2):
                    self._slots.reserve(self._own(turn), size)
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
        others = [2 * process + self._serial % 2 for process in range(self._group.process_count)]
        with self._group.waiting("the copies of the other processes in memory"):
            while not all((head := self._slots.head(of)) and head.serial >= self._serial for of in others):
                self._group.check()
                time.sleep(0.001)

    def _own(self, serial: int) -> int:
        return 2 * self._group.process_index + serial % 2
