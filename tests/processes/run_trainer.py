"""Run by `test_trainer.py` as several processes: `PipelineTrainer`, and as one: what it found, as JSON.

Usage: run_trainer.py [data]
"""

from __future__ import annotations

import faulthandler
import sys
from typing import Any

from jaxpp_flax.trainers import Inference, MeshOptions
from tests.processes.running import join_run, tell

join_run()  # does nothing in a single process

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from tests.trainers.models import Chain, squared_error  # noqa: E402


class Block(nnx.Module):
    """Dense, BatchNorm, dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.norm(self.linear(x))))


def loss_fn(model: Any, batch: Any) -> Any:
    """Mean squared error, with a vector of metrics that is not small."""
    error = (model(batch["x"]) - batch["y"]) ** 2
    return error.mean(), {"by_feature": error.mean(0), "table": jnp.ones((40, 40)) * error.mean()}


def trainer(**arguments: Any) -> PipelineTrainer:
    """A trainer of the model, from the same seed each time."""
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    rngs = nnx.Rngs(0)
    return PipelineTrainer(
        Chain(PipelineStage(Block(rngs), name=f"block_{i}") for i in range(4)),
        tx,
        loss_fn,
        num_microbatches=4,
        logging=False,
        inference=Inference(
            eval_loss_fn=squared_error,
            predict_fn=lambda model, batch: model(batch["x"]),
        ),
        **arguments,
    )


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    rng = np.random.default_rng(11)
    batches = [{k: rng.normal(size=(16, 8)).astype(np.float32) for k in ("x", "y")} for _ in range(6)]
    axes = {"data": -1} if "data" in sys.argv else {}
    ranks = 2 if "data" in sys.argv else jax.device_count()
    interleaved = 4 % ranks == 0 and ranks < 4
    piped = trainer(
        num_stages=4 if interleaved else ranks,
        mesh=MeshOptions(num_ranks=ranks, axes=axes),
        schedule="interleaved_1f1b" if interleaved else "1f1b",
    )
    found: dict[str, Any] = {"losses": []}
    for _, metrics in piped.training_steps(batches):
        found["losses"].append(float(metrics["loss"]))
        assert np.asarray(metrics["table"]).shape == (40, 40)
    read = piped.leaves_read(batches[0])
    found["read"] = read
    # What this process does not read, it need not load.
    partly = {k: v if read[k] else jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in batches[0].items()}
    found["losses"].append(float(piped.train_step(partly)["loss"]))
    found["evaluated"] = {key: np.asarray(value).tolist() for key, value in piped.evaluate(batches).items()}
    found["predicted"] = np.asarray(piped.predict(batches[0])).tolist()
    found["fitted"] = piped.fit(batches, steps=4)["loss"]
    weights = nnx.state(piped.gather_model(), nnx.Param)
    found["weights"] = {
        jax.tree_util.keystr(path): np.asarray(leaf).tolist()
        for path, leaf in jax.tree_util.tree_leaves_with_path(weights)
    }
    tell(found)


main()
