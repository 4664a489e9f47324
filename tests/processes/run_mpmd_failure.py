"""Run by `test_mpmd.py` as two processes of two devices: an `mpmd.jit` program steps until it is ended.

Usage: run_mpmd_failure.py [STEP]: from this step on, process 0 passes arrays with other partitions.
"""

from __future__ import annotations

import sys

from tests.processes.running import join_watched_run

join_watched_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from jaxpp_flax import mpmd  # noqa: E402
from tests.mpmd.programs import batches, config, in_runs, train_step, weights  # noqa: E402

devices = jax.devices()
meshes = {"m0": Mesh(np.array(devices[:2]), ("data",)), "m1": Mesh(np.array(devices[2:3]), ("data",))}
ws, xs = jax.tree.map(np.array, (weights(2), batches(2)))
step = mpmd.jit(train_step, config(meshes, in_runs(2, 2), "ONE_FWD_ONE_BWD"))
differs = int(sys.argv[1]) if len(sys.argv) > 1 and jax.process_index() == 0 else -1
for number in range(1_000_000):
    if number == differs:
        xs = jax.device_put(xs, NamedSharding(meshes["m0"], PartitionSpec("data")))
    ws, loss = step(ws, xs)
    # Each process waits for its own part, and neither is far ahead.
    jax.block_until_ready([array for array in (*ws, loss) if array.is_fully_addressable])
    print(f"step {number}", flush=True)
