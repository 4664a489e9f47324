"""Frozen parameters, LoRA over a frozen base, and the moving average of the weights."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import ModelError, Training, UnusedParametersWarning
from tests.helpers import tree_allclose
from tests.matrix.harness import count
from tests.trainers import models as m

BATCH = m.make_xy(4)


def make_trainer(num_layers=2, loss_fn=m.squared_error, model=None, **options):
    options = {"num_stages": 2, "num_microbatches": 2, "logging": False, **options}
    return PipelineTrainer(model or m.Layers(num_layers), optax.adam(0.1), loss_fn, **options)


def accumulators(compiled):
    """Shapes of what is summed over the microbatches, without loss and metrics."""
    return [value.aval.shape for value in compiled.placed.loops[0].results if value.aval.shape]


def weights(model):
    return {"/".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def test_frozen_parameters_have_no_gradient_and_no_accumulator():
    made = make_trainer(4, training=Training(frozen=["layers/0/*", "layers/1"], ema_decay=0.75), assignment="even")
    before = weights(made.gather_model())
    compiled = made.compile(BATCH)
    made.train_step(BATCH)
    after, average = weights(made.gather_model()), weights(made.gather_model(ema=True))
    is_frozen = {path: path.startswith(("layers/0", "layers/1")) for path in before}
    assert sum(is_frozen.values()) == 4
    for path in before:
        assert np.array_equal(before[path], after[path]) == is_frozen[path], path
        tree_allclose(average[path], 0.75 * before[path] + 0.25 * after[path])
    trained = sorted(before[path].shape for path in before if not is_frozen[path])
    assert sorted(accumulators(compiled)) == trained
    assert count(compiled, "dot_general")["fwd_0"] == 2
    assert not any(name.startswith("bwd_0") for name in count(compiled, "dot_general")), "nothing to do backward there"
    assert len(jax.tree.leaves(made.state.opt_state)) == 1 + 2 * len(trained)


def test_lora_trains_its_factors_alone():
    """`nnx.LoRA` around a layer, as a user of Flax writes it; `add_lora` makes another class."""
    rngs, width = nnx.Rngs(0), m.Layers.WIDTH
    bases = [nnx.Linear(width, width, rngs=rngs) for _ in range(2)]
    model = m.Chain(PipelineStage(nnx.LoRA(width, 2, width, base_module=base, rngs=rngs)) for base in bases)
    made, plain = (make_trainer(model=model, training=Training(wrt=nnx.LoRAParam), num_stages=n) for n in (2, 1))
    assert sorted(accumulators(made.compile(BATCH))) == [(2, width), (2, width), (width, 2), (width, 2)]
    base = nnx.to_pure_dict(nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))))
    for _ in range(3):
        losses = [float(t.train_step(BATCH)["loss"]) for t in (made, plain)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    trained = nnx.state(made.gather_model(), nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    tree_allclose(nnx.to_pure_dict(trained), base, rtol=0, atol=0)
    assert losses[0] < float(m.squared_error(model, BATCH))


def test_a_parameter_behind_a_call_is_known_to_be_unused():
    def without_last(model, batch):
        return (model.layers[0](batch["x"]) ** 2).mean()

    jitted = lambda model, batch: nnx.jit(without_last)(model, batch)  # noqa: E731
    told = r"does not depend on 2 of the 4 parameters: layers/1/\*\. .*frozen='layers/1/\*'\)"
    for loss_fn in (without_last, jitted):
        with pytest.raises(UnusedParametersWarning, match=told):
            make_trainer(loss_fn=loss_fn, num_stages=1).step_function(BATCH)
    make_trainer(loss_fn=without_last, num_stages=1, training=Training(frozen="layers/1")).step_function(BATCH)


def test_refusals():
    with pytest.raises(ModelError, match=r"frozen: no parameter matches 'heads/\*'\. The parameters are layers/0/"):
        make_trainer(training=Training(frozen=["layers/0", "heads/*"]))
    with pytest.raises(ModelError, match="has no parameters to train"):
        make_trainer(training=Training(frozen=lambda path: True))
    with pytest.raises(ValueError, match=r"gather_model\(ema=True\) needs an average .*ema_decay"):
        _ = make_trainer().gather_model(ema=True)
