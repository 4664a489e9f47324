"""Run by `test_pretrained.py` as several processes: weights in, a step, weights out, and what each process has read.

Then the disk of one that writes is full. Usage: run_pretrained.py FOLDER RANKS
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

from tests.processes.running import join_run, tell

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.checkpoint import CheckpointSaveError  # noqa: E402
from jaxpp_flax.pretrained import exporting  # noqa: E402
from jaxpp_flax.pretrained.slices import StoredTensor  # noqa: E402
from jaxpp_flax.trainers import MeshOptions  # noqa: E402
from tests.trainers.models import Model, make_batch, mean_loss  # noqa: E402


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    read: dict[str, int] = {}
    original = StoredTensor.read

    def noted(self: StoredTensor, index: Any) -> np.ndarray:
        part = original(self, index)
        read[self.name] = read.get(self.name, 0) + part.nbytes
        return part

    StoredTensor.read = noted  # type: ignore[method-assign]
    trainer = PipelineTrainer(
        Model(4, rngs=nnx.Rngs(0)), optax.sgd(0.1), mean_loss, num_stages=4, num_microbatches=4, logging=False,
        mesh=MeshOptions(num_ranks=ranks, axes={"data": -1}), schedule="1f1b" if ranks == 4 else "interleaved_1f1b",
    )  # fmt: skip
    batch = make_batch(8)
    trainer.load_pretrained(folder / "in")
    trainer.compile(batch)
    trainer.export_pretrained(folder / "out", max_shard_bytes=1000)
    full = jax.process_count() // 2  # the first process of a stage
    if jax.process_index() == full:
        exporting.write_part = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    with pytest.raises(CheckpointSaveError, match=rf"failed: in process {full}: OSError: \[Errno 28\] No space left"):
        trainer.export_pretrained(folder / "lost", max_shard_bytes=1000)
    tell({"read": read, "loss": float(trainer.train_step(batch)["loss"])})


main()
