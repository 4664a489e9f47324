"""The bytes that the optimizer and the moving average keep for each leaf of a step's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.engine.arrays.mesh import MpmdMesh, axes_in
from jaxpp_flax.trainers.state.train_state import TrainState, parameter_of

__all__ = ["kept_bytes"]


def kept_bytes(
    state: TrainState,
    specs: TrainState | None,
    batch: Any,
    mesh: MpmdMesh,
    memory_kind: Callable[[Any], str | None] = lambda leaf: None,
) -> list[tuple[float, float]]:
    """Return, for each leaf of `(state, batch)`, the bytes that the optimizer and the average keep for each device.

    The first number lies on the device, the second one on the host. `memory_kind` returns the memory of a leaf of the
    optimizer: None for the devices' own.

    A leaf of the optimizer belongs to the parameter with the same path. A leaf with the parameter's shape has the
    parameter's sharding, from `specs` (see `state_specs`).
    """
    sizes = dict(mesh.unstack[0].shape)
    params = jax.tree_util.tree_leaves_with_path(state.params)
    is_spec = lambda s: s is None or isinstance(s, jax.sharding.PartitionSpec)  # noqa: E731
    listed = jax.tree.leaves(specs.params, is_leaf=is_spec) if specs is not None else [None] * len(params)
    shards = {path: _shards(spec, sizes) for (path, _), spec in zip(params, listed, strict=True)}
    shapes = {path: leaf.shape for path, leaf in params}
    extra = {path: [0.0, 0.0] for path in shapes}
    for tree, kind_of in ((state.opt_state, memory_kind), (state.ema, lambda leaf: None)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            tail = parameter_of(path, extra)
            if tail is not None:
                extra[tail][kind_of(leaf) is not None] += (
                    leaf.size * leaf.dtype.itemsize / (shards[tail] if leaf.shape == shapes[tail] else 1)
                )
    on_devices, on_host = (
        jax.tree.unflatten(jax.tree.structure(state.params), [extra[path][place] for path, _ in params])
        for place in range(2)
    )
    nothing, nothing_of_batch = jax.tree.map(lambda _: 0.0, (state, batch))
    columns = ((replace(nothing, params=of_params), nothing_of_batch) for of_params in (on_devices, on_host))
    return list(zip(*map(jax.tree.leaves, columns), strict=True))


def _shards(spec: Any, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[name] for name in axes_in(spec or ()))
