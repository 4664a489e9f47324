"""The synchronization of the processes of a run: equal states, batches, calls and compilations, and a common end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.processes.comparison import (
    compare_hashes,
    compare_lines,
    describe_environment,
    value_hash,
    value_text,
)
from jaxpp_flax.processes.group import process_group
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.trainers.data.batch import describe_batch, leaf_name
from jaxpp_flax.trainers.errors import BatchError

__all__ = [
    "BatchComparison",
    "compare_initial_states",
    "await_same_call",
    "compare_compilations",
    "await_same_end",
]

_STATE_REMEDY = (
    "Every process makes model and optimizer by itself, so all must make the same ones: give each the same seed and "
    "hyperparameters, which depend neither on the process nor on the time. Values made in one process alone can be "
    "sent to the others by `jax.experimental.multihost_utils.broadcast_one_to_all`."
)
_BATCHES_REMEDY = (
    "Each process reads its own part of every batch, so all must draw the same ones in the same order: the same seed "
    "of the shuffling, the same files, no share of them for each process. A leaf that no stage of a process reads may "
    "be left out there: pass a `jax.ShapeDtypeStruct` for it (`trainer.leaves_read`). With "
    "`global_batch_size`, those at one place of the data axis, one in each stage, draw the same examples "
    "(`trainer.rows_read`)."
)

# The number of elements to hash of a larger leaf: this takes well below a millisecond.
_SAMPLED = 1 << 16
# The most batches between two comparisons; each comparison waits for the devices.
_MOST_BETWEEN = 64


def compare_initial_states(hashes: Mapping[str, str | None]) -> None:
    """Before values are placed, make sure that every process has the same sources of them: arrays and programs.

    Raises:
      ValuesMismatchError: the message names the first leaf that differs, and the processes.
    """
    compare_hashes(process_group(), "the initial state", hashes, _STATE_REMEDY)


def compare_weights(mesh: MpmdMesh | None, weights: Mapping[str, Any]) -> None:
    """Make sure that every process gives `trainer.set_weights` the same values; arrays on ranks are not compared.

    Raises:
      ValuesMismatchError: the message names the first leaf that differs, and the processes.
    """
    if mesh is not None and mesh.jax_mesh.is_multi_process:
        hashes = {path: None if isinstance(of, MpmdArray) else value_text(of) for path, of in weights.items()}
        compare_hashes(process_group(), "the weights of set_weights", hashes, _STATE_REMEDY)


class BatchComparison:
    """Compares the batches that processes read. Else a step could train with inputs and targets of different batches.

    Leaves that a process does not read are left out. The first batch is compared before its use. Later comparisons
    cover the batches since the last one: after 2, 4, 8, ... batches and at least every 64, before each save, and at the
    end.

    Args:
      mesh: the mesh of all ranks; in a single process nothing is compared.
      what: the use of the batches, such as "training", for errors.

    Raises:
      ValuesMismatchError: from every method; the message names the first leaf that differs, and the processes.
    """

    def __init__(self, mesh: MpmdMesh | None, what: str) -> None:
        self._several = mesh is not None and mesh.jax_mesh.is_multi_process
        self._what, self._count, self._compared, self._due = what, 0, 0, 2
        self._hashes: dict[str, str | None] = {}

    def before(self, batch: Any) -> None:
        """Compare a batch; call this with each batch before its use."""
        if self._several:  # a single process does no extra work
            self.before_these({leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(batch)})

    def before_these(self, leaves: Mapping[str, Any]) -> None:
        """`before` for the leaves of a batch that this process has, by name; others may have other leaves."""
        if not self._several:
            return
        self._count += 1
        for name, leaf in leaves.items():
            known, new = self._hashes.get(name, ""), value_hash(leaf, _SAMPLED)
            # A process that has once left out a leaf does not know the other processes' hash of this leaf any more.
            both = None if known is None or new is None else np.frombuffer((known + new).encode(), np.uint8)
            self._hashes[name] = None if both is None else value_hash(both)
        if self._count == 1:
            self._compare()

    def after(self, result: Any, step: int) -> None:
        """Compare if due; call this when a step runs. `result` is ready once every process has begun the step."""
        if self._several and self._count >= self._due:
            self._due += min(self._due, _MOST_BETWEEN)
            jax.block_until_ready(result)
            self._compare(step=step)

    def check(self, step: int) -> None:
        """Compare now; all processes call this before they save the state of `step`."""
        if self._several:
            self._compare(step=step)

    def end(self, step: int | None = None) -> None:
        """Compare the last batches; call this after the last batch."""
        if self._several:
            self._compare(f"its data for {self._what} ended after {self._count} batches, theirs did not", step)

    def _compare(self, ended: str | None = None, step: int | None = None) -> None:
        number = {"their number": f"{self._count} batches"}
        name = f"the batches for {self._what}"
        last, unit = (self._count, "batches") if step is None else (step, "steps")
        among = f"{unit} {last - max(self._count - self._compared, 1) + 1} to {last}"
        compare_hashes(process_group(), name, {**number, **self._hashes}, _BATCHES_REMEDY, ended, among)
        self._compared = self._count


def await_same_call(mesh: MpmdMesh | None, state: Any, call: str, detail: str = "") -> None:
    """Wait until every process has made the same call; if a process makes another call, the run fails.

    Args:
      mesh: the mesh of all ranks.
      state: arrays that must be ready first: then no other process waits for a value of this process.
      call: the name of the call, such as "trainer.save", for errors.
      detail: more about the call; it may differ between processes.
    """
    if mesh is not None and mesh.jax_mesh.is_multi_process:
        jax.block_until_ready(jax.tree.leaves(state))
        why = f"it waits in {call}{detail}, which every process must call after the same step"
        process_group().barrier(call, idle_reason=why)


def compare_compilations(mesh: MpmdMesh | None, state: Any, kind: str, schedule: Schedule | None, batch: Any) -> None:
    """Wait as in `await_same_call` to compile a step of this kind; then make sure that all compile the same step.

    Raises:
      ProgramMismatchError: the message names the difference, and the processes.
    """
    if mesh is None or schedule is None or not mesh.jax_mesh.is_multi_process:
        return
    step = f"step to {kind} for {describe_batch(batch)}"
    await_same_call(mesh, state, "the compilation of a step", f" (a {step})")
    ran = f"{type(schedule).__name__}, {schedule.num_stages} stages on {schedule.num_ranks} ranks"
    compare_lines(process_group(), "what to compile", [*describe_environment(), step, ran], None)


def await_same_end(mesh: MpmdMesh | None, state: Any, step: int, trained_on: BatchComparison) -> None:
    """At the end of a training loop, wait until every process has trained the same steps, on the same batches.

    Raises:
      ValuesMismatchError: if the batches differ.
      BatchError: if the numbers of steps differ; a process that others wait for ends the run instead.
    """
    if mesh is None or not mesh.jax_mesh.is_multi_process:
        return
    # Once the state is ready, this process has sent all values of its last step.
    jax.block_until_ready(jax.tree.leaves(state))
    group = process_group()
    why = f"its data ended, or it was stopped, after step {step}. Give every process batches for the same steps"
    steps = [int(text) for text in group.exchange("the end of fit", str(step).encode(), idle_reason=why)]
    if len(set(steps)) > 1:
        listing = ", ".join(f"process {index}: {count}" for index, count in enumerate(steps))
        raise BatchError(
            f"the processes trained different numbers of steps ({listing}): data ended earlier on some of them. Give "
            "every process batches for the same steps, or pass `steps=`."
        )
    trained_on.end(step)
