"""The package's use of Orbax: handlers that know `MpmdArray`, a directory of arrays, and its metadata."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxpp_flax._compat_texts.errors import is_of_storage
from jaxpp_flax.checkpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, UnfinishedCheckpointError
from jaxpp_flax.checkpoint.format.handler import MpmdArrayHandler
from jaxpp_flax.checkpoint.format.locations import is_on_disk

TREE_ITEM = "state"
"""The folder of arrays in a step's directory; a `CheckpointManager` with one item names this folder `default`."""

TMP_MARK = ".orbax-checkpoint-tmp"
"""The mark in the name of a directory whose save is under way, or was cut off."""
# The bytes that a restore may hold on the host in addition to one leaf.
_READ_AHEAD_BYTES = 256 << 20

# What a reader raises because of the content. A time-out, a lost connection, a missing right or full memory is another
# error: it may pass, and says nothing of the checkpoint.
_OF_CONTENT = (
    FileNotFoundError, NotADirectoryError, IsADirectoryError, EOFError,
    ValueError, LookupError, TypeError, AttributeError, NotImplementedError,
)  # fmt: skip


def multiprocessing_options(prefix: str | None = None) -> ocp.options.MultiprocessingOptions:
    """Return Orbax's options: process 0 writes shared files, and JAX's coordination service synchronizes processes.

    Without the list of processes, Orbax would synchronize them by a computation on all devices. This computation would
    wait for all earlier work of the devices.
    """
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(count)) if count > 1 else None, barrier_sync_key_prefix=prefix
    )


def pytree_handler(largest_leaf: int | None = None) -> ocp.PyTreeCheckpointHandler:
    """Return Orbax's handler of trees, which knows `MpmdArray`s; Orbax's global registry does not change.

    `largest_leaf` is the size in bytes of the largest leaf to restore. The host holds at most so many bytes and a fixed
    read-ahead at once.
    """
    get = ocp.type_handlers.get_type_handler
    array: Any = get(jax.Array)
    array = array if isinstance(array, MpmdArrayHandler) else MpmdArrayHandler(array)
    registry = ocp.type_handlers.create_type_handler_registry(
        *((kind, get(kind)) for kind in (int, float, bytes, np.number, np.ndarray, str, type(ocp.PLACEHOLDER))),
        (jax.Array, array),
    )
    limit = None if largest_leaf is None else (largest_leaf + _READ_AHEAD_BYTES) / 1e9
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=registry,
        multiprocessing_options=multiprocessing_options(),
        use_compression=False,
        restore_concurrent_gb=limit,  # pyright: ignore[reportArgumentType] (a fraction is fine)
    )


def under_way(path: Path) -> Path:
    """Return the path where Orbax writes a checkpoint before it moves the checkpoint to `path`; in a bucket, `path`."""
    return next(iter(path.parent.glob(f"{path.name}{TMP_MARK}*")), path)


def is_complete(path: Path) -> bool:
    """Return False for a directory in a bucket that Orbax has not marked as complete.

    On a disk a directory gets its name when it is complete.
    """
    return is_on_disk(path) or (path / ocp.path.atomicity.COMMIT_SUCCESS_FILE).exists()


def find_tree(path: Path) -> Path:
    """Find the directory of arrays: `path` itself, or one item in it."""
    if not path.exists():
        parts = list(path.parent.glob(f"{path.name}{TMP_MARK}*")) if path.parent.is_dir() else []
        if parts:
            raise UnfinishedCheckpointError(
                f"no checkpoint at {path}: a save there was cut off and left {parts[0].name}, which cannot be "
                "restored. Restore an earlier one; the remains may be deleted."
            )
        raise CheckpointNotFoundError(f"no checkpoint at {path}: there is no such directory. Check the path.")
    begun = [place for place in (path, path.parent) if (place / "_CHECKPOINT_METADATA").exists()]
    if any(TMP_MARK in part for part in path.parts) or not all(map(is_complete, begun)):
        raise _cut_off(path)
    if _is_tree(path):
        return path
    items = sorted(child for child in path.iterdir() if child.is_dir() and _is_tree(child)) if path.is_dir() else []
    named = [item for item in items if item.name in (TREE_ITEM, "default")] or items
    if len(named) == 1:
        return named[0]
    steps = sorted(int(child.name) for child in path.iterdir() if child.name.isdigit()) if path.is_dir() else []
    if steps:
        raise CheckpointNotFoundError(
            f"{path} is a directory of checkpoints, of the steps {', '.join(map(str, steps))}. Pass one of them: "
            f"{path / str(steps[-1])}."
        )
    if items:
        raise CheckpointNotFoundError(f"{path} holds several trees, {[item.name for item in items]}: pass one of them.")
    if (path / "manifest.ocdbt").exists() or (path / TREE_ITEM).is_dir():
        # Orbax writes the mark of a begun checkpoint beside the first arrays, not before them.
        if not is_complete(path):
            raise _cut_off(path)
        raise CorruptCheckpointError(
            f"checkpoint {path} is damaged: its file _METADATA is missing. Restore another one (an earlier step)."
        )
    raise CheckpointNotFoundError(f"{path} is no Orbax checkpoint of a tree: it has no file _METADATA.")


def _cut_off(path: Path) -> UnfinishedCheckpointError:
    return UnfinishedCheckpointError(
        f"{path} is what is left of a save that was cut off, and cannot be restored. Restore an earlier one."
    )


def _is_tree(path: Path) -> bool:
    return (path / "_METADATA").is_file()


def written_items(path: Path) -> frozenset[str]:
    """Return the names of what was written into a step's directory, as far as Orbax's record can be read."""
    try:
        items = json.loads((path / "_CHECKPOINT_METADATA").read_text(encoding="utf-8"))["item_handlers"]
    except (OSError, ValueError, KeyError):
        return frozenset()
    return frozenset(items if isinstance(items, dict) else ())  # a text, for a directory of arrays alone


def read_metadata(path: Path) -> Any:
    """Read Orbax's metadata of each leaf, in the containers that were written."""
    with naming_damage(path):
        return pytree_handler().metadata(epath.Path(path)).tree


@contextmanager
def naming_damage(path: Path) -> Generator[None]:
    """A context for code that reads a checkpoint: an error that comes of its content is a `CorruptCheckpointError`."""
    try:
        yield
    except Exception as error:
        if (named := read_failed(path, error)) is error:
            raise
        raise named from error


def read_failed(path: Path, error: Exception) -> Exception:
    """Return the error to raise for one of Orbax's: of damage the one that names it, else the error itself.

    Example:
      >>> read_failed(Path("/run/4"), TimeoutError("the storage answers late"))
      TimeoutError('the storage answers late')
      >>> type(read_failed(Path("/run/4"), KeyError("tree_metadata"))).__name__
      'CorruptCheckpointError'
    """
    # Around an error of a value, Orbax puts an `Exception` that says where the value is.
    reason = error.__cause__ if type(error) is Exception and error.__cause__ is not None else error
    if not isinstance(reason, _OF_CONTENT) or is_of_storage(reason):
        return error
    return damaged(path, error)


def damaged(path: Path, error: BaseException) -> CorruptCheckpointError:
    """Return the error for a checkpoint whose content cannot be read."""
    return CorruptCheckpointError(
        f"checkpoint {path} cannot be read, so it is damaged or incomplete; restore another one (an earlier step). "
        f"Orbax says: {type(error).__name__}: {short(error)}"
    )


def short(error: BaseException) -> str:
    """Return the first 600 characters of an error's message."""
    text = str(error)
    return text if len(text) <= 600 else text[:600] + " ..."


def map_metadata(tree: Any, function: Any, path: str = "") -> Any:
    """Return the same containers, with each leaf replaced by `function(path, metadata)`.

    Example:
      >>> map_metadata({"a": [7, None]}, lambda path, leaf: (path, leaf))
      {'a': [('a/0', 7), ('a/1', None)]}
    """
    prefix = f"{path}/" if path else ""
    if isinstance(tree, dict):
        return {key: map_metadata(value, function, f"{prefix}{key}") for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [map_metadata(value, function, f"{prefix}{i}") for i, value in enumerate(tree)]
    return function(path, tree)
