"""What bad input gets: an error before the first task runs, that names what, where and the remedy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState as LinenTrainState

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning import AssignmentError
from jaxpp_flax.schedules import Std1F1B
from jaxpp_flax.trainers import BatchError, LossError, MeshError, MeshOptions, ModelError, NonFiniteLossError
from jaxpp_flax.trainers.mesh import build_mesh
from tests.trainers import models as m

MODEL = m.Model(2, rngs=nnx.Rngs(0))
SMALL = m.Model(1, rngs=nnx.Rngs(0))


def trainer(model=None, loss_fn=m.mean_loss, **options):
    options = {"num_stages": 2, "num_microbatches": 4, "logging": False, **options}
    model = model if model is not None else MODEL
    return PipelineTrainer(model, options.pop("tx", optax.sgd(0.1)), loss_fn, **options)


def check_text(error):
    text = str(error.value)
    assert len(text) < 1200, "an error is a sentence or three"
    assert "lambda ;" not in text
    assert "let\n" not in text


class Empty(nnx.Module):
    def __call__(self, x):
        return x


class IntegerParameter(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.arange(3))


LINEN = m.LinenModel(2)
LINEN_STATE = LinenTrainState.create(apply_fn=LINEN.apply, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
NNX_OPTIMIZER = nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param)


class HuggingFaceModel:
    """A Linen module and its parameters in one object, as `transformers.FlaxPreTrainedModel` is."""

    def __init__(self):
        self.module, self.params = LINEN, {}


ARGUMENTS = {
    "stages": ({"num_stages": 0}, ValueError, r"num_stages=0: it must be a whole number of at least 1"),
    "microbatches": ({"num_microbatches": 2.5}, ValueError, r"num_microbatches=2\.5: it must be a whole number"),
    "devices": (
        {"num_stages": 9, "model": "nine"},
        MeshError,
        r"9 ranks \(groups of devices\) need at least as many devices, but there are 8 \(cpu\)\. Use at .*"
        r"start the script by `python -m jaxpp_flax\.launch -n 9 script\.py`.*launcher, --devices-per-process 9",
    ),
    "axes": (
        {"num_stages": 3, "mesh": {"data": -1}},
        MeshError,
        r"8 devices cannot be divided into 3 ranks with mesh axes {'data': -1}: 8 is no multiple of 3",
    ),
    "axes too large": (
        {"num_stages": 4, "mesh": {"data": 4}},
        MeshError,
        r"4 ranks with mesh axes {'data': 4} need 16 devices, but there are 8\. Use smaller axes.* -n 16 script",
    ),
    "mesh without stages": (
        {"mesh": jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))},
        MeshError,
        r"the mesh has axes {'x': 2}, but none called 'stage'",
    ),
    "mesh of another size": (
        {"mesh": build_mesh(4), "schedule": Std1F1B(2)},
        MeshError,
        r"the mesh has 4 ranks along 'stage', but the arguments need 2\. Make that axis 2 long",
    ),
    "mesh type": ({"mesh": 3}, TypeError, r"mesh must be a jax.sharding.Mesh, an MpmdMesh, .*, got int"),
    "schedule name": (
        {"schedule": "1f1"},
        ValueError,
        r"unknown schedule '1f1'\. Did you mean .*1f1b.*Known: ",
    ),
    "schedule type": ({"schedule": Std1F1B}, TypeError, r"schedule must be a name such as '1f1b' or a Schedule object"),
    "schedule stages": (
        {"schedule": Std1F1B(3)},
        ValueError,
        r"is for 3 stages, but num_stages=2\. Make them equal",
    ),
    "schedule ranks": (
        {"num_stages": 4, "mesh": MeshOptions(num_ranks=2)},
        ValueError,
        r"Std1F1B runs one stage on each rank, got num_stages=4 and num_ranks=2",
    ),
    "assignment": ({"assignment": "evn"}, AssignmentError, r"unknown assignment 'evn'"),
    "no parameters": ({"model": Empty()}, ModelError, r"the model Empty has no parameters to train"),
    "integer parameter": (
        {"model": IntegerParameter()},
        ModelError,
        r"the parameter .*table.* of IntegerParameter has dtype int32, which has no gradient",
    ),
    "model class": ({"model": m.Model}, TypeError, r"must be an instance of nnx.Module .*, got the class Model"),
    "model type": ({"model": "gpt"}, TypeError, r"must be an instance of nnx.Module .*, got str"),
    "linen without variables": ({"model": LINEN}, TypeError, r"LinenModel holds no variables of its own: pass"),
    "linen without params": (
        {"model": LINEN, "variables": {"batch_stats": {}}},
        ModelError,
        r"variables has the collections \['batch_stats'\], but no 'params'",
    ),
    "nnx with variables": ({"variables": {"params": {}}}, TypeError, r"variables= are for Linen models, but Model is"),
    "linen no parameters": ({"model": nn.Dropout(0.1), "variables": {"params": {}}}, ModelError, "has no parameters"),
    "optimizer": ({"tx": 0.1}, TypeError, r"tx must be an Optax optimizer such as optax.adamw\(3e-4\), got float"),
    "nnx.Optimizer as optimizer": (
        {"tx": NNX_OPTIMIZER},
        TypeError,
        r"got Optimizer\. Pass the Optax optimizer that it holds, its `\.tx`\. The trainer keeps a state of its own",
    ),
    "TrainState as optimizer": ({"tx": LINEN_STATE}, TypeError, r"got TrainState\. Pass the Optax .* its `\.tx`\."),
    "nnx.Optimizer as model": (
        {"model": NNX_OPTIMIZER},
        TypeError,
        r"got Optimizer\. Pass the module that it updates as the model, and its `\.tx` as the optimizer",
    ),
    "TrainState as model": (
        {"model": LINEN_STATE},
        TypeError,
        r"got TrainState\. Pass the Linen module .* with variables={'params': state\.params}, and its `\.tx`",
    ),
    "Hugging Face's model": (
        {"model": HuggingFaceModel()},
        TypeError,
        r"got HuggingFaceModel\. Pass .*: `model\.module`, with variables={'params': model\.params}\.",
    ),
    "loss of three": (
        {"loss_fn": lambda params, batch, key: 0.0},
        TypeError,
        r"loss_fn is called as loss_fn\(model, batch\), but .* takes \(params, batch, key\)\. Give it two arguments",
    ),
    "loss": ({"loss_fn": 3}, TypeError, r"loss_fn must be a function of \(model, batch\), got int"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case):
    options, kind, text = ARGUMENTS[case]
    options = dict(options)
    if options.get("model") == "nine":
        options["model"] = m.Model(9, rngs=nnx.Rngs(0))
    with pytest.raises(kind, match=text) as error:
        trainer(**options)
    check_text(error)


BATCHES = {
    "not divisible": (
        m.make_batch(10),
        r"a batch of 10 examples cannot be cut into num_microbatches=4 equal parts \(batch\['mask'\] has shape "
        r"\(10, 5\)\)\. Use a batch of 8 or 12",
    ),
    "different sizes": (
        {**m.make_batch(8), "mask": np.ones((6, m.LENGTH), np.float32)},
        r"different leading sizes \(batch\['mask'\]: 6, batch\['targets'\]: 8, batch\['tokens'\]: 8\)",
    ),
    "scalars alone": ({"rate": np.float32(1)}, r"nothing but the scalar batch\['rate'\]\. At least one leaf needs the"),
    "no array": ({**m.make_batch(8), "id": "x"}, r"batch\['id'\] is a str, not an array"),
    "of another library": (
        {**m.make_batch(8), "x": type("Tensor", (), {"shape": (8,), "dtype": "float32"})()},
        r"batch\['x'\] is a tests Tensor, which JAX does not take\. Let the loader give NumPy arrays",
    ),
    "numbers": ({**m.make_batch(8), "w": [1.0] * 8}, r"batch\['w'\] is a list of 8 numbers.*`np\.asarray`.*in a dict"),
    "rows": ({**m.make_batch(8), "w": [[1, 2]] * 8}, r"batch\['w'\] is a list of 8 lists.*`np\.asarray`"),
    "a tuple": ((np.ones((8, 2)), tuple(np.ones(8))), r"batch\[1\] is a tuple of 8 numbers.*`np\.asarray`"),
    "empty": ({}, r"the batch holds no array"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches(case):
    batch, text = BATCHES[case]
    with pytest.raises(BatchError, match=text) as error:
        trainer().train_step(batch)
    check_text(error)


def test_batch_and_data_parallel_devices():
    with pytest.raises(BatchError, match=r"a microbatch of 1 examples \(4 in num_microbatches=4 parts\) cannot be"):
        trainer(mesh={"data": 2}).train_step(m.make_batch(4))


LOSSES = {
    "not a scalar": (m.token_losses, r"a loss of shape \(2, 5\), which is not a scalar\. Reduce it first"),
    "weight not a scalar": (
        lambda model, batch: (m.mean_loss(model, batch), batch["mask"]),
        r"a weight of shape \(2, 5\), which is not a scalar",
    ),
    "none": (lambda model, batch: None, r"the loss function returned None\. Return the mean loss"),
    "dict": (lambda model, batch: {"loss": 1.0}, r"the loss function returned a dict of 'loss'\. Return the mean loss"),
    "three": (lambda model, batch: (1.0, 2.0, 3.0), r"returned \(a float, a float, a float\)\. Return"),
    "reserved": (
        lambda model, batch: (m.mean_loss(model, batch), {"loss": 1.0}),
        r"a metric called 'loss', a name that is reserved",
    ),
    "metric": (
        lambda model, batch: (m.mean_loss(model, batch), {"a": "x"}),
        r"returned the metric 'a' as a str\. A metric is an array",
    ),
    "parameters by name": (
        lambda params, batch: LINEN.apply({"params": params}, batch["tokens"]).mean(),
        r"takes its first argument 'params' for parameters; it is called with the model \(Model\).*loss_fn\(model",
    ),
    "parameters by use": (lambda w, batch: w["w"].sum(), r"TypeError: 'Model' object is not .* first argument 'w' for"),
    "integer": (
        lambda model, batch: (model(batch["tokens"]).argmax(-1) != batch["targets"]).sum(),
        r"a loss of dtype int32, which has no gradient: nothing would be trained\. Return a float",
    ),
    "bool": (lambda model, batch: (m.mean_loss(model, batch) > 1, 4), r"a loss_sum of dtype bool, which has no grad"),
    "complex": (lambda model, batch: m.mean_loss(model, batch) + 0j, r"a loss of dtype complex64; it must be a real"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_losses(case):
    loss_fn, text = LOSSES[case]
    with pytest.raises(LossError, match=text) as error:
        trainer(SMALL, loss_fn, num_stages=1).train_step(m.make_batch(8))
    check_text(error)


@pytest.mark.parametrize("name", ["params", "p"])
def test_a_loss_that_takes_a_linen_model_for_its_parameters(name):
    tokens = m.make_batch(8)["tokens"]

    def by_name(params, batch):
        return LINEN.apply({"params": params}, batch["tokens"]).mean()

    loss_fn = by_name if name == "params" else lambda p, batch: p["Dense_0"]["kernel"].sum()
    made = trainer(LINEN, loss_fn, variables=jax.jit(LINEN.init)(jax.random.key(0), tokens))
    with pytest.raises(LossError, match=rf"'{name}' for parameters; .* \(LinenCall\).*`model\.params`") as error:
        made.train_step(m.make_batch(8))
    check_text(error)


def test_an_error_in_the_loss_is_its_own():
    def loss_fn(model, batch):
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        trainer(loss_fn=loss_fn).train_step(m.make_batch(8))


def test_fewer_marks_than_stages_names_the_users_lines():
    with pytest.raises(AssignmentError, match=r"num_stages=4 needs at least 3 marks, but the function has 2") as error:
        trainer(num_stages=4).train_step(m.make_batch(8))
    assert "block_0 (" in str(error.value)
    assert "models.py:" in str(error.value)
    check_text(error)


def test_a_name_that_no_block_has():
    with pytest.raises(AssignmentError, match=r"'blok_0', which matches no block .* Did you mean 'block_0'"):
        trainer(assignment={"blok_0": 0, "*": 1}).train_step(m.make_batch(8))


class Poisoned(nnx.Module):
    """Takes the logarithm of a negative number in its second block."""

    def __init__(self):
        self.layers = m.Layers(3).layers

    def __call__(self, x):
        first, second, third = self.layers
        return third(second(jnp.log(-1.0 - first(x) ** 2)))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_first_loss_that_is_not_finite_names_the_switch_that_finds_it(stages):
    made, batch = trainer(Poisoned(), m.squared_error, num_stages=stages), m.make_xy(8)
    with pytest.raises(NonFiniteLossError, match=r"loss of step 1 is nan\. Under `jax.debug_nans\(True\)`") as error:
        made.train_step(batch)
    check_text(error)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in task fwd_0" if stages == 2 else "nan"):
        made.train_step(batch) if stages == 2 else m.squared_error(Poisoned(), batch)


def test_a_first_loss_that_is_infinite_names_the_switch_for_that():
    loss = lambda model, batch: m.squared_error(model, batch) + jnp.inf  # noqa: E731
    with pytest.raises(NonFiniteLossError, match=r"the loss of step 1 is inf.*jax.debug_infs"):
        trainer(m.Layers(1), loss, num_stages=1).train_step(m.make_xy(8))


def test_predict_of_a_dict():
    with pytest.raises(TypeError, match=r"predict got a dict with 'tokens', 'targets', 'mask', but not which"):
        trainer().predict(m.make_batch(8))
    with pytest.raises(TypeError, match=r"gather_variables\(\) is for Linen models"):
        _ = trainer().gather_variables()


class ScannedModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return linen_pipeline.PipelineStage(nn.Dense(m.WIDTH), name="layer")(x), None

        x = nn.Embed(m.VOCABULARY, m.WIDTH)(tokens)
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        return nn.Dense(m.VOCABULARY)(layers()(x, None)[0])


def test_a_marked_layer_under_scan():
    model = ScannedModel()
    batch = m.make_batch(4)
    made = trainer(model, variables=jax.jit(model.init)(jax.random.key(0), batch["tokens"]))
    with pytest.raises(ValueError, match="stands inside `scan`") as error:
        made.train_step(batch)
    check_text(error)
    text = str(error.value)
    assert text.startswith("the stage marker 'layer' stands inside `scan` at ")
    assert "jaxpp_flax.linen.scan" in text
    assert "`split_scanned` carries checkpoints over" in text
