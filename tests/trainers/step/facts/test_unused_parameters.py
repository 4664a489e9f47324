"""Parameters that the loss does not use: zero gradients as under plain JAX, and a place beside their neighbours."""

from __future__ import annotations

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.globs import covering_globs
from jaxpp_flax.trainers import Checkpoints, Logging, ModelError, Training, UnusedParametersWarning
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.sharing import sharing_steps

WIDTH = m.Layers.WIDTH
ONE = m.make_xy(8)
TWO = ONE | {"mask": np.ones(8, np.float32)}  # another structure, with a head of its own
TX = optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(1e-2, weight_decay=0.5))
ACCEPTED = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.UnusedParametersWarning")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.extra = nnx.Linear(3, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class TwoHeads(nnx.Module):
    """`head` and `head_two` are for batches of different structures; `extra` of the blocks is for none."""

    def __init__(self, marked=True):
        rngs = nnx.Rngs(0)
        blocks = [Block(rngs) for _ in range(2)]
        self.blocks = nnx.List([PipelineStage(block) for block in blocks] if marked else blocks)
        self.head, self.head_two = (nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(2))


def head_loss(model, batch):
    x = batch["x"]
    for block in model.blocks:
        x = block(x)
    return jnp.mean(((model.head_two if "mask" in batch else model.head)(x) - batch["y"]) ** 2)


def metric_loss(model, batch):
    """The last stage reads a part of the first block, for a metric alone."""
    return head_loss(model, batch), {"extra": jnp.mean(model.blocks[0].extra(batch["x"][..., :3]) ** 2)}


@sharing_steps("checkpoints")
def trainer(loss_fn=metric_loss, tx=TX, **options):
    options = {"num_stages": 2, "num_microbatches": 2, "logging": False, "assignment": "even", **options}
    return PipelineTrainer(TwoHeads(), tx, loss_fn, **options)


def plain(batches, tx=TX, loss_fn=head_loss):
    """The losses, and the parameters, optimizer state and average after steps under plain `jax.jit`."""
    graphdef, params, rest = nnx.split(TwoHeads(marked=False), nnx.Param, ...)

    @jax.jit
    def step(params, opt_state, average, batch):
        loss, grads = jax.value_and_grad(lambda params: loss_fn(nnx.merge(graphdef, params, rest), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return loss, params, opt_state, optax.incremental_update(params, average, 0.1)

    opt_state, average, losses = tx.init(params), params, []
    for batch in batches:
        loss, params, opt_state, average = step(params, opt_state, average, batch)
        losses.append(float(loss))
    return losses, params, opt_state, average


def assert_equal(made, expected):
    found = made.state.params, made.state.opt_state, made.state.ema
    for mine, theirs in zip(found, expected, strict=True):
        tree_allclose(jax.tree.map(np.asarray, jax.tree.leaves(mine)), jax.tree.leaves(theirs), rtol=1e-5)


def places(made):
    """The ranks of each parameter, of its moments and its average, by path."""
    state = made.state
    trees = [state.params, state.ema, *(s.mu for s in jax.tree.leaves(state.opt_state, is_leaf=_has_mu) if _has_mu(s))]
    found = {}
    for tree in trees:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
            found.setdefault(name, set()).add(leaf.mpmd_idxs)
    return found


def _has_mu(node):
    return hasattr(node, "mu")


BATCHES = [ONE, TWO, ONE, ONE, TWO]
OPTIONS = {
    "training": Training(ema_decay=0.9),
    "logging": Logging(metrics=("parameter_norm", "gradient_norm"), progress=False),
}


@functools.cache
def plain_of_batches():
    return plain(BATCHES)


@ACCEPTED
def test_steps_of_two_structures_equal_plain_jax():
    losses, *expected = plain_of_batches()
    made = trainer(**OPTIONS)
    np.testing.assert_allclose([float(made.train_step(batch)["loss"]) for batch in BATCHES], losses, rtol=1e-5)
    assert_equal(made, expected)
    for path, ranks in places(made).items():
        expected = {(0,) if path.startswith("blocks/0") else (1,)}
        if path.startswith("blocks/0/extra"):
            expected |= {(0, 1)}  # the parameter itself, which is read elsewhere too
        assert ranks == expected, f"{path}, its moments and its average lie beside its neighbours"
    np.testing.assert_allclose(made.evaluate([TWO])["loss"], nnx.jit(head_loss)(made.gather_model(), TWO), rtol=1e-5)


@ACCEPTED
def test_fit_and_its_checkpoints_have_them(tmp_path):
    _, *expected = plain_of_batches()
    checkpoints = Checkpoints(tmp_path, every=3)
    trainer(checkpoints=checkpoints, **OPTIONS).fit(BATCHES, steps=3)
    resumed = trainer(checkpoints=checkpoints, **OPTIONS)
    resumed.fit(BATCHES, steps=5, resume=True)
    assert_equal(resumed, expected)


def test_each_set_of_unused_parameters_is_told_once():
    made = trainer(head_loss)
    with pytest.warns(UnusedParametersWarning) as told:
        _ = [made.step_function(batch) for batch in (ONE, TWO, ONE)]
    texts = [str(warning.message) for warning in told]
    for text, head in zip(texts, ("head_two", "head"), strict=True):
        assert f"not depend on 3 of the 6 parameters: blocks/*/extra/*, {head}/kernel. Their gradients are zero" in text
        assert f"training=Training(frozen=['blocks/*/extra/*', '{head}/kernel'])" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(head_loss, training=Training(frozen=["blocks/*/extra/*", "head_two/*"])).step_function(ONE)


def test_what_is_refused():
    made = trainer(head_loss)
    for batch, head in ((ONE, "head_two"), (ONE, "head_two"), (TWO, "head")):  # in tests a warning is an error
        with pytest.raises(UnusedParametersWarning, match=rf"3 of the 6 .*extra/\*, {head}/kernel\. Their"):
            made.step_function(batch)
    with pytest.raises(ModelError, match="the loss depends on none of the 6 parameters, so nothing would be trained"):
        trainer(lambda model, batch: jnp.mean(batch["x"])).compile(ONE)


def test_one_glob_names_many():
    used = [f"encoder/layers/{i}/{name}" for i in range(12) for name in ("query/kernel", "key/kernel")]
    predictor = [f"predictor/layers/{i}/kernel" for i in range(38)] + ["predictor/mask_token"]
    assert covering_globs(predictor, used) == ["predictor/*"]
    biases = [f"encoder/layers/{i}/key/bias" for i in range(12)]
    assert covering_globs(biases, used) == ["encoder/layers/*/key/bias"]
    assert covering_globs(biases[:1], [*used, *biases[1:]]) == biases[:1]


@ACCEPTED
def test_a_batch_for_which_the_loss_calls_the_model_less_often():
    """The stages of the first batch end at blocks that the second one does not have."""

    def often_loss(model, batch):
        times = range(2 if "mask" in batch else 1)
        return sum(head_loss(model, {"x": batch["x"] + i, "y": batch["y"]}) for i in times)

    tx = optax.sgd(0.1)
    piped = trainer(often_loss, tx)
    losses = [float(piped.train_step(batch)["loss"]) for batch in (TWO, ONE)]
    expected, *_ = plain([TWO, ONE], tx, often_loss)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
