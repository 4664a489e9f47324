"""Save a tree as an ordinary Orbax checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxpp_flax.checkpoint.barriers import shared_work
from jaxpp_flax.checkpoint.errors import CheckpointSaveError
from jaxpp_flax.checkpoint.format.leaves import is_empty, to_disk
from jaxpp_flax.checkpoint.format.locations import checkpoint_location
from jaxpp_flax.checkpoint.format.orbax_io import TREE_ITEM, multiprocessing_options, pytree_handler, short
from jaxpp_flax.checkpoint.format.paths import flatten, nest
from jaxpp_flax.checkpoint.shared_directory import check_shared


def to_tree(tree: Any) -> dict[str, Any]:
    """Convert `tree` for writing: nested dictionaries of global arrays, with logical paths as keys.

    Arrays without elements are left out.

    Example:
      >>> import numpy as np
      >>> to_tree({"a": [np.zeros(1), np.ones(1)]})
      {'a': {'0': array([0.]), '1': array([1.])}}
    """
    return nest({path: to_disk(leaf) for path, leaf in flatten(tree)[0].items() if not is_empty(leaf)})


def save(path: str | os.PathLike[str], tree: Any) -> Path:
    """Write `tree` to `path` as an Orbax checkpoint, wait for the end of the save, and return the absolute path.

    Orbax alone reads the checkpoint as nested dictionaries of arrays; random keys are written as their data. The
    directory `path` appears when the checkpoint is complete.

    Args:
      path: a directory that does not exist yet.
      tree: a pytree of `MpmdArray`s, `jax.Array`s, NumPy arrays and numbers.

    Raises:
      CheckpointSaveError: if the path exists, or cannot be written.
      ValueError: if the tree has no leaves, or two leaves have one path; if Orbax cannot write to such a URL.

    Example:
      >>> import tempfile, jax.numpy as jnp, orbax.checkpoint as ocp
      >>> path = save(tempfile.mkdtemp() + "/first", {"layers": [jnp.ones(2)]})
      >>> with ocp.StandardCheckpointer() as stock:
      ...     print(stock.restore(path, {"layers": {"0": jnp.zeros(2)}}))
      {'layers': {'0': Array([1., 1.], dtype=float32)}}
    """
    path = _new_path(path)
    content = to_tree(tree)
    if not content:
        raise ValueError(f"cannot save to {path}: the tree has no leaves.")
    _write(path, pytree_handler(), ocp.args.PyTreeSave(content))
    return path


def _new_path(path: str | os.PathLike[str]) -> Path:
    new = checkpoint_location(path)
    if new.exists():
        raise CheckpointSaveError(f"cannot save to {new}: it exists, and is left as it is. Choose another path.")
    return new


def save_step(path: str | os.PathLike[str], tree: Any, beside: Mapping[str, Any]) -> Path:
    """Write the directory of one step to any path, and wait for the end of the save; see `save`."""
    path = _new_path(path)
    content = to_tree(tree)
    options = ocp.CompositeOptions(multiprocessing_options=multiprocessing_options(f"jaxpp_flax.{path.name}"))
    handler = ocp.CompositeCheckpointHandler(handler_registry=step_registry(), composite_options=options)
    _write(path, handler, step_arguments(content, beside))
    return path


def step_arguments(content: Any, beside: Mapping[str, Any]) -> ocp.args.Composite:
    """Return Orbax's arguments to save the items of a step: the tree, and some JSON beside it."""
    json = {name: ocp.args.JsonSave(value) for name, value in beside.items()}
    return ocp.args.Composite(**{TREE_ITEM: ocp.args.PyTreeSave(content)}, **json)


def step_registry() -> Any:
    """Return Orbax's handlers for the items of a step."""
    handler = pytree_handler()
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    registry.add(TREE_ITEM, ocp.args.PyTreeSave, handler)
    registry.add(TREE_ITEM, ocp.args.PyTreeRestore, handler)
    return registry


def _write(path: Path, handler: Any, arguments: Any) -> None:
    """Save without the background; all processes call this."""
    options = multiprocessing_options(f"jaxpp_flax.{path.name}")
    check_shared(path.parent)
    with (
        ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer,
        shared_work(f"the save to {path}", lambda error: save_failed(path, error)),
    ):
        checkpointer.save(path, args=arguments)


def save_failed(path: Path, error: BaseException) -> CheckpointSaveError:
    """Return the error of a failed save, with the reason that the operating system gave."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 5:
        chain.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = " ".join(chain)
    reason = next((remedy for words, remedy in _REASONS if any(word in text for word in words)), "")
    return CheckpointSaveError(
        f"saving to {path} failed{reason}. Checkpoints that were complete before are untouched, and so is the state in "
        f"memory. The reason given: {type(error).__name__}: {short(error)}"
    )


_REASONS = (
    (("No space left", "ENOSPC", "RESOURCE_EXHAUSTED", "Disk quota", "File too large"),
     ": the disk is full (or a quota is reached); free space, or keep fewer checkpoints"),
    (("Permission denied", "PERMISSION_DENIED", "EACCES", "Read-only file system", "Operation not permitted"),
     ": no permission to write there; change the directory or its permissions"),
)  # fmt: skip
