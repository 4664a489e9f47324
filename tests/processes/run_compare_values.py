"""What differs between two processes is found: weights, batches, arguments and constants. Prints what was said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxpp_flax.trainers import Checkpoints, Inference
from tests.processes.running import join_run, run_case

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineTrainer  # noqa: E402
from jaxpp_flax.api import MpmdMesh, Std1F1B, mark_stage_end, mpmd_jit_with_loop, treduce  # noqa: E402
from jaxpp_flax.processes.comparison import ValuesMismatchError  # noqa: E402
from tests.trainers.models import Layers, squared_error  # noqa: E402

ME = jax.process_index()


def trainer(seed: int = 0, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        Layers(rngs=nnx.Rngs(seed)), optax.sgd(0.1), squared_error, num_stages=2, num_microbatches=4, logging=False,
        inference=Inference(predict_fn=lambda model, batch: model(batch["x"])), **options,
    )  # fmt: skip


def batches(count: int, *, other: int | None = None, leaf: str = "y") -> list[dict[str, np.ndarray]]:
    """The same in both processes, but for one leaf of batch `other`."""
    rng = np.random.default_rng(0)
    drawn = [{name: rng.normal(size=(8, 4)).astype(np.float32) for name in "xy"} for _ in range(count)]
    if other is not None and ME:
        drawn[other][leaf] = drawn[other][leaf] + np.float32(1e-6)
    return drawn


def left_out(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Each process has its own leaf alone."""
    mine = "xy"[ME]
    return {
        name: leaf if name == mine else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in batch.items()
    }


def by_hand(scale: float, offset: float) -> Any:
    """A step of two stages that reads `scale` on both, and closes over an array."""
    offsets = jnp.arange(4.0) + offset

    def step(params: list[jax.Array], scale: Any, batch: Any) -> Any:
        def loss(params: list[jax.Array], x: Any) -> Any:
            return (mark_stage_end((x + offsets) @ params[0] * scale) @ params[1] * scale).sum()

        return treduce(lambda x: jax.value_and_grad(loss)(params, x), batch, schedule=Std1F1B(2))

    mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()), ("stage",)), "stage")
    return mpmd_jit_with_loop(step, mesh)([jnp.eye(4)] * 2, jnp.float32(scale), np.ones((4, 2, 4), np.float32))


def case(name: str, function: Callable[[], Any]) -> None:
    run_case(name, function, ValuesMismatchError)


case("weights", lambda: trainer(ME).fit(batches(2)))
case("first batch", lambda: trainer().fit(batches(3, other=0)))
third = trainer()
case("third batch", lambda: third.fit(batches(6, other=2)))
print(f"steps {third.step}")
case("last batch", lambda: trainer().fit(batches(7, other=6, leaf="x")))
directory = Path(sys.argv[1])
case("before a save", lambda: trainer(checkpoints=Checkpoints(directory, every=1)).fit(batches(6, other=2)))
print(f"saved {sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())}")
good = trainer()
case("equal", lambda: good.fit(batches(5)))
case("left out", lambda: trainer().fit([left_out(batch) for batch in batches(5)]))
case("evaluation", lambda: good.evaluate(batches(3, other=1)))
case("prediction", lambda: good.predict(batches(1, other=0)[0]))
case("argument", lambda: by_hand(scale=1.0 + ME, offset=0.0))
case("constant", lambda: by_hand(scale=1.0, offset=float(ME)))
case("equal arguments", lambda: by_hand(scale=1.0, offset=0.0))
