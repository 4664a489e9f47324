"""Run by `test_pretrained.py` as four processes: parts of a model go to disk and back on other stages and processes.

Usage: run_parts_of_weights.py FOLDER
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from tests.trainers.divided import BATCH, make_trainer  # noqa: E402


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    folder = Path(sys.argv[1])
    # Two stages; each kernel lies in parts on the two processes of its stage.
    divided = make_trainer(2, mesh={"fsdp": 2})
    divided.save(folder / "first adapters", only="params/*")
    divided.export_pretrained(folder / "first merged", max_shard_bytes=1000)
    divided.train_step(BATCH)
    parts = [
        shard.data.shape
        for leaf in jax.tree.leaves(divided.state.model_state)
        if leaf.shape == (8, 16)
        for part in leaf._partially_addressable_arrays.values()
        for shard in part.addressable_shards
    ]
    assert (8, 8) in parts, parts
    divided.save(folder / "run")
    divided.save(folder / "adapters", only="params/*")
    divided.export_pretrained(folder / "all", merge_adapters=False, max_shard_bytes=1000)
    divided.export_pretrained(folder / "merged", max_shard_bytes=1000)
    loss = float(divided.train_step(BATCH)["loss"])

    # Four stages, a process each: out of the checkpoint that Orbax wrote, whole and in parts.
    read = make_trainer(4, seed=1)
    read.load_pretrained(folder / "run")
    read.export_pretrained(folder / "all again", merge_adapters=False, max_shard_bytes=1000)
    read.export_pretrained(folder / "merged again", max_shard_bytes=1000)
    restored = make_trainer(4)
    restored.restore(folder / "adapters", only="params/*")
    restored.export_pretrained(folder / "merged of adapters", max_shard_bytes=1000)
    other = make_trainer(4, seed=1)
    other.restore(folder / "run")
    # Sums over the data axis, and other programs: rounding of a few steps of size 0.1.
    np.testing.assert_allclose(float(other.train_step(BATCH)["loss"]), loss, rtol=1e-5)
    print("done", flush=True)


main()
