"""Export weights to safetensors files, and load weights into plain models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxpp_flax.checkpoint.errors import CheckpointMismatchError, CheckpointSaveError
from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.orbax_io import absolute
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten, nest, rename_path
from jaxpp_flax.checkpoint.reading import leaves_of, restore


def export_safetensors(
    tree: Any,
    path: str | os.PathLike[str],
    *,
    only: PathFilter | None = None,
    rename: Mapping[str, str] | None = None,
    separator: str = ".",
) -> Path:
    """Write arrays to one safetensors file (extra `safetensors`), and return its absolute path.

    Args:
      tree: a pytree of arrays, such as `trainer.state.params`; or the path of a checkpoint.
      path: the path of the file, which must not exist.
      only: the leaves to write, by logical path.
      rename: prefixes of paths, from the tree to the file.
      separator: the text between the parts of a name in the file.

    Raises:
      ImportError: if safetensors is not installed.
      CheckpointSaveError: if the file exists or cannot be written.
      ValueError: if no leaf is chosen, or two leaves get the same name.
    """
    try:
        from safetensors.numpy import save_file  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            "export_safetensors needs the package safetensors: pip install 'jaxpp-flax[safetensors]'."
        ) from error
    target = absolute(path)
    if target.exists():
        raise CheckpointSaveError(f"cannot export to {target}: it exists, and is left as it is. Choose another path.")
    if isinstance(tree, (str, os.PathLike)):
        tree = read_arrays(tree, only=only)
    arrays: dict[str, np.ndarray] = {}
    wanted = choose(only)
    for name, leaf in flatten(tree)[0].items():
        if not wanted(name):
            continue
        new = rename_path(name, rename).replace("/", separator)
        if new in arrays:
            raise ValueError(f"two leaves would be called {new!r} in {target}: change `rename`; one is {name}.")
        # safetensors writes the memory without reordering, so arrays must be in C order.
        arrays[new] = np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    if not arrays:
        raise ValueError(f"no leaf of the tree matches only={only!r}; nothing to export to {target}.")
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        save_file(arrays, str(unfinished), metadata={"format": "np"})
        unfinished.replace(target)
    except Exception as error:
        unfinished.unlink(missing_ok=True)
        raise CheckpointSaveError(f"exporting to {target} failed: {type(error).__name__}: {error}") from error
    return target


def read_arrays(path: str | os.PathLike[str], *, only: PathFilter | None = None) -> dict[str, Any]:
    """Read a checkpoint's leaves as NumPy arrays in nested dictionaries."""
    wanted = choose(only)
    leaves = {
        name: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape or ())  # a shape without memory
        for name, leaf in leaves_of(path).items()
        if wanted(name) and leaf.shape is not None
    }
    if not leaves:
        raise CheckpointMismatchError(f"checkpoint {path} cannot be read.", [f"no leaf matches only={only!r}"])
    return restore(path, nest(leaves), extra="ignore")


def load_nnx(
    module: nnx.Module, path: str | os.PathLike[str], *, rename: Mapping[str, str] | None = None
) -> nnx.Module:
    """Put the weights of a trainer's checkpoint into a plain NNX module, on the module's devices; return the module.

    Args:
      module: a module with any weights; its variables are set in place. Random keys and counters do not change.
      path: a checkpoint that a trainer wrote.
      rename: prefixes of paths, from the module to the checkpoint's parameters.

    Raises:
      CheckpointMismatchError: listing the leaves that do not fit.

    Example:
      >>> import tempfile, jax
      >>> from jaxpp_flax.checkpoint import save
      >>> trained, fresh = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(1))
      >>> path = save(tempfile.mkdtemp() + "/x", {"params": nnx.state(trained), "model_state": {}})
      >>> bool((load_nnx(fresh, path).kernel == trained.kernel).all())
      True
    """
    state = nnx.state(module, nnx.Not(nnx.RngState))
    stored = leaves_of(path)
    names = flatten(state)[0]

    def place(name: str) -> str:
        name = rename_path(name, rename)
        return f"params/{name}" if f"params/{name}" in stored else f"model_state/{name}"

    # The trainer chooses the variables that are parameters (`wrt`), so each variable is searched in both places.
    nnx.update(module, restore(path, state, rename={name: place(name) for name in names}, extra="ignore"))
    return module


def load_linen(
    variables: Mapping[str, Any], path: str | os.PathLike[str], *, rename: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Load the variables of a Linen model from a trainer's checkpoint, in the form that `module.apply` takes.

    Args:
      variables: the result of `module.init`, or its shapes by `jax.eval_shape`.
      path: a checkpoint that a trainer wrote.
      rename: prefixes of paths, from `variables` to the checkpoint.

    Raises:
      CheckpointMismatchError: listing the leaves that do not fit.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jaxpp_flax.checkpoint import save
      >>> path = save(tempfile.mkdtemp() + "/x", {"params": {"w": jnp.ones(2)}, "step": jnp.int32(1)})
      >>> load_linen({"params": {"w": jnp.zeros(2)}}, path)
      {'params': {'w': Array([1., 1.], dtype=float32)}}
    """
    collections = {name: f"model_state/collections/{name}" for name in variables if name != "params"}
    return restore(path, dict(variables), rename={**collections, **(rename or {})}, extra="ignore")
