"""Load weights of a trainer's checkpoint into plain models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxpp_flax.checkpoint.format.paths import flatten, rename_path
from jaxpp_flax.checkpoint.reading import leaves_of, restore


def load_nnx(
    module: nnx.Module, path: str | os.PathLike[str], *, rename: Mapping[str, str] | None = None
) -> nnx.Module:
    """Put the weights of a trainer's checkpoint into a plain NNX module, on the module's devices; return the module.

    Args:
      module: a module with any weights; its variables are set in place. The keys and counters of random numbers do
        not change.
      path: a checkpoint that a trainer wrote.
      rename: maps prefixes of the module's paths to prefixes of the checkpoint's parameters.

    Raises:
      CheckpointMismatchError: if leaves do not fit; the message lists them.

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
    """Read the variables of a Linen model from a trainer's checkpoint; `module.apply` takes the result.

    Args:
      variables: the result of `module.init`, or its shapes by `jax.eval_shape`.
      path: a checkpoint that a trainer wrote.
      rename: maps prefixes of paths in `variables` to prefixes in the checkpoint.

    Raises:
      CheckpointMismatchError: if leaves do not fit; the message lists them.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> from jaxpp_flax.checkpoint import save
      >>> path = save(tempfile.mkdtemp() + "/x", {"params": {"w": jnp.ones(2)}, "step": jnp.int32(1)})
      >>> load_linen({"params": {"w": jnp.zeros(2)}}, path)
      {'params': {'w': Array([1., 1.], dtype=float32)}}
    """
    collections = {name: f"model_state/collections/{name}" for name in variables if name != "params"}
    return restore(path, dict(variables), rename={**collections, **(rename or {})}, extra="ignore")
