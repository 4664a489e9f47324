"""Frozen parameters, and the moving average of the weights."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import ModelError, Training
from tests.helpers import slow, tree_allclose
from tests.matrix.harness import count
from tests.trainers import models as m

BATCH = m.make_batch(4)


def nnx_trainer(model=None, loss_fn=m.mean_loss, tx=None, **options):
    model = model or m.Model(2, rngs=nnx.Rngs(0))
    options = {"num_stages": 2, "num_microbatches": 2, "logging": False, **options}
    return PipelineTrainer(model, tx or optax.adam(0.1), loss_fn, **options)


def linen_trainer(**options):
    module = m.LinenModel(2)
    variables = module.init(jax.random.key(0), BATCH["tokens"])
    return variables, nnx_trainer(module, variables=variables, **options)


def accumulators(compiled):
    """Shapes of what is summed over the microbatches, without loss and metrics."""
    return [v.aval.shape for v in compiled._built.loops[0].results if v.aval.shape]


@pytest.mark.parametrize("kind", ["nnx", slow("linen")])
def test_frozen_parameters_have_no_gradient_and_no_accumulator(kind):
    frozen = {"nnx": ["embed", "blocks/0"], "linen": ["Embed_0", "LinenBlock_0/*"]}[kind]
    make = nnx_trainer if kind == "nnx" else lambda **options: linen_trainer(**options)[1]
    made = make(training=Training(frozen=frozen, ema_decay=0.75), assignment="even")

    def weights(model):
        if kind == "nnx":
            return {
                "/".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))
            }
        flat = jax.tree_util.tree_leaves_with_path(model.variables["params"])
        return {"/".join(k.key for k in path): np.asarray(leaf) for path, leaf in flat}

    before = weights(made.gather_model())
    compiled = made.compile(BATCH)
    made.train_step(BATCH)
    after, average = weights(made.gather_model()), weights(made.gather_model(ema=True))
    is_frozen = {path: path.startswith(("embed", "blocks/0", "Embed_0", "LinenBlock_0")) for path in before}
    assert sum(is_frozen.values()) == 5
    for path in before:
        assert np.array_equal(before[path], after[path]) == is_frozen[path], path
        tree_allclose(average[path], 0.75 * before[path] + 0.25 * after[path])
    trained = sorted(before[path].shape for path in before if not is_frozen[path])
    assert sorted(accumulators(compiled)) == trained
    assert count(compiled, "dot_general")["fwd_0"] == 2
    assert not any(name.startswith("bwd_0") for name in count(compiled, "dot_general")), "nothing to do backward there"
    assert len(jax.tree.leaves(made.state.opt_state)) == 1 + 2 * len(trained)


def test_a_parameter_behind_a_call_is_known_to_be_unused():
    def without_head(model, batch):
        x = model.embed(batch["tokens"])
        for block in model.blocks:
            x = block(x)
        return (x**2).mean()

    jitted = lambda model, batch: nnx.jit(without_head)(model, batch)  # noqa: E731
    for loss_fn in (without_head, jitted):
        with pytest.raises(
            ModelError, match=r"does not depend on 2 of the 11 parameters: head/\*\. .*frozen='head/\*'\)"
        ):
            nnx_trainer(loss_fn=loss_fn, training=Training(unused="error")).step_function(BATCH)
    nnx_trainer(loss_fn=without_head, training=Training(frozen="head")).step_function(BATCH)  # by choice


def test_refusals():
    with pytest.raises(ModelError, match=r"frozen: no parameter matches 'heads/\*'\. The parameters are blocks/0/"):
        nnx_trainer(training=Training(frozen=["embed", "heads/*"]))
    with pytest.raises(ModelError, match="has no parameters to train"):
        nnx_trainer(training=Training(frozen=lambda path: True))
    with pytest.raises(ValueError, match=r"gather_model\(ema=True\) needs an average .*ema_decay"):
        _ = nnx_trainer().gather_model(ema=True)
