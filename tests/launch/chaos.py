"""Trains as several processes, one of which gets into trouble: `-m tests.launch.chaos SETTINGS`, launched.

SETTINGS is JSON: `directory`, `steps`, `resume`, `stages`, options of the `checkpoints`, and of the trouble in the
first life of the run `kind`, `process` and `step`. Every process prints each step's loss, and at the end (or always,
for `every`) a digest of all of its state.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

print("pid", os.getpid(), flush=True)

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray  # noqa: E402
from jaxpp_flax.processes.group import process_group  # noqa: E402
from jaxpp_flax.trainers import Callback, Checkpoints  # noqa: E402
from tests.checkpoint import program  # noqa: E402
from tests.trainers.models import squared_error  # noqa: E402

SETTINGS: dict[str, Any] = json.loads(sys.argv[1]) if __name__ == "__main__" else {}
KIND, STEP = SETTINGS.get("kind"), SETTINGS.get("step", 0)


def is_struck(kind: str) -> bool:
    """Whether this process is the one, or one of those, that this happens to now."""
    struck = kind == KIND and SETTINGS["process"] in (jax.process_index(), None) and process_group().attempt == 1
    if struck:
        print("in trouble", flush=True)
    return struck


def digest(tree: Any) -> str:
    """Of what this process holds of the state, every bit of it."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = leaf.to_mpmd_local_array if isinstance(leaf, MpmdArray) else leaf
        for part in parts if isinstance(parts, list) else [] if parts is None else [parts]:
            if isinstance(part, jax.Array) and jax.dtypes.issubdtype(part.dtype, jax.dtypes.prng_key):
                part = jax.random.key_data(part)
            shards = [shard.data for shard in part.addressable_shards] if isinstance(part, jax.Array) else [part]
            found.update(repr((path, [np.asarray(shard).tobytes() for shard in shards])).encode())
    return found.hexdigest()[:16]


class Says(Callback):
    """Says each step's loss to the last bit, and gets into trouble."""

    def on_step(self, trainer: Any, record: Any) -> None:
        time.sleep(0.03)  # a fault at a random moment is to come before many steps are done
        if SETTINGS.get("every"):
            print(f"state {record.step} {digest(trainer.state)}", flush=True)
        if record.step == STEP:
            if is_struck("callback"):
                raise RuntimeError(f"chaos in the callback of process {jax.process_index()}")
            if is_struck("exit"):
                os._exit(3)
            if is_struck("full disk"):
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))
            if is_struck("read-only directory"):
                refuse_to_write(SETTINGS["directory"])

    def on_metrics(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        print(f"step {step} loss {float(metrics['loss']).hex()}", flush=True)


def refuse_to_write(directory: str) -> None:
    """As a file system that has become read-only; `chmod` would not stop root."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        )
        if writes and str(arguments[0]).startswith(directory):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))

    sys.addaudithook(audit)


def batches() -> Iterator[Any]:
    """The same batches each time, up to the one that cannot be read."""
    for number, batch in enumerate(program.batches(), 1):
        if number == STEP and is_struck("data"):
            raise RuntimeError(f"chaos in the data of process {jax.process_index()}")
        yield batch


def loss_fn(model: Any, batch: Any) -> Any:
    if is_struck("loss"):
        raise RuntimeError(f"chaos in the loss of process {jax.process_index()}")
    return squared_error(model, batch)


def main() -> None:
    count = jax.process_count()
    directory = SETTINGS["directory"]
    checkpoints = None if directory is None else Checkpoints(directory, **SETTINGS.get("checkpoints", {}))
    stages = SETTINGS.get("stages", count)  # with fewer of them, each has several processes
    mesh = {} if stages == count else {"data": count // stages}
    trainer = program.make_trainer(checkpoints, stages=stages, depth=count, loss=loss_fn, mesh=mesh)
    print("compiling", flush=True)
    trainer.fit(batches(), steps=SETTINGS["steps"], resume=SETTINGS["resume"], callbacks=[Says()])
    print(f"state {trainer.step} {digest(trainer.state)}", flush=True)


if __name__ == "__main__":
    main()
