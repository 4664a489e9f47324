"""`trainer.sync_weights` and `trainer.stream_weights`: equal bits, bytes, memory, refusals, and a loop that samples."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.checkpoint.format.paths import flatten, nest
from jaxpp_flax.engine.runtime.transport import routes
from jaxpp_flax.layers import add_lora, merge_lora
from jaxpp_flax.pretrained import NameMap, Rule
from jaxpp_flax.pretrained.sources import open_source
from jaxpp_flax.trainers import ModelError, Training
from tests.helpers import slow, slow_but, tree_allclose
from tests.trainers import models as m
from tests.trainers.generation import models as g
from tests.trainers.sharing import sharing_steps

BATCH = m.make_xy(8)
CUT = {"kernel_init": nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))}


@sharing_steps("seed", "model")
def make(stages: int = 2, model: Any = None, seed: int = 0, **options: Any) -> PipelineTrainer:
    made = model or m.Layers(max(2, stages), rngs=nnx.Rngs(seed))
    return PipelineTrainer(
        made, optax.sgd(0.1), m.squared_error, num_stages=stages, num_microbatches=4, logging=False, **options
    )


def divided(rngs: nnx.Rngs) -> nnx.Module:
    return m.Layers(2, rngs=rngs, **CUT)


def mesh_of(first: int, data: int = 2, tensor: int = 2) -> Mesh:
    devices = np.array(jax.devices()[first : first + data * tensor])
    return Mesh(devices.reshape(data, tensor), ("data", "tensor"))


def put(module: nnx.Module, mesh: Mesh, dtype: Any = None) -> nnx.Module:
    """Divide the last dimension of each leaf along "tensor", if it can be; convert the type."""

    def one(leaf: jax.Array) -> jax.Array:
        cut = leaf.ndim and leaf.shape[-1] % mesh.shape["tensor"] == 0
        spec = P(*[None] * (leaf.ndim - 1), "tensor") if cut else P()
        return jax.device_put(leaf.astype(dtype or leaf.dtype), NamedSharding(mesh, spec))

    nnx.update(module, jax.tree.map(one, nnx.state(module, nnx.Param)))
    return module


def values(module: nnx.Module) -> dict[str, np.ndarray]:
    return {path: np.array(leaf) for path, leaf in flatten(nnx.state(module, nnx.Param))[0].items()}


LAYOUTS: dict[str, Any] = {
    "4 stages to tensor and data on the same devices": ({"stages": 4}, 0),
    "parts to other devices": ({"model": divided, "mesh": {"fsdp": 2}}, 4),
    "one stage": ({"stages": 1}, 1),
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, *list(LAYOUTS)[:2]))
def test_a_sampler_on_another_layout(layout: str):
    """Equal to the bit; afterwards neither side's arrays are the other's."""
    options, first = LAYOUTS[layout]
    trainer = make(**options)
    plain = m.Layers(len(trainer.abstract_model.layers), rngs=nnx.Rngs(7))
    sampler = put(plain, mesh_of(first))
    places = [leaf.sharding for leaf in jax.tree.leaves(nnx.state(sampler))]
    trainer.sync_weights(sampler)  # before the first step too
    tree_allclose(values(sampler), values(trainer.gather_model()), rtol=0, atol=0)
    trainer.train_step(BATCH)
    assert trainer.sync_weights(sampler) is sampler
    wanted = values(trainer.gather_model())
    tree_allclose(values(sampler), wanted, rtol=0, atol=0)
    assert [leaf.sharding for leaf in jax.tree.leaves(nnx.state(sampler))] == places
    trainer.train_step(BATCH)  # which donates the trainer's arrays
    tree_allclose(values(sampler), wanted, rtol=0, atol=0)
    after = values(trainer.gather_model())
    assert any((after[path] != wanted[path]).any() for path in wanted)
    for leaf in jax.tree.leaves(nnx.state(sampler)):
        leaf.delete()
    tree_allclose(values(trainer.gather_model()), after, rtol=0, atol=0)
    assert np.isfinite(trainer.train_step(BATCH)["loss"])


def live_bytes() -> int:
    """The bytes of all arrays; arrays of the same memory count once."""
    shards = [shard.data for array in jax.live_arrays() if not array.is_deleted() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards if shard.nbytes}.values())


def test_memory_holds_the_sampler_and_one_leaf_more(monkeypatch: pytest.MonkeyPatch):
    trainer = make(4)
    sampler = put(m.Layers(4, rngs=nnx.Rngs(7)), mesh_of(0))
    trainer.sync_weights(sampler)
    gc.collect()  # once: after thousands of tests it takes a second, and no cycle holds what a transfer drops
    peaks: list[int] = []

    def join(*arguments: Any) -> jax.Array:
        joined = inner(*arguments)
        peaks.append(live_bytes())
        return joined

    inner = routes.join_on_host
    monkeypatch.setattr(routes, "join_on_host", join)
    before = live_bytes()
    trainer.sync_weights(sampler)
    assert live_bytes() == before
    # The largest leaf: a kernel of 4 x 4 numbers, which the data axis has twice.
    assert max(peaks) - before == 2 * 4 * 4 * 4
    # A stream whose arrays are dropped holds one leaf; converted on its stage, it is there too, in the new type.
    peaks.clear()
    for _, array in trainer.stream_weights(NamedSharding(mesh_of(0), P("data")), dtype=jnp.bfloat16):
        del array
    assert live_bytes() == before
    assert max(peaks) - before <= 3 * 4 * 4 * 2


def test_types_of_the_sampler():
    trainer = make()
    trainer.train_step(BATCH)
    wanted = {path: leaf.astype(jnp.bfloat16) for path, leaf in values(trainer.gather_model()).items()}
    sampler = trainer.sync_weights(put(m.Layers(2, rngs=nnx.Rngs(7)), mesh_of(2), jnp.bfloat16))
    tree_allclose(values(sampler), wanted, rtol=0, atol=0)
    sharding = NamedSharding(mesh_of(4), P())
    streamed = dict(trainer.stream_weights(sharding, dtype=jnp.bfloat16))
    tree_allclose({path: np.array(leaf) for path, leaf in streamed.items()}, wanted, rtol=0, atol=0)
    # Of a tree that has types, those; shapes without values are enough.
    shapes = {path: jax.ShapeDtypeStruct(of.shape, jnp.float16, sharding=sharding) for path, of in wanted.items()}
    synced = trainer.sync_weights(nest(shapes))
    assert {leaf.dtype for leaf in jax.tree.leaves(synced)} == {np.dtype(np.float16)}
    assert {leaf.sharding for leaf in jax.tree.leaves(synced)} == {sharding}


def adapted(rngs: nnx.Rngs, base: Callable[..., nnx.Module] = divided) -> nnx.Module:
    model = add_lora(base(rngs=rngs), rank=3, alpha=2, layers="layers", rngs=rngs)
    for path, factor in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        factor[...] = jax.random.normal(jax.random.key(len(str(path))), factor.shape, factor.dtype)
    return model


@pytest.mark.parametrize("mesh", [None, slow({"fsdp": 2})])
def test_adapters_are_merged_or_apart(mesh: Any):
    model = adapted if mesh else lambda rngs: adapted(rngs, m.Layers)
    trainer = make(model=model, mesh=mesh, training=Training(wrt=nnx.LoRAParam))
    sampler = put(m.Layers(rngs=nnx.Rngs(7)), mesh_of(4))
    for _ in range(2):  # before the first step, factors may lie on another rank than their kernel
        merged = merge_lora(trainer.gather_model())
        tree_allclose(values(trainer.sync_weights(sampler)), values(merged), rtol=0, atol=0)
        trainer.train_step(BATCH)
    other = put(adapted(nnx.Rngs(5), m.Layers), mesh_of(4))
    with pytest.raises(ModelError, match=r"layers/0/lora/lora_a: the trainer has no such leaf"):
        trainer.sync_weights(other)
    trainer.sync_weights(other, merge_adapters=False)
    tree_allclose(values(other), values(trainer.gather_model()), rtol=0, atol=0)
    trainer.train_step(BATCH)
    kernel = other.layers[0].kernel[...]
    trainer.sync_weights(other, only="*/lora_*")  # frozen kernels need not move again
    assert other.layers[0].kernel[...] is kernel
    tree_allclose(values(other), values(trainer.gather_model()), rtol=0, atol=0)


def test_names_and_arrangement_of_another_library(tmp_path: Path):
    trainer = make(model=divided, mesh={"fsdp": 2})
    rules = Rule("layers/*/kernel", "model.*.weight", transpose=(1, 0)), Rule("layers/*/bias", "model.*.bias")
    streamed = dict(trainer.stream_weights(NamedSharding(mesh_of(3), P("tensor")), map=NameMap(rules)))
    written = open_source(trainer.export_pretrained(tmp_path / "weights", map=NameMap(rules))).tensors
    assert streamed.keys() == written.keys()
    for name, tensor in written.items():
        np.testing.assert_array_equal(streamed[name], tensor.read(tuple(slice(0, size) for size in tensor.shape)))
    with pytest.raises(ModelError, match=r"the map does not fit, and nothing was moved. layers/0/bias: no rule"):
        trainer.stream_weights(NamedSharding(mesh_of(3), P()), map=NameMap(rules[:1]))


def test_linen_variables_and_tied_leaves():
    tokens = m.make_batch(4)
    trainer = PipelineTrainer(
        m.LinenModel(2, batch_norm=True), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=2, logging=False,
        variables=m.LinenModel(2, batch_norm=True).init(jax.random.key(0), tokens["tokens"]),
    )  # fmt: skip
    sharding = NamedSharding(mesh_of(4), P())
    old = jax.tree.map(lambda x: jax.device_put(jnp.zeros_like(x), sharding), trainer.gather_variables())
    old["cache"] = {"position": jnp.int32(3)}  # the sampler's own
    new = trainer.sync_weights(old)
    assert new.pop("cache") == {"position": 3}
    tree_allclose(new, trainer.gather_variables(), rtol=0, atol=0)
    assert not any(leaf.any() for leaf in jax.tree.leaves(old["params"]))


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List(PipelineStage(nnx.Linear(4, 4, rngs=rngs)) for _ in range(2))
        self.layers[1].kernel = self.layers[0].kernel

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_a_tied_leaf_moves_once_and_an_average_too():
    trainer = make(model=Tied(nnx.Rngs(0)), training=Training(ema_decay=0.5))
    trainer.train_step(BATCH)
    sampler = put(Tied(nnx.Rngs(7)), mesh_of(4))
    trainer.sync_weights(sampler, ema=True)
    assert sampler.layers[1].kernel is sampler.layers[0].kernel
    tree_allclose(values(sampler), values(trainer.gather_model(ema=True)), rtol=0, atol=0)
    streamed = [path for path, _ in trainer.stream_weights(NamedSharding(mesh_of(4), P()))]
    assert streamed == ["layers/0/bias", "layers/0/kernel", "layers/1/bias"]


REFUSALS: dict[str, tuple[Callable[[PipelineTrainer], Any], str]] = {
    "a leaf is missing": (
        lambda trainer: trainer.stream_weights({"layers/0/kernel": NamedSharding(mesh_of(0), P())}),
        r"layers/0/bias: nothing is given for it.*It sends: layers/0/bias",
    ),
    "a leaf too many": (
        lambda trainer: trainer.sync_weights(put(m.Layers(3, rngs=nnx.Rngs(7)), mesh_of(0))),
        r"layers/2/bias: the trainer has no such leaf",
    ),
    "another shape": (
        lambda trainer: trainer.sync_weights(put(m.Layers(2, 8, rngs=nnx.Rngs(7)), mesh_of(0))),
        r"layers/0/kernel: shape \(8, 8\), and the trainer has \(4, 4\)",
    ),
    "a spec that does not divide": (
        lambda trainer: trainer.stream_weights(NamedSharding(mesh_of(0, 1, 3), P("tensor"))),
        r"layers/0/bias: its shape \(4,\) cannot be divided as P\('tensor',\) over {'data': 1, 'tensor': 3}",
    ),
    "no place": (
        lambda trainer: trainer.sync_weights(nest({path: np.zeros(4) for path in ("layers/0/bias",)})),
        r"layers/0/bias: the ndarray given for it has no sharding",
    ),
    "another type": (
        lambda trainer: trainer.sync_weights(put(m.Layers(2, rngs=nnx.Rngs(7)), mesh_of(0), np.int8)),
        r"layers/0/bias: dtype int8, and the trainer has float32",
    ),
    "no floating type": (
        lambda trainer: trainer.stream_weights(NamedSharding(mesh_of(0), P()), dtype=jnp.int8),
        r"dtype=<class 'jax.numpy.int8'> is no floating type",
    ),
    "no leaf": (
        lambda trainer: trainer.stream_weights(NamedSharding(mesh_of(0), P()), only="head/*"),
        r"no leaf matches only='head/\*'",
    ),
    "no average": (
        lambda trainer: trainer.stream_weights(NamedSharding(mesh_of(0), P()), ema=True),
        r"needs an average of the weights",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refusals_before_anything_moves(refusal: str, monkeypatch: pytest.MonkeyPatch):
    call, message = REFUSALS[refusal]
    trainer = make()
    monkeypatch.setattr(routes, "plan", None)
    with pytest.raises(ValueError, match=message):  # of a generator too: before its first leaf is asked for
        call(trainer)


def test_devices_of_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxpp_flax.trainers.weight_transfer.targets.is_attached", lambda device: device.id != 3)
    with pytest.raises(ModelError, match=r"layers/0/bias: this job has no device .*3"):
        make().stream_weights(NamedSharding(mesh_of(0), P()))


def test_a_model_without_values():
    trainer = make(model=nnx.eval_shape(lambda: m.Layers(rngs=nnx.Rngs(0))))
    with pytest.raises(ModelError, match=r"the model is abstract"):
        trainer.stream_weights(NamedSharding(mesh_of(0), P()))


def test_a_step_ends_the_stream():
    trainer = make()
    stream = trainer.stream_weights(NamedSharding(mesh_of(0), P()))
    next(stream)
    trainer.train_step(BATCH)
    with pytest.raises(RuntimeError, match=r"came before the leaf layers/0/kernel had moved"):
        next(stream)


@pytest.mark.parametrize("stages", [2, slow(4)])
def test_a_loop_that_samples_and_trains(stages: int):
    """As in GRPO: sample with a plain model on another mesh, train on the samples, sample again."""
    trainer = PipelineTrainer(
        g.GPT(nnx.Rngs(0), num_blocks=stages, dropout=0.0), optax.sgd(0.5), g.loss_fn, num_stages=stages,
        num_microbatches=2, logging=False, training=Training(frozen=["embed", "positions", "blocks"]),
    )  # fmt: skip
    sampler = put(g.GPT(nnx.Rngs(1), num_blocks=stages, dropout=0.0), mesh_of(4))
    for _ in range(2):
        trainer.sync_weights(sampler)
        found = g.greedy(sampler, g.PROMPTS[:1], g.NEW)
        g.assert_equal(found, trainer.generate(g.PROMPTS[:1], max_new_tokens=g.NEW))
        sampled = np.tile(found[0], (4, 1))
        for _ in range(2):
            trainer.train_step({"tokens": sampled[:, :-1], "targets": sampled[:, 1:]})
    assert np.isfinite(trainer.train_step({"tokens": sampled[:, :-1], "targets": sampled[:, 1:]})["loss"])
