"""Shardings from a model's annotations: equal to plain `jax.jit`, and each device holds its shard alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineStage, PipelineTrainer, mark_stage_end
from jaxpp_flax.trainers import MeshError, MeshOptions, Training
from tests.helpers import slow, slow_but, tree_allclose
from tests.trainers.models import Chain, make_xy, squared_error

WIDTH, STAGES, MICROBATCHES = 8, 2, 2
_INIT = nnx.initializers.lecun_normal()


class Block(nnx.Module):
    def __init__(self, rngs, names):
        up, down = names, names[::-1]
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, kernel_init=nnx.with_partitioning(_INIT, up))
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, kernel_init=nnx.with_partitioning(_INIT, down))

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def chain(kind, names, layers=STAGES):
    rngs = nnx.Rngs(0)
    return Chain(PipelineStage(kind(rngs, names)) for _ in range(layers))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        up = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        down = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("mlp", "embed"))
        for _ in range(STAGES):
            y = nn.Dense(4 * WIDTH, kernel_init=up)(x)
            y = nn.with_logical_constraint(jnp.tanh(y), ("batch", "mlp"))
            x = mark_stage_end(x + nn.Dense(WIDTH, kernel_init=down)(y))
        return x


def batch():
    return make_xy(16, WIDTH)


@functools.cache
def linen_variables():
    return jax.jit(LinenModel().init)(jax.random.key(0), batch()["x"])


def trainer(kind, names=("fsdp", None), stages=STAGES, **options):
    options = {"num_stages": stages, "num_microbatches": MICROBATCHES, "logging": False, **options}
    tx = options.pop("tx", optax.sgd(1e-2, momentum=0.9))
    if kind == "nnx":
        with nnx.use_eager_sharding(False):
            return PipelineTrainer(chain(Block, names), tx, squared_error, **options)
    return PipelineTrainer(LinenModel(), tx, squared_error, variables=linen_variables(), **options)


RULES = [("batch", "data"), ("embed", None), ("mlp", "tensor")]
CASES = {
    "tensor": ("nnx", {"data": 2, "tensor": 2}, {"names": (None, "tensor")}, P(None, "tensor"), 2),
    "fsdp": ("nnx", {"fsdp": 4}, {"names": ("fsdp", None)}, P("fsdp"), 4),
    "rules": ("linen", {"data": 2, "tensor": 2}, {"rules": RULES}, P(None, "tensor"), 2),
    "rules, nnx": (
        "nnx",
        {"data": 2, "tensor": 2},
        {"names": ("embed", "mlp"), "rules": RULES},
        P(None, "tensor"),
        2,
    ),
}


@pytest.mark.parametrize("case", slow_but(CASES, "rules"))
def test_annotated_parameters_and_their_optimizer_state_are_sharded(case):
    kind, axes, options, spec, parts = CASES[case]
    options = {"training": Training(ema_decay=0.9), **options}
    rules = options.pop("rules", None)
    piped, plain = (
        trainer(kind, mesh=MeshOptions(axes=axes, sharding_rules=rules), **options),
        trainer(kind, mesh=MeshOptions(sharding_rules=rules), stages=1, **options),
    )
    for _ in range(3):
        losses = [float(made.train_step(batch())["loss"]) for made in (piped, plain)]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    tree_allclose(*(jax.tree.map(np.asarray, made.state.params) for made in (piped, plain)))
    kernels = [leaf for leaf in jax.tree.leaves(piped.state) if leaf.shape == (WIDTH, 4 * WIDTH)]
    assert len(kernels) == STAGES * 3, "parameters, momentum, and the average"
    for kernel in kernels:
        assert kernel.spec == spec
        local = kernel.to_mpmd_local_array
        assert {shard.data.size * parts for shard in local.addressable_shards} == {WIDTH * 4 * WIDTH}
    assert len(piped.steps.compiled) == 1


@pytest.mark.slow
def test_factored_statistics_lie_as_the_dimensions_that_they_keep():
    """Before the first step as after it, so that nothing is moved or compiled between two steps."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=2, multiply_by_parameter_scale=False)
    options = {"mesh": {"data": 2, "tensor": 2}, "tx": tx}
    made = trainer("nnx", (None, "tensor"), **options), trainer("nnx", (None, "tensor"), stages=1, tx=tx)
    piped = made[0]
    taken = jax.tree.leaves(piped.compile(batch()).in_shardings[0][0].opt_state)
    for _ in range(2):
        np.testing.assert_allclose(*[float(t.train_step(batch())["loss"]) for t in made], rtol=1e-5)
    # The optimizer divides by the size of a gradient: its own rounding of 1e-7 grows with that.
    tree_allclose(*(jax.tree.map(np.asarray, (t.state.params, t.state.opt_state)) for t in made), rtol=1e-4)
    leaves = jax.tree.leaves(piped.state.opt_state)
    assert [sharding.spec for sharding in taken] == [leaf.spec for leaf in leaves]
    specs = {shape: {leaf.spec for leaf in leaves if leaf.shape == shape} for shape in ((4 * WIDTH,), (1,))}
    assert specs == {(4 * WIDTH,): {P(), P("tensor")}, (1,): {P()}}


@pytest.mark.slow
def test_rules_of_the_batch_for_examples_that_cannot_be_shared():
    made = [
        trainer("linen", mesh=MeshOptions(axes={"data": 2, "tensor": 2}, sharding_rules=RULES)),
        trainer("linen", stages=1),
    ]
    one = {name: leaf[:1] for name, leaf in batch().items()}
    np.testing.assert_allclose(*[t.evaluate([one])["loss"] for t in made], rtol=1e-5)


NO_AXIS = r"names without a rule that are no axis of a stage: these are {'data': 2, 'fsdp': 2}\. The names: "
BOTH = {"data": 2, "fsdp": 2}


def test_refusals():
    with pytest.raises(MeshError, match=NO_AXIS + r"'tensor' \(of blocks/0/down/kernel\)\. Give each name a rule"):
        trainer("nnx", (None, "tensor"), mesh=BOTH)
    with pytest.raises(MeshError, match=r"of shape \(32, 8\) cannot be cut into 3 equal parts"):
        trainer("nnx", (None, "fsdp"), mesh={"fsdp": 3})
    with pytest.raises(MeshError, match=r"annotated with 'fsdp' in two dimensions"):
        trainer("nnx", ("fsdp", "fsdp"), mesh={"fsdp": 2})


def test_all_names_without_a_meaning_are_listed_at_once():
    listed = (
        r"'embed' \(of Dense_0/kernel\), 'mlp' \(of Dense_0/kernel\)\. Give .*rules=\[\('embed', None\), \('mlp', None"
    )
    with pytest.raises(MeshError, match=NO_AXIS + listed):
        trainer("linen", mesh=BOTH)
    lacking = r"rules lead names to axes that the mesh lacks: 'embed' to 'fsdp' .*, 'mlp' to 'tensor' .*mesh={'fsdp'"
    with pytest.raises(MeshError, match=lacking):
        trainer("linen", mesh=MeshOptions(axes={"data": 2}, sharding_rules={"embed": "fsdp", "mlp": "tensor"}))
    both = r"The names: 'embed' \(of .*Besides, rules lead names to axes that the mesh lacks: 'mlp' to 'tensor'"
    with pytest.raises(MeshError, match=both):
        trainer("linen", mesh=MeshOptions(axes={"data": 2}, sharding_rules={"mlp": "tensor"}))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_active_rules_of_flax_are_inherited(kind):
    names = {"names": ("embed", "mlp")} if kind == "nnx" else {}
    axes = {"data": 2, "tensor": 2}
    with (nnx if kind == "nnx" else nn).logical_axis_rules(RULES):
        made = trainer(kind, mesh=axes, **names)
    given = trainer(kind, mesh=MeshOptions(axes=axes, sharding_rules=RULES), **names)
    specs = made.steps.state_specs
    assert specs == given.steps.state_specs
    assert {P(None, "tensor"), P("tensor")} <= {*jax.tree.leaves(specs.params), *jax.tree.leaves(specs.opt_state)}
    with nn.logical_axis_rules(RULES):  # the trainer's own come first
        made = trainer(kind, mesh=MeshOptions(axes=axes, sharding_rules=[("mlp", None)]), **names)
    assert {*jax.tree.leaves(made.steps.state_specs.params)} == {P()}


def test_rules_of_a_leaf_of_its_own():
    class OwnRules(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(_INIT, ("embed", "mlp"), rules=[("embed", None), ("mlp", "tensor")])
            for _ in range(STAGES):
                x = mark_stage_end(nn.Dense(WIDTH, kernel_init=init)(x))
            return x

    variables = jax.jit(OwnRules().init)(jax.random.key(0), batch()["x"])
    options = {"num_stages": STAGES, "num_microbatches": MICROBATCHES, "logging": False, "mesh": {"tensor": 2}}
    made = PipelineTrainer(OwnRules(), optax.sgd(0.1), squared_error, variables=variables, **options)
    assert {*jax.tree.leaves(made.steps.state_specs.params)} == {P(None, "tensor")}


@pytest.mark.parametrize(("kind", "axes"), [slow("linen", {"data": 1}), slow("nnx", None), ("linen", {"data": 2})])
def test_names_that_can_cut_nothing_are_passed_over(kind, axes):
    """One device in each stage, or data parallelism alone: neither unknown names nor constraints matter."""
    rules = [("batch", ("data", "fsdp")), *([] if axes == {"data": 2} else [("embed", "fsdp")])]
    with nn.logical_axis_rules(rules):  # 'mlp' has no rule
        names = ("embed", "mlp")
        piped, plain = trainer(kind, names, mesh=axes), trainer(kind, names, stages=1)
    losses = piped.train_step(batch())["loss"], plain.evaluate([batch()])["loss"]
    np.testing.assert_allclose(*map(float, losses), rtol=1e-5)


class Projections(nn.Module):
    """Layers whose kernels have three dimensions; Linen makes these of flat ones with two."""

    logical: bool = False

    @nn.compact
    def __call__(self, x):
        annotate = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        bias = annotate(nn.initializers.normal(), ("heads", "kv"))
        for _ in range(STAGES):
            y = nn.DenseGeneral((2, 4), kernel_init=annotate(_INIT, ("embed", "heads", "kv")), bias_init=bias)(x)
            out = nn.DenseGeneral(WIDTH, axis=(-2, -1), kernel_init=annotate(_INIT, ("heads", "kv", "embed")))
            x = mark_stage_end(x + out(jnp.tanh(y)))
        return x


WHOLE = [("embed", None), ("heads", None), ("kv", None)]
SHARDED = P(None, "tensor")
TENSOR = MeshOptions(axes={"tensor": 2}, sharding_rules={"embed": None, "heads": "tensor", "kv": None})
PROJECTIONS = [
    slow(False, {"variables": "unboxed"}, P()),
    slow(False, {"mesh": {"data": 2}, "variables": "unboxed"}, P()),
    slow(False, {"mesh": MeshOptions(axes={"fsdp": 2}, sharding_rules=WHOLE)}, P()),
    slow(False, {"mesh": TENSOR}, SHARDED),
    slow(True, {}, P()),
    (False, {"mesh": {"data": 2}, "variables": "factory"}, P()),
    (True, {"mesh": TENSOR}, SHARDED),
]


@pytest.mark.parametrize(("logical", "options", "spec"), PROJECTIONS)
def test_projections_to_several_dimensions(logical, options, spec):
    module = Projections(logical)
    boxed = jax.jit(module.init)(jax.random.key(0), batch()["x"])
    variables = {"unboxed": nn.meta.unbox(boxed), "factory": lambda key: module.init(key, batch()["x"])}
    loss_of = lambda params: squared_error(lambda x: module.apply({"params": params}, x), batch())  # noqa: E731
    loss, grads = jax.jit(jax.value_and_grad(loss_of))(nn.meta.unbox(boxed["params"]))
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, nn.meta.unbox(boxed["params"]), grads)
    given = {**options, "variables": variables.get(options.get("variables", ""), boxed)}
    made = PipelineTrainer(
        module, optax.sgd(0.1), squared_error, num_stages=STAGES, num_microbatches=2, logging=False, **given
    )
    np.testing.assert_allclose(float(made.train_step(batch())["loss"]), float(loss), rtol=1e-5)
    tree_allclose(jax.tree.map(np.asarray, made.state.params), expected)
    kernel = made.state.params["DenseGeneral_0"]["kernel"]
    assert kernel.shape == (WIDTH, 2, 4)
    assert kernel.spec == spec
