"""Run by `test_verify.py`: `verify` of a right pipeline, of one with a fault in one process, and of a bad state."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Any

from tests.processes.running import join_run, tell

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.verify import VerifyError, verify  # noqa: E402
from tests.verify.faults import MICROBATCHES, Fault, injected, sums  # noqa: E402

DIM, STAGES = 6, int(sys.argv[1])


class Skipping(nnx.Module):
    """The last block reads the embedded inputs of the first one, and the first block's weights are the head."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(DIM, DIM, rngs=rngs)
        self.blocks = nnx.List(
            [PipelineStage(nnx.Linear(DIM, DIM, rngs=rngs), name=f"block_{i}") for i in range(STAGES)]
        )

    def __call__(self, x: Any) -> Any:
        y = before = self.first(x)
        for block in self.blocks:
            y = jax.numpy.tanh(block(y))
        return self.first(y + before)


def loss_fn(model: Any, batch: Any) -> Any:
    """The mean of squares, and a metric."""
    y = model(batch["x"])
    return (y**2).mean(), {"largest": abs(y).max()}


trainer = PipelineTrainer(
    Skipping(),
    optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    loss_fn,
    num_stages=STAGES,
    num_microbatches=MICROBATCHES,
    logging=False,
)
batch = {"x": np.random.default_rng(0).normal(size=(4 * MICROBATCHES, DIM)).astype(np.float32)}
before = float(trainer.evaluate([batch])["loss"])
right = verify(trainer, batch)
found: dict[str, Any] = {"right": str(right), "agrees": right.agrees, "rows": len(right.rows)}
found["facts"] = right.facts["processes"]
found["holders"] = sorted({row.process for row in right.rows})
found["same loss"] = before == float(trainer.evaluate([batch])["loss"])

executables = trainer.steps
compile_watched = executables.like_training
fault = Fault("", sums(1, lambda old, new, _: 2 * new - old), (), ())
with ExitStack() as stack:

    def with_fault(function: Any, microbatches: Any) -> Any:
        """Compile the watched step, with the fault in it."""
        compiled = compile_watched(function, microbatches)
        stack.enter_context(injected(fault, compiled))
        return compiled

    executables.like_training = with_fault
    stack.enter_context(injected(fault, trainer.compile(batch)))
    wrong = verify(trainer, batch)
executables.like_training = compile_watched
assert wrong.first is not None, wrong
found["wrong"] = [wrong.sentence, wrong.first.kind, wrong.first.block, wrong.first.process]

trainer.set_weights(jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), trainer.abstract_model))
try:
    verify(trainer, batch)
except VerifyError as error:
    found["not finite"] = str(error)
tell(found)
