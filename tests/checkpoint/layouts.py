"""Layouts of one small model's state: the same leaves, on ranks and devices of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding

BLOCKS = 8


def make_state(seed: int = 0) -> dict[str, Any]:
    """Weights, moments, counters, keys; bf16, integers, booleans, an empty array."""
    rng = np.random.default_rng(seed)

    def block() -> dict[str, Any]:
        kernel = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
        return {"kernel": kernel, "bias": jnp.asarray(rng.normal(size=8), jnp.bfloat16)}

    return {
        "step": jnp.int32(seed + 3),
        "params": {
            "embed": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32),
            "blocks": [block() for _ in range(BLOCKS)],
        },
        "opt_state": ({"mu": jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)}, ()),
        "model_state": {"key": jax.random.key(seed + 7), "mask": jnp.arange(8) % 3 == seed, "none": jnp.zeros((0, 4))},
    }


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each leaf lies: `rank_of(block)`; embeddings on the first and last rank, the rest on all."""

    ranks: int = 0  # 0: no pipeline
    rank_of: Callable[[int], int] = lambda block: 0
    axis: str | None = None
    devices: tuple[int, ...] = field(default_factory=lambda: tuple(range(8)))

    def shardings(self, state: Any) -> dict[str, Any]:
        devices = np.array(jax.devices())[list(self.devices)]
        spec = self._spec
        if not self.ranks:
            if self.axis is None:
                return {path: SingleDeviceSharding(devices[0]) for path in flatten(state)[0]}
            mesh = Mesh(devices[:2], (self.axis,))
            return {path: NamedSharding(mesh, spec(leaf)) for path, leaf in flatten(state)[0].items()}
        if self.axis is None:
            mesh = MpmdMesh(Mesh(devices[: self.ranks], ("stage",)), "stage")
        else:
            mesh = MpmdMesh(Mesh(devices[: 2 * self.ranks].reshape(self.ranks, 2), ("stage", self.axis)), "stage")
        return {path: MpmdSharding(mesh, self._ranks(path), spec(leaf)) for path, leaf in flatten(state)[0].items()}

    def put(self, state: Any) -> Any:
        """The state in this layout."""
        leaves, structure = flatten(state)
        shardings = self.shardings(state)
        return jax.tree.unflatten(structure, [_put(leaf, shardings[path]) for path, leaf in leaves.items()])

    def target(self, state: Any) -> Any:
        """Shapes, dtypes and shardings alone."""
        leaves, structure = flatten(state)
        shardings = self.shardings(state)
        return jax.tree.unflatten(
            structure, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[p]) for p, x in leaves.items()]
        )

    def _ranks(self, path: str) -> set[int]:
        parts = path.split("/")
        if "blocks" in parts:
            return {self.rank_of(int(parts[parts.index("blocks") + 1]))}
        return {0, self.ranks - 1} if "embed" in parts else set(range(self.ranks))

    def _spec(self, leaf: Any) -> P:
        if self.axis == "fsdp" and leaf.ndim and leaf.size:
            return P("fsdp")
        return P(None, "tensor") if self.axis == "tensor" and leaf.ndim == 2 else P()


def _put(leaf: Any, sharding: Any) -> Any:
    if not isinstance(sharding, MpmdSharding):
        return jax.device_put(leaf, sharding)
    return MpmdArray({rank: jax.device_put(leaf, sharding.local_sharding(rank)) for rank in sharding.ranks}, sharding)


def _even(ranks: int) -> Layout:
    return Layout(ranks=ranks, rank_of=lambda block: block * ranks // BLOCKS)


LAYOUTS = {
    "1 stage": _even(1),
    "2 stages": _even(2),
    "4 stages": _even(4),
    "8 stages": _even(8),
    "unequal": Layout(ranks=3, rank_of=lambda block: 0 if block < 1 else 1 if block < 5 else 2),
    "interleaved": Layout(ranks=4, rank_of=lambda block: block % 4),
    "2 stages x data": Layout(ranks=2, rank_of=lambda block: block // 4, axis="data"),
    "4 stages x fsdp": Layout(ranks=4, rank_of=lambda block: block // 2, axis="fsdp"),
    "2 stages x tensor": Layout(ranks=2, rank_of=lambda block: block // 4, axis="tensor"),
    "other devices": Layout(ranks=2, rank_of=lambda block: 1 - block // 4, devices=(6, 3)),
    "FSDP alone": Layout(axis="fsdp"),
    "one device": Layout(),
}

# In four processes of two devices each, every rank of this one belongs to two of them.
SHARED_STAGES = Layout(ranks=4, rank_of=lambda block: block // 2, axis="fsdp", devices=(0, 2, 1, 3, 4, 6, 5, 7))
