"""One process of two, each with one rank: values joined over both processes, added up there, and taken apart."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import tasks


def main() -> None:
    mesh = tasks.MpmdMesh(Mesh(np.array(jax.devices()).reshape(2, 2), ("stage", "data")), "stage")
    each = tuple(NamedSharding(submesh, P("data")) for submesh in mesh.unstack)
    both = NamedSharding(mesh.jax_mesh, P("data"))

    @tasks.mpmd(mesh, in_shardings=each)
    def total(x: Any, y: Any) -> Any:
        whole = tasks.task(lambda xy: xy.sum(0), out_shardings=both, name="sum")(tasks.stack(x, y))
        return tasks.slice(whole, [0, 1])

    parts = total(np.array([1.0, 2.0], np.float32), np.array([9.0, 10.0], np.float32))
    own = [
        np.concatenate([shard.data for shard in part.addressable_shards]).tolist() for part in parts if is_here(part)
    ]
    print(f"process {jax.process_index()}: {own}", flush=True)


def is_here(part: jax.Array) -> bool:
    return bool(part.addressable_shards)


if __name__ == "__main__":
    main()
