"""Run by `test_rows.py` as four processes: two stages, each of two of them, that load the rows they read alone."""

from __future__ import annotations

import faulthandler
from typing import Any

from jaxpp_flax.trainers import Inference
from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.processes.comparison import ValuesMismatchError  # noqa: E402
from jaxpp_flax.trainers.data.batch_sharding import own_rows  # noqa: E402
from jaxpp_flax.trainers.errors import BatchError  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402

BATCH, MICROBATCHES = 24, 3


def loss_fn(model: Any, batch: Any) -> Any:
    """The mask is read by both stages' processes: `x` and the constant `gain` by the first alone, `y` by the last."""
    error = (model(batch["x"] * batch["gain"] * batch["mask"][:, None]) - batch["y"]) ** 2
    return (error.mean(-1) * batch["mask"]).sum(), batch["mask"].sum()


def trainer() -> PipelineTrainer:
    """From the same seed each time."""
    layers = [PipelineStage(nnx.Linear(6, 6, rngs=nnx.Rngs(i))) for i in range(2)]
    return PipelineTrainer(
        nnx.Sequential(*layers),
        optax.adam(1e-2),
        loss_fn,
        num_stages=2,
        num_microbatches=MICROBATCHES,
        mesh={"data": 2},
        inference=Inference(predict_fn=lambda model, batch: model(batch["x"])),
        logging=False,
    )


def make_batch(seed: int) -> dict[str, np.ndarray]:
    """Integers, bfloat16 and float64 (which JAX makes float32) among them."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(BATCH, 6)),
        "y": rng.normal(size=(BATCH, 6)).astype(jnp.bfloat16),
        "mask": rng.integers(0, 3, BATCH),
        "gain": np.asarray(rng.normal()),
    }


def refused(function: Any) -> str:
    """The error's text."""
    try:
        function()
    except (BatchError, ValuesMismatchError) as error:
        return str(error).replace("\n", " ")
    raise AssertionError("nothing was refused")


def check_inference(by_rows: PipelineTrainer, whole: PipelineTrainer) -> None:
    """Batches of 16 cannot be cut into 3 microbatches: these are two, of other rows than in training."""
    held_out = [jax.tree.map(lambda leaf: leaf[:16] if leaf.ndim else leaf, make_batch(seed)) for seed in (8, 9)]
    process, nothing = jax.process_index(), np.zeros(0, np.int64)
    mine = np.arange(16).reshape(2, 2, 4)[:, process % 2].ravel()
    rows = by_rows.rows_read(held_out[0], "evaluate")
    np.testing.assert_array_equal(rows["x"], mine if process < 2 else nothing)
    np.testing.assert_array_equal(rows["y"], mine if process >= 2 else nothing)
    np.testing.assert_array_equal(rows["mask"], mine)
    parts = [{key: batch[key][rows[key]] for key in batch} for batch in held_out]
    assert by_rows.evaluate(parts, global_batch_size=16) == whole.evaluate(held_out)
    by_fit = by_rows.fit([make_batch(4)], eval_data=parts, eval_global_batch_size=16)
    assert by_fit == whole.fit([make_batch(4)], eval_data=held_out)
    assert "eval_loss" in by_fit
    wrong = {**parts[0], "mask": parts[0]["mask"][:6]}
    print(f"evaluate: {refused(lambda: by_rows.evaluate([wrong], global_batch_size=16))}", flush=True)

    rows = by_rows.rows_read(held_out[0], "predict")
    np.testing.assert_array_equal(rows["x"], mine if process < 2 else nothing)
    assert rows["y"].size == rows["mask"].size == 0
    outputs = by_rows.predict({key: held_out[0][key][rows[key]] for key in rows}, global_batch_size=16)
    np.testing.assert_array_equal(outputs, whole.predict(held_out[0]))
    # One of three is left over by the two devices of a stage.
    three = jax.tree.map(lambda leaf: leaf[:3] if leaf.ndim else leaf, held_out[0])
    np.testing.assert_allclose(whole.predict(three), outputs[:3], rtol=1e-5, atol=1e-6)  # products of other shapes
    print(f"left over: {refused(lambda: by_rows.predict(three, global_batch_size=3))}", flush=True)


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    process = jax.process_index()
    batches = [make_batch(seed) for seed in range(4)]
    whole, by_rows = trainer(), trainer()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batches[0])
    rows = by_rows.rows_read(shapes)

    # Processes 0 and 1 are the first stage, 2 and 3 the last; of each microbatch of 8 each of them has 4 examples.
    mine = np.arange(BATCH).reshape(MICROBATCHES, 2, 4)[:, process % 2].ravel()
    nothing = np.zeros(0, np.int64)
    np.testing.assert_array_equal(rows["x"], mine if process < 2 else nothing)
    np.testing.assert_array_equal(rows["y"], mine if process >= 2 else nothing)
    np.testing.assert_array_equal(rows["mask"], mine)

    parts = [{key: batch[key][rows[key]] for key in batch} for batch in batches]
    compiled = by_rows.compile(parts[0], global_batch_size=BATCH)
    assert compiled is by_rows.compile(batches[0])
    # Laid out as JAX itself would.
    microbatches = jax.tree.map(lambda s: jax.ShapeDtypeStruct((MICROBATCHES, 8, *s.shape[1:]), s.dtype), shapes)
    microbatches["x"] = jax.ShapeDtypeStruct((MICROBATCHES, 8, 6), np.float32)
    microbatches["gain"] = jax.ShapeDtypeStruct((MICROBATCHES,), np.float32)
    microbatches["mask"] = jax.ShapeDtypeStruct((MICROBATCHES, 8), np.int32)
    laid_out = own_rows(compiled, parts[0], microbatches)
    (mask,) = laid_out["mask"]._parts.values()
    rank_mesh = by_rows.mesh.unstack[process // 2]  # type: ignore[union-attr]
    by_jax = jax.make_array_from_process_local_data(
        NamedSharding(rank_mesh, P(None, "data")), parts[0]["mask"].astype(np.int32).reshape(MICROBATCHES, 4), (3, 8)
    )
    assert mask.sharding.is_equivalent_to(by_jax.sharding, 2)
    for got, want in zip(mask.addressable_shards, by_jax.addressable_shards, strict=True):
        assert got.index == want.index
        np.testing.assert_array_equal(np.asarray(got.data), np.asarray(want.data))

    for name, wrong in (
        ("whole", batches[0]),
        ("half", {**parts[0], "mask": parts[0]["mask"][:6]}),
        ("shape", {**parts[0], "mask": shapes["mask"]}),
    ):
        print(f"{name}: {refused(lambda wrong=wrong: by_rows.train_step(wrong, global_batch_size=BATCH))}", flush=True)

    expected = whole.fit(batches[:3])["loss"]
    actual = by_rows.fit(parts[:3], global_batch_size=BATCH)["loss"]
    assert actual == expected, (actual, expected)
    # A leaf that is not read may be anything of its type; a shape stands for the whole.
    unread = "y" if process < 2 else "x"
    last = {**parts[3], unread: shapes[unread]}
    assert float(by_rows.train_step(last, global_batch_size=BATCH)["loss"]) == float(
        whole.train_step(batches[3])["loss"]
    )
    weights = [jax.tree.map(np.asarray, nnx.state(t.gather_model(), nnx.Param)) for t in (by_rows, whole)]
    tree_allclose(*weights, rtol=0, atol=0)

    check_inference(by_rows, whole)

    # Both stages read the mask: process 3 has another one than process 1, its like in the first stage.
    parts[3]["mask"] = parts[3]["mask"] + (process == 3)
    print(f"unlike: {refused(lambda: by_rows.fit(parts[3:], global_batch_size=BATCH))}", flush=True)
    print("all done", flush=True)


main()
