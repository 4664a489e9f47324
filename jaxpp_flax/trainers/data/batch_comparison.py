"""The comparison of the batches that the processes of a run read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.processes import compare_hashes, process_group, value_hash
from jaxpp_flax.trainers.data.batch import describe_batch
from jaxpp_flax.trainers.data.batch_leaves import leaf_name

__all__ = ["BatchComparison"]

_REMEDY = (
    "Each process reads its own part of every batch, so all must draw the same ones in the same order: the same seed "
    "of the shuffling, the same files, no share of them for each process. A leaf that no stage of a process reads may "
    "be left out there: pass a `jax.ShapeDtypeStruct` for it (`trainer.leaves_read`). With "
    "`global_batch_size`, those at one place of the data axis, one in each stage, draw the same examples "
    "(`trainer.rows_read`)."
)

_SHAPES_REMEDY = (
    "Microbatches of one step need the same shapes in every process, in the same order. Draw the same Microbatches "
    "everywhere: the same seed of the shuffling, the same files. Processes that draw their own rows agree on the "
    "lengths of each step by `group_by_length(..., own_examples=True)`."
)

# The number of elements to hash of a larger leaf: this takes well below a millisecond.
_SAMPLED = 1 << 16
# The most batches between two comparisons; each comparison waits for the devices.
_MOST_BETWEEN = 64


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
        self._several = mesh is not None and mesh.is_multi_process
        self._what, self._count, self._compared, self._due = what, 0, 0, 2
        self._hashes: dict[str, str | None] = {}
        self._has_shapes = False

    def shapes(self, batch: Any, *, by_rows: bool) -> None:
        """Compare the shapes of `Microbatches`, which each step has its own of; call this before anything is compiled.

        Processes that run steps of other shapes would wait for each other for ever. The first shapes are compared by
        all processes together, later ones by the process that comes last: no step waits for the comparison.

        Args:
          batch: the whole batch, or its shapes.
          by_rows: whether this process passes only its rows.
        """
        if not self._several or not isinstance(batch, Microbatches):
            return
        texts = {f"microbatch {number}": describe_batch(item) for number, item in enumerate(batch)}
        name = f"the shapes of the Microbatches for {self._what}"
        texts |= {"their number": str(len(batch)), "own_rows": str(by_rows)}
        compare_hashes(process_group(), name, texts, _SHAPES_REMEDY, waits=not self._has_shapes)
        self._has_shapes = True

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
            # The processes made a global array together: none of them has all of it.
            new = None if isinstance(leaf, MpmdArray) else value_hash(leaf, _SAMPLED)
            known = self._hashes.get(name, "")
            # A process that has once left out a leaf does not know the other processes' hash of this leaf any more.
            both = None if known is None or new is None else np.frombuffer((known + new).encode(), np.uint8)
            self._hashes[name] = None if both is None else value_hash(both)
        if self._count == 1:
            self._compare()

    def after(self, result: Any, step: int | None) -> None:
        """Compare if due; call this when a step runs, or a part of one (None).

        `result` is ready once every process has begun the step.
        """
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
        compare_hashes(process_group(), name, {**number, **self._hashes}, _REMEDY, ended, among)
        self._compared = self._count
