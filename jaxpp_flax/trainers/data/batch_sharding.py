"""Each process loads only the parts of a batch that its devices read: whole leaves, or single examples of a leaf.

A batch of B examples is cut into M microbatches, one after another: example `m * (B // M) + i` is example i of
microbatch m. The devices of a stage divide the examples of each microbatch among them ("data", "fsdp"). So a device
reads one range in each microbatch, not one range of the batch. `rows_read` returns these examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches, StackedMicrobatches
from jaxpp_flax.trainers.data.batch import (
    InferencePart,
    batch_size,
    cut_leaf,
    dtype_of,
    examples_in_all,
    first_examples,
    repeated,
    shape_of,
    split_batch,
    split_for_inference,
)
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_leaves import check_leaf, is_list_of_numbers, leaf_name
from jaxpp_flax.trainers.data.global_arrays import cut_global, is_global
from jaxpp_flax.trainers.data.padding import Form, padded_parts
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.mesh import batch_spec, num_batch_shards

InferenceKind = Literal["evaluate", "predict"]  # the calls that do not change the state


@dataclass(frozen=True)
class BatchSharding:
    """The division of a batch among microbatches, devices and processes."""

    mesh: MpmdMesh | None  # without a pipeline, None
    num_microbatches: int  # of a training step

    @property
    def batch_shards(self) -> int:
        """The number of devices of a stage that divide the examples of a microbatch."""
        return num_batch_shards(self.mesh)

    @property
    def is_across(self) -> bool:
        """True if the ranks belong to several processes."""
        return self.mesh is not None and self.mesh.is_multi_process

    @without_ambient_mesh
    def split(self, whole: Any) -> Any:
        """Cut a batch for a training step: leaves of shape (num_microbatches, microbatch, ...).

        Each of several `Microbatches` is cut into itself: its leaves have the shape (1, microbatch, ...).
        """
        if isinstance(whole, Microbatches):
            return StackedMicrobatches(tuple(self._stacked(number, item) for number, item in enumerate(whole)))
        return split_batch(whole, self.num_microbatches, self.batch_shards, self._cut)

    def _stacked(self, number: int, item: Any) -> Any:
        if batch_size(item) % self.batch_shards or not batch_size(item):
            raise BatchError(
                f"microbatch {number} of the Microbatches has {batch_size(item)} examples, which the "
                f"{self.batch_shards} data-parallel devices of a stage cannot share evenly. Give each microbatch a "
                f"multiple of {self.batch_shards}, and at least one of them."
            )
        return split_batch(item, 1, self.batch_shards, self._cut)

    def _cut(self, leaf: Any, count: int, each: int) -> Any:
        if self.mesh is not None and is_global(leaf):
            return cut_global(leaf, count, each, self.mesh)
        return cut_leaf(self._taken(leaf), count, each)

    def _taken(self, leaf: Any) -> Any:
        """Return an array that can be cut and given to a step, whatever sharding the data has given it."""
        if not _is_placed(leaf):
            return leaf
        return _on_auto_axes(leaf) if self.mesh is not None else _on_default_device(leaf)

    def read(self, compiled: Any, batch: Any, num_microbatches: int) -> Any:
        """Return the indices of the examples that this process reads of each leaf; `...` for a scalar.

        `compiled` is a step for batches of these shapes, with `num_microbatches` microbatches.
        """
        if not self.is_across:
            return jax.tree.map(lambda leaf: np.arange(leaf.shape[0]) if np.shape(leaf) else ..., batch)

        def rows(leaf: Any, sharding: MpmdSharding, here: bool) -> Any:
            if not np.shape(leaf):
                return ...
            shape = (num_microbatches, leaf.shape[0] // num_microbatches, *leaf.shape[1:])
            starts = np.arange(shape[0]) * shape[1]
            return (starts[:, None] + _places(sharding, shape, read=here)).ravel()

        shardings, read = compiled.in_shardings[0][1], compiled.read_here[0][1]
        return jax.tree.map(rows, batch, shardings, read)

    def inference_parts(self, whole: Any, *, rows_only: bool, together: bool = False) -> list[InferencePart]:
        """Cut a batch for inference; with `rows_only`, each process that shares the batch passes only its rows.

        With `together`, all examples are in one part.
        """
        if isinstance(whole, Microbatches):
            raise BatchError(
                "predict takes one batch at a time, and Microbatches are several of their own shapes: "
                "`[trainer.predict(part) for part in batch]`."
            )
        taken = jax.tree.map(self._taken, whole)
        parts = split_for_inference(taken, self.num_microbatches, self.batch_shards, together=together, cut=self._cut)
        if rows_only and self.is_across and not all(part.is_shared for part in parts):
            size = batch_size(whole)
            raise BatchError(
                f"the {size} examples of a batch cannot be shared evenly by the {self.batch_shards} data-parallel "
                "devices of a stage, so a process cannot pass only its own rows. Use a multiple of "
                f"{self.batch_shards} examples; or pass whole batches, without global_batch_size."
            )
        return parts

    def padded_parts(self, whole: Any, form: Form) -> list[InferencePart]:
        """Bring a whole batch into the form of a program for batches of another size."""
        return list(padded_parts(jax.tree.map(self._taken, whole), batch_size(whole), form))

    def whole(self, batch: Any, global_batch_size: int | None) -> Any:
        """Return the batch; or the shapes of the whole batch, if `batch` has only this process's rows."""
        if isinstance(batch, Microbatches):
            return self._whole_microbatches(batch, global_batch_size)
        if global_batch_size is None:
            return batch
        global_batch_size = check_count("global_batch_size", global_batch_size)
        if not self.is_across:
            size = batch_size(batch)
            if size != global_batch_size:
                path, leaf = first_examples(batch)
                raise BatchError(
                    f"global_batch_size={global_batch_size}, but the batch has {size} examples "
                    f"({leaf_name(path)} has shape {tuple(leaf.shape)}), and one process reads all of "
                    f"them: expected, global and local, {(global_batch_size, *leaf.shape[1:])}. Pass the whole batch, "
                    "or the batch's size as global_batch_size."
                )
            return batch

        def whole(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            check_leaf(path, leaf)
            if is_global(leaf):
                raise BatchError(
                    f"{leaf_name(path)} is a jax.Array over several processes, which has the whole batch already. "
                    "Leave global_batch_size= out."
                )
            shape = np.shape(leaf)
            return jax.ShapeDtypeStruct((global_batch_size, *shape[1:]) if shape else (), dtype_of(leaf))

        return jax.tree_util.tree_map_with_path(whole, batch, is_leaf=is_list_of_numbers)

    def _whole_microbatches(self, batch: Microbatches, global_batch_size: int | None) -> Microbatches:
        if global_batch_size is not None:
            raise BatchError(
                f"global_batch_size={global_batch_size} with Microbatches: these may have another number of examples "
                "in each step. Leave global_batch_size= out, and pass the same Microbatches in every process; or this "
                "process's rows of each: `Microbatches(items, own_rows=True)`, which "
                "`group_by_length(examples, ..., own_examples=True)` makes."
            )
        if not batch.own_rows or not self.is_across:
            return batch
        shards, own = self.batch_shards, len(self._own_places)

        def whole(number: int, path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            check_leaf(path, leaf)
            if is_global(leaf):
                raise BatchError(
                    f"{leaf_name(path)} of microbatch {number} is a jax.Array over several processes, which has all "
                    "rows already. Leave own_rows= out."
                )
            if isinstance(leaf, jax.ShapeDtypeStruct) or not np.shape(leaf):
                return shape_of(leaf)
            rows, *rest = np.shape(leaf)
            if rows % own:
                raise BatchError(
                    f"microbatch {number} has {rows} rows in process {jax.process_index()} ({leaf_name(path)}), which "
                    f"its {own} data-parallel devices of a stage cannot share evenly. Pass a multiple of {own} rows."
                )
            return jax.ShapeDtypeStruct((rows // own * shards, *rest), dtype_of(leaf))

        one = jax.tree_util.tree_map_with_path
        return Microbatches([one(partial(whole, number), item) for number, item in enumerate(batch)])

    @cached_property
    def _own_places(self) -> list[int]:
        """The parts of a microbatch, numbered below `batch_shards`, that this process's devices read."""
        if self.mesh is None:
            return [0]
        sharding = MpmdSharding(self.mesh, set(range(self.mesh.mpmd_dim)), batch_spec(self.mesh, 2))
        own = _places(sharding, (1, self.batch_shards), read=True).tolist()
        if not own:
            raise BatchError(
                f"process {jax.process_index()} has no device of the mesh, so it has no rows of its own. Pass the same "
                "whole batches in every process."
            )
        return own

    def share(self) -> tuple[int, int]:
        """Return the number of this process's share of the examples, and the number of shares."""
        own = self._own_places
        number = own[0] // len(own)
        if own != [*range(number * len(own), (number + 1) * len(own))] or self.batch_shards % len(own):
            raise BatchError(
                f"the devices of process {jax.process_index()} read the parts {own} of the {self.batch_shards} of a "
                "microbatch, which are no share of equal ones. Pass whole batches, or ask `rows_read` for the rows."
            )
        return number, self.batch_shards // len(own)

    def whole_size(self, batch: Any, global_batch_size: int | None) -> int | None:
        """Return the number of examples of the whole batch if `batch` has only this process's rows, else None."""
        if not isinstance(batch, Microbatches):
            return global_batch_size
        whole = self.whole(batch, global_batch_size)
        return None if whole is batch else examples_in_all(whole)


def one_by_one(batch: Microbatches, whole: Microbatches) -> list[tuple[Any, int | None]]:
    """Return the microbatches as batches of their own, each with its `global_batch_size`."""
    return [(own, None if whole is batch else batch_size(item)) for own, item in zip(batch, whole, strict=True)]


def _is_placed(leaf: Any) -> bool:
    """Return True for an array with a sharding; one in other than device memory is refused later, by its name."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and named_memory(leaf.sharding) is None


def _on_auto_axes(leaf: jax.Array) -> jax.Array:
    """Return an array as one on Auto axes, in the same places: on Explicit ones JAX refuses to cut sharded examples."""
    if not isinstance(leaf.sharding, NamedSharding) or AxisType.Explicit not in leaf.sharding.mesh.axis_types:
        return leaf
    mesh = leaf.sharding.mesh
    return jax.device_put(leaf, NamedSharding(Mesh(np.asarray(mesh.devices), mesh.axis_names), leaf.sharding.spec))


def _on_default_device(leaf: jax.Array) -> jax.Array:
    """Return an array on the device where the state is without a mesh."""
    if not leaf.committed:
        return leaf
    default: Any = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = default if isinstance(default, jax.Device) else jax.local_devices(backend=default)[0]
    return leaf if leaf.sharding == SingleDeviceSharding(device) else jax.device_put(_on_auto_axes(leaf), device)


def examples_of_a_device(microbatches: Any, mesh: MpmdMesh) -> float:
    """Return the examples of a microbatch over the devices of a rank; leaves: (num_microbatches, microbatch, ...)."""
    sizes = (leaf.shape[1] for leaf in jax.tree.leaves(microbatches) if len(leaf.shape) > 1)
    return next(sizes, 1) / len(mesh.rank_devices(0))


def own_rows(compiled: Any, batch: Any, microbatches: Any) -> Any:
    """Convert a batch of this process's rows to the step's input: `MpmdArray`s with this process's parts.

    `batch` has leaves of shape (rows, ...), and `microbatches` the shapes of the whole batch: (num_microbatches,
    microbatch, ...). Of `StackedMicrobatches`, both have the items in the order of the step. A leaf that this process
    does not read becomes a `jax.ShapeDtypeStruct`.
    """
    shardings, read = compiled.in_shardings[0][1], compiled.read_here[0][1]

    def lay_out(path: Any, leaf: Any, whole: jax.ShapeDtypeStruct, sharding: MpmdSharding, here: Any) -> Any:
        if not here:
            return whole
        name, count = leaf_name(path), whole.shape[0]
        if whole.ndim == 1:  # a scalar, which every process passes
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise BatchError(f"{name} is a shape without a value, but this process reads it. Pass the scalar.")
            return repeated(leaf, count)
        places = _places(sharding, whole.shape, read=True)
        expected = (count * len(places), *whole.shape[2:])
        if isinstance(leaf, jax.ShapeDtypeStruct) or tuple(leaf.shape) != expected:
            size = whole.shape[0] * whole.shape[1]
            what = f"is a shape without a value ({leaf})"
            if isinstance(batch, StackedMicrobatches):
                examples = "a microbatch"
                remedy = "Pass so many rows of each leaf; or the same whole Microbatches everywhere, without own_rows."
            else:
                examples = f"a batch (global_batch_size={size}): {len(places)} in each of {count} microbatches"
                remedy = (
                    "Load `trainer.rows_read(batch)` of each leaf; or pass whole batches, without global_batch_size."
                )
            raise BatchError(
                f"{name} {what if isinstance(leaf, jax.ShapeDtypeStruct) else f'has shape {tuple(leaf.shape)}'}, but "
                f"process {jax.process_index()} reads {expected[0]} of the {size} examples of {examples}. Expected: "
                f"local {expected}, of {(size, *expected[1:])} global. {remedy}"
            )
        if jnp.issubdtype(whole.dtype, jax.dtypes.prng_key):
            raise BatchError(f"{name} holds PRNG keys. Pass `jax.random.key_data(keys)`, and wrap it in the loss.")
        local = np.asarray(leaf, whole.dtype).reshape(count, len(places), *whole.shape[2:])

        def part(index: Any) -> np.ndarray[Any, Any]:
            begin, end, _ = index[1].indices(whole.shape[1])
            first = int(np.searchsorted(places, begin))
            return local[:, first : first + end - begin].copy()  # JAX may take the memory of a NumPy array as its own

        local_ranks = [rank for rank in sharding.ranks if sharding.mpmd_mesh.is_local(rank)]
        parts = {r: jax.make_array_from_callback(whole.shape, sharding.local_sharding(r), part) for r in local_ranks}
        return MpmdArray(parts, sharding, shape=whole.shape, dtype=whole.dtype)

    return jax.tree_util.tree_map_with_path(lay_out, batch, microbatches, shardings, read)


def compared_rows(compiled: Any, batch: Any, microbatches: Any, comparison: BatchComparison) -> Any:
    """Return `own_rows`, after a comparison with the processes that read the same rows."""
    if isinstance(batch, Microbatches):  # in the order of the data
        batch = StackedMicrobatches(tuple(batch.items))
    taken = own_rows(compiled, batch, microbatches)
    comparison.before_these(_named_rows(compiled, batch, microbatches))
    return taken


def _named_rows(compiled: Any, batch: Any, microbatches: Any) -> dict[str, Any]:
    """Return the leaves that this process reads, by name. Two processes have equal names only for equal rows."""
    shardings, read = compiled.in_shardings[0][1], compiled.read_here[0][1]
    named: dict[str, Any] = {}

    def add(path: Any, leaf: Any, whole: Any, sharding: MpmdSharding, here: Any) -> None:
        if here and whole.ndim == 1:
            # Not the scalar's name in whole batches: there, processes that do not read the scalar hash it too.
            named[f"{leaf_name(path)} (a scalar)"] = repeated(leaf, 1)
        elif here:
            places = _places(sharding, whole.shape, read=True)
            is_range = len(places) == places[-1] - places[0] + 1
            text = f"{places[0]} to {places[-1]}" if is_range else ", ".join(map(str, places))
            named[f"{leaf_name(path)} (places {text} of each microbatch)"] = leaf

    jax.tree_util.tree_map_with_path(add, batch, microbatches, shardings, read)
    return named


@lru_cache  # called for each leaf of each step, with the same shapes
def _places(sharding: MpmdSharding, shape: tuple[int, ...], *, read: bool) -> np.ndarray[Any, Any]:
    """Return the examples of each microbatch that this process's devices hold, ascending; read-only."""
    held: set[int] = set()
    for rank in sharding.ranks if read else ():
        indices: Mapping[Any, Any] = sharding.local_sharding(rank).addressable_devices_indices_map(shape)
        for index in indices.values():
            held.update(range(*index[1].indices(shape[1])))
    places = np.array(sorted(held), np.int64)
    places.flags.writeable = False
    return places
