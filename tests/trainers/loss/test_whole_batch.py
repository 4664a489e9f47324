"""Losses in two parts: loss, gradients and state are those of plain `jax.jit` with the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxpp_flax import WholeBatchLoss
from jaxpp_flax.schedules import ResidualPlan, StageResiduals
from jaxpp_flax.trainers import (
    DynamicLossScale,
    Inference,
    LossError,
    Memory,
    MeshOptions,
    MicrobatchLossWarning,
    Precision,
    Training,
)
from tests.helpers import slow, slow_but, tree_allclose
from tests.trainers import two_towers as t

BATCH = t.pairs()
WEIGHTED = WholeBatchLoss(t.embed, t.weighted_info_nce)
FROZEN = Training(frozen=["text/*", "log_scale"])
COUNTED = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchStateWarning")
BATCH_NORM = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")


def explicit_mesh() -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return jax.sharding.Mesh(devices, ("stage", "data"), axis_types=(AxisType.Explicit,) * 2)


def residuals(recompute: bool, offload: float) -> Memory:
    each = StageResiduals(recompute=recompute, offload=offload)
    return Memory(residuals=ResidualPlan(stages=(each, each)))


LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b": {"num_stages": 4},
    "gpipe": {"num_stages": 2, "schedule": "gpipe"},
    "interleaved": {"num_stages": 4, "schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=2)},
    "zero_bubble": {"num_stages": 2, "schedule": "zero_bubble"},
    "zbv": {"num_stages": 4, "schedule": "zbv", "mesh": MeshOptions(num_ranks=2)},
    "one stage with data": {"num_stages": 1, "mesh": {"data": 2}},
    "remat, one stage": {"num_stages": 1, "memory": Memory(remat="full")},
    "recomputed": {"num_stages": 2, "memory": residuals(recompute=True, offload=0.0)},
    "one microbatch": {"num_stages": 2, "num_microbatches": 1},
}


@functools.cache
def contrastive_step() -> tuple[Any, Any, Any]:
    return t.whole_batch_step(t.CONTRASTIVE, BATCH)


def shallow() -> t.TwoTowers:
    """One block in each tower: the fewest that two stages take."""
    return t.TwoTowers(depth=1)


def parameters_of(trainer: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.params)]


def check_step(trainer: Any, before: Any, expected: tuple[Any, Any, Any], batch: Any = BATCH) -> dict[str, Any]:
    """Compare one step of SGD with rate 1 with the loss and the gradients of the whole batch."""
    metrics = trainer.train_step(batch)
    np.testing.assert_allclose(float(metrics["loss"]), float(expected[0]), rtol=1e-5)
    found = [np.asarray(b) - a for b, a in zip(jax.tree.leaves(before), parameters_of(trainer), strict=True)]
    tree_allclose(found, list(map(np.asarray, jax.tree.leaves(expected[1]))), rtol=1e-5, atol=1e-6)
    return metrics


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_whole_batch(layout):
    expected, trainer = contrastive_step(), t.trainer_of(**LAYOUTS[layout])
    metrics = check_step(trainer, nnx.state(t.TwoTowers(), nnx.Param), expected)
    np.testing.assert_allclose(float(metrics["found"]), float(t.CONTRASTIVE(t.TwoTowers(), BATCH)[1]["found"]))
    # The microbatches alone have another loss: fewer examples to tell apart.
    plain = nnx.jit(lambda model, batch: t.CONTRASTIVE(model, batch)[0])
    alone = [float(plain(t.TwoTowers(), jax.tree.map(lambda x, i=i: np.split(x, 4)[i], BATCH))) for i in range(4)]
    assert abs(np.mean(alone) / float(expected[0]) - 1) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 1}])
def test_explicit_meshes(options):
    trainer = t.trainer_of(num_stages=2, mesh=explicit_mesh(), **options)
    check_step(trainer, nnx.state(t.TwoTowers(), nnx.Param), contrastive_step())


def differ(image: Any, batch: Any) -> Any:
    """A loss of one tower alone: images should differ."""
    products = image @ image.T
    return (products**2).mean(), {"found": products.max()}


IMAGES = WholeBatchLoss(lambda model, batch: model.image(batch["image"]), differ)
TOGETHER = ("dropout", "batch_norm", "counted")


def towers(options: tuple[str, ...], depth: int) -> t.TwoTowers:
    given: dict[str, Any] = {option: 0.5 if option == "dropout" else True for option in options}
    model = t.TwoTowers(depth=depth, **given)
    if options == TOGETHER and depth > 1:  # one block with all of them is enough
        model.image.blocks[0].dropout = model.image.blocks[0].norm = None
    return model


@BATCH_NORM
@pytest.mark.parametrize(
    ("options", "stages"),
    [
        (TOGETHER, 2),
        *(slow(TOGETHER, stages) for stages in (1, 4)),
        *(slow((option,), 2) for option in ("dropout", "batch_norm", "counted")),
    ],
)
@COUNTED
def test_both_passes_have_the_same_keys_and_state_which_advances_once(options, stages):
    """The count is the number of microbatches, whose state is compared with the reference's."""
    make = lambda: towers(options, stages)  # noqa: E731
    more = {"training": FROZEN}
    expected = t.whole_batch_step(IMAGES, BATCH, make(), **more)
    trainer = t.trainer_of(IMAGES, make(), num_stages=stages, **more)
    check_step(trainer, jax.tree.map(np.asarray, trainer.state.params), expected)
    found, state = (
        {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
         if "image" in jax.tree_util.keystr(path) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)}
        for tree in (trainer.state.model_state, expected[2])
    )  # fmt: skip
    tree_allclose(found, state, rtol=1e-5, atol=1e-6)
    counts = [leaf for path, leaf in found.items() if "counted" in path]
    assert counts == [t.MICROBATCHES] * (stages if "counted" in options else 0)


@pytest.mark.parametrize("stages", slow_but((1, 2), 1))
def test_linen(stages):
    embed = lambda model, batch, training: model(batch, training=training)  # noqa: E731
    module, loss = t.LinenTower(), WholeBatchLoss(embed, differ)
    variables = jax.jit(module.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, BATCH)
    expected = t.whole_batch_step(loss, BATCH, module, variables=variables)
    trainer = t.trainer_of(loss, module, variables=variables, num_stages=stages)
    check_step(trainer, variables["params"], expected)

    @jax.jit
    def plain(params):
        return loss.loss_fn(module.apply({"params": params}, BATCH, training=False), BATCH)

    value, more = plain(trainer.gather_variables()["params"])
    found = trainer.evaluate([BATCH])
    np.testing.assert_allclose([found["loss"], found["found"]], [value, more["found"]], rtol=1e-5)


def test_weights_with_data_a_scaled_loss_its_average_and_a_step_that_is_skipped():
    scale = DynamicLossScale(initial=1024.0)
    training, precision = Training(ema_decay=0.75), Precision(loss_scale=scale, gradients=jnp.float32)
    options = {"num_stages": 2, "mesh": {"data": 2}, "training": training, "precision": precision}
    trainer = t.trainer_of(WEIGHTED, shallow(), **options)
    before = nnx.state(shallow(), nnx.Param)
    metrics = check_step(trainer, before, t.whole_batch_step(WEIGHTED, BATCH, shallow()))
    assert float(metrics["weight"]) == BATCH["weight"].sum()
    average = [
        0.75 * np.asarray(b) + 0.25 * a for b, a in zip(jax.tree.leaves(before), parameters_of(trainer), strict=True)
    ]
    tree_allclose([np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state.ema)], average)
    kept = parameters_of(trainer)
    metrics = trainer.train_step(BATCH | {"image": BATCH["image"] * np.float32(np.nan)})
    assert (float(metrics["skipped_step"]), float(trainer.state.loss_scale["scale"])) == (1.0, 512.0)
    tree_allclose(parameters_of(trainer), kept, rtol=0, atol=0)


def test_a_loss_scale_reaches_the_gradients_of_narrow_embeddings():
    """Without it, a gradient of an embedding below the smallest float16 would be zero."""

    def embed(model: Any, batch: Any) -> Any:
        return model.image(batch["image"]).astype(jnp.float16)

    loss = WholeBatchLoss(embed, lambda image, batch: 1e-8 * image.astype(jnp.float32).sum())
    trainer = t.trainer_of(
        loss, shallow(), tx=optax.sgd(1e8), training=FROZEN,
        precision=Precision(loss_scale=2.0**16),
    )  # fmt: skip
    before = parameters_of(trainer)
    trainer.train_step(BATCH)
    assert np.float16(1e-8) == 0.0
    assert max(np.abs(a - b).max() for a, b in zip(parameters_of(trainer), before, strict=True)) > 0.1


def test_integers_constants_of_the_batch_and_what_embed_fn_asks_for():
    """Embeddings may hold what has no gradient; the second part gets scalars of the batch as scalars."""

    def embed(model: Any, batch: Any, *, training: bool, rngs: nnx.Rngs) -> Any:
        image = model.image(batch["image"])
        noisy = image + jax.random.normal(rngs(), image.shape) if training else image
        return {"image": noisy, "class": jnp.argmax(batch["image"], -1)}

    def loss_fn(found: Any, batch: Any) -> Any:
        assert (batch["margin"].shape, found["class"].shape) == ((), batch["image"].shape[:1])
        same = found["class"][:, None] == found["class"]
        distances = jnp.square(found["image"][:, None] - found["image"]).sum(-1)
        return jnp.where(same, distances, jnp.maximum(batch["margin"] - distances, 0)).mean(), {}

    loss, batch = WholeBatchLoss(embed_fn=embed, loss_fn=loss_fn), {**BATCH, "margin": np.float32(1.5)}
    expected = t.whole_batch_step(loss, batch, shallow(), training=FROZEN)
    trainer = t.trainer_of(loss, shallow(), num_stages=2, training=FROZEN)
    plain = float(nnx.jit(lambda model: loss(model, batch, training=False, rngs=None)[0])(shallow()))
    np.testing.assert_allclose(trainer.evaluate([batch])["loss"], plain, rtol=1e-5)
    check_step(trainer, jax.tree.map(np.asarray, trainer.state.params), expected, batch)
    assert abs(float(expected[0]) / plain - 1) > 0.1, "the noise matters"


@pytest.mark.parametrize(
    ("loss", "options"),
    [(WEIGHTED, {"num_stages": 2, "mesh": {"data": 2}}), slow(t.CONTRASTIVE, {})],
    ids=["weighted", "contrastive"],
)
def test_an_evaluation_compares_all_examples_of_a_batch(loss, options):
    """Where neither microbatches nor data-parallel devices divide it, and where training has another kind of loss."""

    def mean(model: Any, batch: Any) -> Any:
        return jnp.mean((model.image(batch["image"]) - model.text(batch["text"])) ** 2) * model.log_scale[...]

    trainer = t.trainer_of(mean, shallow(), inference=Inference(eval_loss_fn=loss), **options)
    batches = [t.pairs(size, seed) for seed, size in enumerate((10, 7))]
    plain = nnx.jit(lambda model, batch: loss(model, batch))
    values = [plain(shallow(), batch) for batch in batches]
    found = trainer.evaluate(batches)
    if loss is WEIGHTED:  # sums, and weights
        expected = [sum(float(total) for total, _ in values) / sum(float(weight) for _, weight in values)]
    else:  # batches count by their size
        expected = np.average([[float(value), float(more["found"])] for value, more in values], axis=0, weights=(10, 7))
    np.testing.assert_allclose([found[name] for name in ("loss", "found")[: len(expected)]], expected, rtol=1e-5)


def test_both_passes_have_the_stages_that_training_has_and_keep_embeddings_alone_between_them():
    """Stages are chosen by the work of training. Neither activations nor the matrix of all pairs wait for the end."""

    def mean(model: Any, batch: Any) -> Any:
        image, text, scale = t.embed(model, batch)
        return jnp.mean(image * text * scale)

    examples, made = 256, []
    for loss in (mean, t.CONTRASTIVE):
        trainer = t.trainer_of(loss, num_stages=2, num_microbatches=8, assignment="balanced")
        made.append(trainer.compile(t.pairs(examples)))
    assert all(block.backward for block in trainer.plan.blocks)
    loops = made[1].placed.loops
    marks = ["image_0", "image_1", "text_0", "text_1"]
    assert [mark.name for mark in loops[0].body.marks] == marks
    (cut,) = loops[1].cuts  # which one is cheapest depends on the version's operations
    assert loops[0].cuts == (cut,)
    assert [type(loop.schedule).__name__ for loop in loops] == ["ForwardOnly", "Std1F1B"]
    assert made[1].stages[0].blocks == tuple(marks[: cut + 1])
    assert made[1].stages[0].activation_bytes > 0
    peaks = [[rank.peak_bytes for rank in compiled.memory_analysis()] for compiled in made]
    embeddings = 2 * examples * t.WIDTH * 4
    assert peaks[1][0] <= peaks[0][0]
    # Beside them wait a few numbers, as many as a version of JAX makes; the matrix has 256 KiB.
    assert peaks[1][1] - peaks[0][1] <= embeddings + 1024


@pytest.mark.parametrize(
    ("embed", "said"),
    [
        (lambda m, b: m.image(b["image"]).T, "embed_fn returned with shape (8, 4) for a microbatch of 4 examples"),
        (lambda m, b: {"e": m.image(b["image"]), "m": m.image(b["image"]).mean()}, "embed_fn returned ['m'], a scalar"),
    ],
    ids=["shape", "scalar"],
)
def test_embeddings_that_do_not_fit_are_refused_before_the_first_step(embed, said):
    loss = WholeBatchLoss(embed, lambda e, batch: sum(map(jnp.sum, jax.tree.leaves(e)), start=jnp.float32(0)))
    trainer = t.trainer_of(loss, num_stages=2, training=FROZEN)
    for call in (trainer.compile, lambda batch: trainer.evaluate([batch])):
        with pytest.raises(LossError) as error:
            call(BATCH)
        assert said in str(error.value)


def test_an_evaluation_without_embeddings_is_refused():
    nothing = Inference(eval_loss_fn=WholeBatchLoss(lambda model, batch: (), lambda embeddings, batch: 0.0))
    trainer = t.trainer_of(num_stages=2, inference=nothing)
    with pytest.raises(LossError, match=r"embed_fn returned no array: \(\)\. Return the embeddings"):
        trainer.evaluate([BATCH])


def test_parts_that_are_no_functions_of_two_arguments_are_refused():
    nothing: Any = None
    of_the_model: Any = lambda model, embeddings, batch: embeddings  # noqa: E731
    with pytest.raises(TypeError, match=r"embed_fn must be a function of \(model, microbatch\), got NoneType"):
        WholeBatchLoss(nothing, t.info_nce)
    with pytest.raises(TypeError, match=r"called as embed_fn\(model, microbatch\), but .* takes \(model\)"):
        WholeBatchLoss(lambda model: model, t.info_nce)
    with pytest.raises(TypeError, match=r"called as loss_fn\(embeddings, batch\), .* is returned by embed_fn"):
        WholeBatchLoss(t.embed, of_the_model)


def test_an_embed_fn_that_combines_examples_is_warned_of():
    for mix in (lambda h: h - h.mean(0), lambda h: h / h.sum(0)):

        def embed(model: Any, batch: Any, mix: Any = mix) -> Any:
            return jax.tree.map(lambda h: mix(h) if h.ndim else h, t.embed(model, batch))

        said = r"embed_fn combines the examples of a microbatch\. It sees one of 4 microbatches"
        with pytest.warns(MicrobatchLossWarning, match=said) as found:
            t.trainer_of(WholeBatchLoss(embed, t.info_nce)).step_function(BATCH)
        assert len(found) == 1
