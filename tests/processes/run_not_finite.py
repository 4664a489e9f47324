"""Run by `test_trainer.py` as two processes: trainings whose first loss is not finite, and what each says of it."""

from __future__ import annotations

from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.trainers.errors import NonFiniteLossError  # noqa: E402


class Model(nnx.Module):
    """Two layers, with a logarithm of something negative before the second one, if asked for."""

    def __init__(self, poisoned: bool) -> None:
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([PipelineStage(nnx.Linear(4, 4, rngs=rngs), name=f"block_{i}") for i in range(2)])
        self.poisoned = poisoned

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.blocks[0](x)
        return self.blocks[1](jnp.log(-1.0 - x**2) if self.poisoned else x)


def main() -> None:
    good = {name: np.ones((4, 4), np.float32) for name in "xy"}
    bad = {**good, "y": np.full((4, 4), np.nan, np.float32)}
    for name, poisoned, batch, offset in [
        ("block", True, good, 0.0),
        ("leaf", False, bad, 0.0),
        ("loss", False, good, -1e9),
    ]:

        def loss_fn(model: Any, batch: Any, offset: float = offset) -> Any:
            return jnp.log(offset + 1e6 + (model(batch["x"]) - batch["y"]) ** 2).mean()

        trainer = PipelineTrainer(
            Model(poisoned), optax.sgd(0.1), loss_fn, num_stages=2, num_microbatches=2, logging=False
        )
        trainer.compile(batch)
        read = trainer.leaves_read(batch)
        assert read == {"x": jax.process_index() == 0, "y": jax.process_index() == 1}
        # What this process does not read, it has not loaded.
        partly = {k: v if read[k] else jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batch.items()}
        try:
            trainer.train_step(partly)
        except NonFiniteLossError as error:
            print(f"{name}: {error}", flush=True)


main()
