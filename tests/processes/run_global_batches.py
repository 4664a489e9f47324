"""Run by `test_global_batches.py`: batches that are `jax.Array`s over the processes give what whole batches give.

Usage: run_global_batches.py FOLDER
"""

from __future__ import annotations

import faulthandler
import sys
from pathlib import Path
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.trainers import Checkpoints, Inference  # noqa: E402
from jaxpp_flax.trainers.errors import BatchError  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402


def loss_fn(model: Any, batch: Any) -> Any:
    """Each example has a weight of its own, and the first stage reads another leaf than the last."""
    return (((model(batch["x"] * batch["gain"]) - batch["y"]) ** 2).mean(-1) * batch["weight"]).sum(), batch[
        "weight"
    ].sum()


def trainer(checkpoints: Any = None) -> PipelineTrainer:
    """From the same seed each time; two devices a stage."""
    layers = [PipelineStage(nnx.Linear(6, 6, rngs=nnx.Rngs(i))) for i in range(2)]
    return PipelineTrainer(
        nnx.Sequential(*layers), optax.adam(1e-2), loss_fn, num_stages=2, num_microbatches=4, mesh={"data": 2},
        inference=Inference(predict_fn=lambda model, batch: model(batch["x"])), logging=False, checkpoints=checkpoints,
    )  # fmt: skip


def make_batch(seed: int, size: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(2, size, 6)).astype(np.float32)
    return {"x": x, "y": y, "weight": rng.random(size).astype(np.float32), "gain": np.float32(rng.random())}


def on(sharding: NamedSharding, batch: Any) -> Any:
    """As a loader makes it: each process gives the rows of its own devices."""

    def one(leaf: Any) -> Any:
        if not leaf.ndim:
            return leaf
        indices: Any = sharding.addressable_devices_indices_map(leaf.shape)
        rows = sorted({row for index in indices.values() for row in range(*index[0].indices(leaf.shape[0]))})
        return jax.make_array_from_process_local_data(sharding, leaf[rows], leaf.shape)

    return jax.tree.map(one, batch)


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    whole = trainer()
    mesh = whole.mesh.jax_mesh  # type: ignore[union-attr]
    devices = np.array(jax.devices())
    shardings = {
        "the trainer's mesh": NamedSharding(mesh, P("data")),
        "all devices": NamedSharding(Mesh(devices, ("i",)), P("i")),
        "in another order": NamedSharding(Mesh(devices[::-1], ("i",)), P("i")),
        "on explicit axes": NamedSharding(Mesh(devices, ("i",), axis_types=(AxisType.Explicit,)), P("i")),
        "replicated": NamedSharding(mesh, P()),
    }
    batches = [make_batch(seed) for seed in range(3)]
    expected = whole.fit(batches, eval_data=batches[:1])
    outputs = whole.predict(batches[0])
    for name, sharding in shardings.items():
        other, given = trainer(), [on(sharding, batch) for batch in batches]
        metrics = other.fit(given, eval_data=given[:1])
        assert metrics == expected, (name, metrics, expected)
        np.testing.assert_array_equal(other.predict(given[0]), outputs)
        tree_allclose(*(nnx.state(of.gather_model(), nnx.Param) for of in (other, whole)), rtol=0, atol=0)

    # A leaf on the devices of the stage that reads it; the other stage's processes have its shape.
    ranks = [NamedSharding(of, P("data")) for of in whole.mesh.unstack]  # type: ignore[union-attr]
    places = {"x": ranks[0], "y": ranks[1], "weight": ranks[1]}

    def where_it_is_read(name: str, leaf: Any) -> Any:
        if name in places and not places[name].addressable_devices:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return on(places[name], leaf) if name in places else leaf

    other = trainer()
    other.fit([{name: where_it_is_read(name, leaf) for name, leaf in batch.items()} for batch in batches])
    tree_allclose(*(nnx.state(of.gather_model(), nnx.Param) for of in (other, whole)), rtol=0, atol=0)

    half = NamedSharding(Mesh(devices[[0, -1]], ("i",)), P("i"))
    x = batches[0]["x"]
    odd = {**batches[0], "x": jax.make_array_from_callback(x.shape, half, lambda index: x[index], dtype=x.dtype)}
    for what, call in (
        ("half", lambda: trainer().train_step(odd)),
        ("rows", lambda: trainer().train_step(on(shardings["all devices"], batches[0]), global_batch_size=16)),
    ):
        try:
            call()
        except BatchError as error:
            print(f"{what}: {error}", flush=True)

    # A run that begins at an earlier step: the processes go back together.
    folder = Path(sys.argv[1])
    data = [make_batch(seed) for seed in range(8)]
    trainer(Checkpoints(folder, every=2)).fit(data, steps=6)
    back = trainer(Checkpoints(folder, every=2))
    back.fit([on(shardings["all devices"], batch) for batch in data], steps=5, resume=2)
    straight = trainer()
    straight.fit(data, steps=5)
    tree_allclose(*(nnx.state(of.gather_model(), nnx.Param) for of in (back, straight)), rtol=0, atol=0)
    print(f"directory: {sorted(path.name for path in folder.iterdir())}", flush=True)
    print("all done", flush=True)


main()
