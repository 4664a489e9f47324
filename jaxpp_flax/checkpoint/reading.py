"""Restore a checkpoint: compare all leaves on disk with the target, then read leaf by leaf onto the devices."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxpp_flax.checkpoint.barriers import name_checkpoint, shared_work
from jaxpp_flax.checkpoint.errors import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnfinishedCheckpointError,
)
from jaxpp_flax.checkpoint.format.integrity import check_files
from jaxpp_flax.checkpoint.format.leaves import WantedLeaf, abstract_leaf, empty, is_empty
from jaxpp_flax.checkpoint.format.locations import checkpoint_location
from jaxpp_flax.checkpoint.format.orbax_io import (
    damaged,
    find_tree,
    map_metadata,
    multiprocessing_options,
    naming_damage,
    pytree_handler,
    read_failed,
    read_metadata,
    written_items,
)
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten, places_of, rename_path
from jaxpp_flax.processes.comparison import find_everywhere
from jaxpp_flax.processes.group import process_group


def abstract_state(tree: Any) -> Any:
    """Return the tree with a `jax.ShapeDtypeStruct` (shape, dtype, sharding) for each leaf: a target without arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> abstract_state({"w": jnp.ones((2, 3))})["w"].shape
      (2, 3)
    """
    return jax.tree.map(abstract_leaf, tree)


@dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A leaf on disk; shape and dtype are None for a text or an empty container."""

    path: str
    shape: tuple[int, ...] | None
    dtype: Any


def leaves_of(path: str | os.PathLike[str]) -> dict[str, StoredLeaf]:
    """Return the leaves of a checkpoint by logical path, without reading the arrays.

    Args:
      path: any Orbax checkpoint of a tree, or a step's directory of a `CheckpointManager`.

    Raises:
      CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if the checkpoint cannot be read.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jaxpp_flax.checkpoint import save
      >>> path = save(tempfile.mkdtemp() + "/first", {"w": jnp.ones((2, 3))})
      >>> leaves_of(path)["w"].shape
      (2, 3)
    """
    return stored_leaves(read_metadata(find_tree(checkpoint_location(path))))


def restore(
    path: str | os.PathLike[str],
    target: Any,
    *,
    only: PathFilter | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Literal["error", "keep"] = "error",
    extra: Literal["error", "ignore"] = "error",
) -> Any:
    """Read a checkpoint into a new tree like `target`, each leaf with the target's sharding.

    The run that wrote the checkpoint may have had another layout, or no pipeline: leaves are found by their logical
    paths (`jaxpp_flax.checkpoint.format.paths`). No value is read before every leaf has been compared.

    Args:
      path: any Orbax checkpoint of a tree, or a step's directory of a `CheckpointManager`.
      target: a tree of `MpmdArray`s, `jax.Array`s, NumPy arrays or `jax.ShapeDtypeStruct`s (see `abstract_state`):
        shapes, dtypes and shardings. The target does not change.
      only: the leaves of the target to restore: a glob such as `"params/*"`, several globs, or a function of the path.
        The other leaves keep the target's value.
      rename: maps prefixes of the target's paths to prefixes in the checkpoint. `{"params": ""}` reads the parameters
        of the target from a checkpoint that holds only parameters.
      missing: "keep" keeps the target's value of a leaf that the checkpoint lacks, for example to read base weights
        into a model with adapters; "error" raises an error.
      extra: "ignore" ignores leaves of the checkpoint that the target lacks; "error" raises an error. Leaves outside
        of `only` are always ignored.

    Raises:
      CheckpointMismatchError: if leaves do not fit; the message lists each with its path, shape, dtype or sharding.
      CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if the checkpoint cannot be read.
      ValueError: if `missing` or `extra` has another value, or Orbax cannot read such a URL.

    Example:
      >>> import tempfile, jax.numpy as jnp, numpy as np
      >>> from jaxpp_flax.checkpoint import save
      >>> path = save(tempfile.mkdtemp() + "/first", {"params": {"w": jnp.arange(3.0)}, "step": jnp.int32(4)})
      >>> restore(path, {"params": {"w": np.zeros(3, np.float32)}}, only="params/*")
      {'params': {'w': array([0., 1., 2.], dtype=float32)}}
      >>> restore(path, {"params": {"w": np.zeros(2), "b": np.zeros(1)}})
      Traceback (most recent call last):
          ...
      jaxpp_flax.checkpoint.errors.CheckpointMismatchError: ...does not fit the target. 3 leaves are wrong:
        params/b: missing in the checkpoint
        params/w: shape (3,) in the checkpoint, wanted (2,); dtype float32 in the checkpoint, wanted float64
        step: in the checkpoint, but not in the target
      JPF406: ...
    """
    metadata = read_whole_metadata(path)
    return plan_restore(path, metadata, target, only=only, rename=rename, missing=missing, extra=extra).read()


def read_whole_metadata(path: str | os.PathLike[str], beside: Collection[str] = ()) -> Any:
    """Return Orbax's metadata of each leaf; refuse a damaged checkpoint, before its values are read.

    All processes call this, and all raise the error of any: each reads the metadata and the JSON called `beside`,
    and process 0 compares the files with the index.

    Raises:
      CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if the checkpoint cannot be read. An
        error that may pass, such as a `TimeoutError`, is raised as it is; in the other processes, as an `OSError`.
    """
    place, group = checkpoint_location(path), process_group()
    metadata: Any = None

    def look() -> None:
        nonlocal metadata
        tree = find_tree(place)
        metadata = read_metadata(tree)
        items = written_items(place)
        for name in beside:
            if name in items and not (place / name).is_dir():
                raise damaged(place, FileNotFoundError(f"it was written with {name!r}, which is missing"))
            read_json(place, name)
        if group.process_index == 0:
            check_files(tree)

    what = f"the restore of {name_checkpoint(place)}"
    with group.waiting(what):
        # What may pass is an `OSError` in the other processes: as in the process that had it, no damage.
        damage = (CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError)
        find_everywhere(group, what, look, *damage, OSError)
    return metadata


@dataclass(frozen=True, kw_only=True)
class RestorePlan:
    """A checked restore, before the values are read: every leaf fits."""

    directory: Path  # of the tree on disk
    metadata: Any  # Orbax's metadata of each leaf
    leaves: dict[str, Any]  # the target's leaves, by path
    structure: Any  # the target's structure
    chosen: Mapping[str, str]  # from paths of the target to paths on disk
    wants: Mapping[str, WantedLeaf]  # the requested shape, dtype and sharding of each chosen leaf

    def read(self) -> Any:
        """Read a new tree like the target; raise a `CorruptCheckpointError` if a file cannot be read all the same."""
        return jax.tree.unflatten(self.structure, (self.leaves | self.read_leaves()).values())

    def read_leaves(self) -> dict[str, Any]:
        """Read the chosen leaves by path; leaves without elements are made."""
        new = {path: empty(leaf) for path, leaf in self.leaves.items() if is_empty(leaf)}
        for names in self._rounds():
            arrays = _read(self.directory, self.metadata, {found: self.wants[name] for found, name in names.items()})
            new |= {name: self.wants[name].finish(arrays[found]) for found, name in names.items()}
        return new

    def at(self, places: Mapping[str, Any]) -> RestorePlan:
        """Return the plan for some of its leaves, with these shardings."""
        leaves = {
            path: jax.ShapeDtypeStruct(self.leaves[path].shape, self.leaves[path].dtype, sharding=to)
            for path, to in places.items()
        }
        chosen = {path: self.chosen[path] for path in leaves if path in self.chosen}
        return replace(self, leaves=leaves, chosen=chosen, wants={path: WantedLeaf.of(leaves[path]) for path in chosen})

    def _rounds(self) -> list[dict[str, str]]:
        """Divide the reads into rounds: `rename` may make two leaves from one on disk, which are read separately.

        So each leaf has the requested sharding and its own memory, which a step may donate.
        """
        rounds: list[dict[str, str]] = []
        for name, found in self.chosen.items():
            free = next((names for names in rounds if found not in names), None)
            if free is None:
                rounds.append(free := {})
            free[found] = name
        return rounds


def plan_restore(
    path: str | os.PathLike[str],
    metadata: Any,
    target: Any,
    *,
    only: PathFilter | None = None,
    rename: Mapping[str, str] | None = None,
    missing: Literal["error", "keep"] = "error",
    extra: Literal["error", "ignore"] = "error",
    widen: PathFilter = (),
    may_differ: Collection[str] = (),
    may_stay: Collection[str] = (),
) -> RestorePlan:
    """Do all checks of `restore`, without reading the values.

    Args:
      path, target, only, rename, missing, extra: as in `restore`.
      metadata: what `read_whole_metadata` has read of the checkpoint.
      widen: the leaves that may have a narrower type on disk: every value of it is exact in the target's type.
      may_differ: leaves that the target or the checkpoint alone may have; they are not restored.
      may_stay: leaves that `only` or `missing` may leave out, although the target has only their shapes.
    """
    for name, value, known in (("missing", missing, ("error", "keep")), ("extra", extra, ("error", "ignore"))):
        if value not in known:
            raise ValueError(f"restore got {name}={value!r}; it must be one of {known}.")
    directory = find_tree(checkpoint_location(path))
    leaves, structure = flatten(target)
    wanted, widened = choose(only), choose(widen)
    lacking = {name for name, leaf in leaves.items() if isinstance(leaf, jax.ShapeDtypeStruct)} - {*may_stay}
    stored = stored_leaves(metadata)
    places = _places(leaves, stored, rename)
    chosen: dict[str, str] = {}  # path of the target -> path on disk
    faults: list[str] = []
    for name, leaf in leaves.items():
        if not wanted(name):
            if name in lacking:
                faults.append(f"{name}: left out by `only`, and the target has no value to keep there")
            continue
        if name in places:
            chosen[name] = places[name]
        elif is_empty(leaf):
            leaves[name] = empty(leaf)
        elif name in may_differ:
            continue
        elif missing == "error" or name in lacking:
            renamed = rename_path(name, rename)
            looked = f" (looked for {renamed})" if renamed != name else ""
            faults.append(f"{name}: missing in the checkpoint{looked}")
    wants = {name: WantedLeaf.of(leaves[name]) for name in chosen}
    for name, found in chosen.items():
        if wrong := wants[name].faults(stored[found].shape, stored[found].dtype, widened(name)):
            faults.append(f"{name}: {'; '.join(wrong)}")
    if extra == "error":
        unread = [name for name in stored if name not in {*places.values(), *may_differ}]
        faults += _extra(unread, wanted, rename)
    if not chosen and not faults:
        faults.append(f"no leaf of the target matches only={only!r}")
    if faults:
        order = {name: i for i, name in enumerate(leaves)}
        faults.sort(key=lambda fault: order.get(fault.partition(":")[0], len(order)))
        raise CheckpointMismatchError(f"checkpoint {directory} does not fit the target.", faults)
    return RestorePlan(
        directory=directory, metadata=metadata, leaves=leaves, structure=structure, chosen=chosen, wants=wants
    )


def stored_leaves(metadata: Any) -> dict[str, StoredLeaf]:
    found: dict[str, StoredLeaf] = {}

    def note(path: str, leaf: Any) -> None:
        shape = getattr(leaf, "shape", None)
        if leaf is not None and shape is not None:
            found[path] = StoredLeaf(path=path, shape=tuple(shape), dtype=getattr(leaf, "dtype", None))

    map_metadata(metadata, note)
    return found


def _places(
    leaves: Collection[str], stored: Mapping[str, StoredLeaf], rename: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the path on disk of each leaf that the checkpoint has."""
    own, found = {rename_path(name, rename) for name in leaves}, dict[str, str]()
    for name in leaves:
        first, *others = (rename_path(place, rename) for place in places_of(name))
        places = (first, *(place for place in others if place not in own))  # not the place of another leaf
        # Stock Orbax writes an `nnx.Variable` as a node with the child `value`.
        each = (path for place in places for path in (place, f"{place}/value") if path in stored)
        if (path := next(each, None)) is not None:
            found[name] = path
    return found


def _extra(unread: Collection[str], wanted: Any, rename: Mapping[str, str] | None) -> list[str]:
    """List the leaves on disk that `wanted` includes and no leaf of the target has its place at."""
    back = {new: old for old, new in (rename or {}).items()}
    named = {name: rename_path(name, back) for name in unread}
    return [f"{old}: in the checkpoint, but not in the target" for old in named.values() if wanted(old)]


def _read(directory: Path, metadata: Any, wants: Mapping[str, WantedLeaf]) -> dict[str, Any]:
    """Read leaves by their paths on disk, at least one (else the plan was refused); all other leaves are skipped."""

    def item(path: str, _: Any) -> Any:
        return jax.ShapeDtypeStruct(wants[path].shape, wants[path].dtype or np.float32) if path in wants else ...

    def arguments(path: str, _: Any) -> Any:
        if path not in wants:
            return ocp.RestoreArgs(restore_type=type(...))
        want = wants[path]
        if want.restore_type is not jax.Array:
            return ocp.RestoreArgs(restore_type=want.restore_type, dtype=want.dtype)
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=want.sharding, global_shape=want.shape, dtype=want.dtype
        )

    largest = max(int(np.prod(w.shape)) * np.dtype(w.dtype or np.float64).itemsize for w in wants.values())
    options = multiprocessing_options("jaxpp_flax.restore")
    with (
        shared_work(f"the restore of {name_checkpoint(directory)}", lambda error: read_failed(directory, error)),
        ocp.Checkpointer(pytree_handler(largest), multiprocessing_options=options) as checkpointer,
    ):
        restored = checkpointer.restore(
            directory,
            args=ocp.args.PyTreeRestore(
                item=map_metadata(metadata, item), restore_args=map_metadata(metadata, arguments)
            ),
        )
    found: dict[str, Any] = {}
    map_metadata(restored, lambda path, leaf: found.update({path: leaf}) if path in wants else None)
    return found


def read_json(path: str | os.PathLike[str], name: str) -> Any:
    """Read the JSON called `name` in a step's directory, such as its "metrics"; return None if it does not exist."""
    item = checkpoint_location(path) / name
    if not item.is_dir():
        return None
    with (
        process_group().waiting(f"the restore of {name_checkpoint(item.parent)} ({name})"),
        # Not an `ocp.Checkpointer`, in which processes wait for each other: the death of one would look like damage.
        closing(ocp.JsonCheckpointHandler("metrics" if name == "metrics" else None)) as handler,
        naming_damage(item),
    ):
        return handler.restore(epath.Path(item))
