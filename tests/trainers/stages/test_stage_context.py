"""Models that name axes of the mesh, traced as a stage sees them: equal to plain JAX under `jax.set_mesh`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import BatchError, Inference, MicrobatchLossWarning, WholeBatchLoss
from jaxpp_flax.verify import VerifyError, verify
from tests.helpers import slow, tree_allclose
from tests.trainers.models import Chain, make_xy, squared_error

WIDTH, STAGES = 8, 2
SHARED, WHOLE = P("data", None), P(None, None)
FORMS = {
    "constraint": lambda y, down: jax.lax.with_sharding_constraint(y @ down, SHARED),
    "shard_map": lambda y, down: jax.shard_map(jnp.sin, in_specs=SHARED, out_specs=SHARED)(y @ down),
    # The weight's shards are gathered, as in FSDP.
    "reshard": lambda y, down: y @ jax.sharding.reshard(down, WHOLE),
    # The hidden units of `y` lie on "tensor": JAX asks how their sum is to lie.
    "out_sharding": lambda y, down: jnp.einsum("bh,ho->bo", y, down, out_sharding=SHARED),
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, form: str):
        init, names = nnx.initializers.lecun_normal(), (None, "tensor") if form == "out_sharding" else (None, None)
        self.up = nnx.Param(init(rngs.params(), (WIDTH, 2 * WIDTH)), out_sharding=names)
        names = ("data", None) if form == "reshard" else names[::-1]
        self.down = nnx.Param(init(rngs.params(), (2 * WIDTH, WIDTH)), out_sharding=names)
        self.form = form

    def __call__(self, x):
        return x + FORMS[self.form](jnp.tanh(x @ self.up[...]), self.down[...])


def mesh_of(kind, *, stages=STAGES):
    devices = np.array(jax.devices()[: 4 * stages]).reshape(stages, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("stage", "data", "tensor"), axis_types=(kind,) * 3)
    return mesh if stages > 1 else jax.sharding.Mesh(devices[0], ("data", "tensor"), axis_types=(kind,) * 2)


def make_trainer(form, kind, loss=squared_error, **options):
    with nnx.use_eager_sharding(False):
        model = Chain(PipelineStage(Block(nnx.Rngs(i), form)) for i in range(STAGES))
    options = {"num_stages": STAGES, "num_microbatches": 2, "mesh": mesh_of(kind), "logging": False, **options}
    return PipelineTrainer(model, optax.sgd(0.1), loss, **options)


def plain_step(form, kind, batch):
    """One step under `jax.jit` and `jax.set_mesh`, without anything of the package but the marks, which do nothing."""
    with nnx.use_eager_sharding(False):
        graph, params = nnx.split(Chain(Block(nnx.Rngs(i), form) for i in range(STAGES)), nnx.Param)
    mesh = mesh_of(kind, stages=1)
    notes = nnx.get_partition_spec(params)
    placed = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, notes)
    batch = jax.device_put(batch, NamedSharding(mesh, SHARED))
    with jax.set_mesh(mesh):
        loss, grads = jax.jit(jax.value_and_grad(lambda p: squared_error(nnx.merge(graph, p), batch)))(placed)
    return loss, jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * np.asarray(g), placed, grads)


CASES = [
    ("constraint", AxisType.Auto),
    slow("shard_map", AxisType.Auto),
    ("reshard", AxisType.Explicit),
    slow("out_sharding", AxisType.Explicit),
    slow("shard_map", AxisType.Explicit),
]


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_a_model_that_names_axes_is_equal_to_plain_jax(form, kind):
    batch, trainer = make_xy(16, WIDTH), make_trainer(form, kind)
    loss, params = plain_step(form, kind, batch)
    # A mean over two microbatches, and sums over shards, in another order.
    np.testing.assert_allclose(float(trainer.train_step(batch)["loss"]), loss, rtol=1e-5)
    tree_allclose(*[jax.tree.leaves(jax.tree.map(np.asarray, p)) for p in (trainer.state.params, params)], rtol=1e-5)
    downs = [leaf.spec for leaf in jax.tree.leaves(trainer.state.params) if leaf.shape == (2 * WIDTH, WIDTH)]
    assert downs == [{"reshard": P("data"), "out_sharding": P("tensor")}.get(form, P())] * STAGES, "as annotated"


def test_the_types_of_parameters_and_examples_on_explicit_axes():
    """Each trace of the loss has the types of the step's: a model may look at them."""
    seen = set()

    def loss(model, batch):
        seen.add((jax.typeof(model.blocks[0].up[...]).sharding.spec, jax.typeof(batch["x"]).sharding.spec))
        return squared_error(model, batch)

    trainer = make_trainer("out_sharding", AxisType.Explicit, loss)
    trainer.train_step(make_xy(16, WIDTH))
    microbatches = jax.tree.map(lambda x: x.reshape(2, 8, WIDTH), make_xy(16, WIDTH))
    assert trainer.steps.builders.count_flops(trainer.held.memory, microbatches) > 0
    assert seen == {(P(None, "tensor"), SHARED)}


@pytest.mark.slow
def test_embeddings_of_a_model_that_names_axes():
    def embed(model, batch):
        x = model(batch["x"])
        return x - x.mean(0)

    loss = WholeBatchLoss(embed, lambda embeddings, batch: ((embeddings - batch["y"]) ** 2).mean())
    with pytest.warns(MicrobatchLossWarning, match="embed_fn combines the examples of a microbatch"):
        make_trainer("constraint", AxisType.Auto, loss).train_step(make_xy(16, WIDTH))


def test_refusals():
    asked = r"Explicit axes only: .* name: data of type: .*with_sharding_constraint there, or make .*Explicit,\) \* 3"
    with pytest.raises(ValueError, match=asked) as refused:
        make_trainer("out_sharding", AxisType.Auto).train_step(make_xy(16, WIDTH))
    lines = [entry.path for entry in pytest.ExceptionInfo.from_exception(refused.value.__cause__).traceback]
    assert __file__ in map(str, lines), "the line of the model is shown"
    with pytest.raises(VerifyError, match=r"names axes of a mesh, .*: `if not jax\.sharding\.get_abstract_mesh\(\)"):
        verify(make_trainer("constraint", AxisType.Auto), make_xy(16, WIDTH))
    predict = Inference(predict_fn=lambda model, batch: model(batch["x"]))
    with pytest.raises(BatchError, match=r"1 examples of the batch are left over by the 2 data-parallel devices"):
        make_trainer("out_sharding", AxisType.Explicit, inference=predict).predict(make_xy(3, WIDTH))
