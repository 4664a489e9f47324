"""A model that is given as a function: its values are those of the eager model, and it is never whole in one place."""

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
from flax import linen as nn
from flax import nnx

import jaxpp_flax.linen as linen_pipeline
from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import Memory, MeshOptions, ModelError, Training
from jaxpp_flax.trainers.state import first_values, placement
from tests.helpers import slow
from tests.trainers import models as m
from tests.trainers.lives import LAYERS, RANKS, Deep, deep_loss, live_bytes
from tests.trainers.sharing import assign_stages, sharing_steps

RULES = (
    nnx.initializers.normal(0.02), nnx.initializers.orthogonal(), nnx.initializers.lecun_normal(),
    nnx.initializers.glorot_uniform(),
)  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.BatchStatisticsWarning")


class Initialized(m.Tokens):
    """A rule of initialization for each block, of which devices may divide the kernel; dropout, running statistics."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(len(RULES), rngs=rngs, dropout=0.1, batch_norm=True)
        for block, rule in zip(self.blocks, RULES, strict=True):
            init = nnx.with_partitioning(rule, (None, "cut"))
            block.kernel = nnx.Linear(m.WIDTH, m.WIDTH, rngs=rngs, kernel_init=init).kernel


class InitializedLinen(nn.Module):
    @nn.compact
    def __call__(self, tokens, training=True):
        x = nn.Embed(m.VOCABULARY, m.WIDTH)(tokens)
        for rule in RULES:
            block = nn.Dense(m.WIDTH, kernel_init=nn.with_partitioning(rule, (None, "cut")))
            x = jnp.tanh(linen_pipeline.PipelineStage(block)(x))
        return nn.Dense(m.VOCABULARY)(nn.Dropout(0.1, deterministic=not training)(x))


class Tied(m.Tokens):
    """Dropout, running statistics, an annotated kernel, and an embedding that the first and the last stage read."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs=rngs, dropout=0.1, batch_norm=True)
        cut = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, "tensor"))
        for block, init in zip(self.blocks, (cut, nnx.initializers.orthogonal()), strict=True):
            block.kernel = nnx.Linear(m.WIDTH, m.WIDTH, rngs=rngs, kernel_init=init).kernel

    def __call__(self, tokens):
        return super().__call__(tokens) + self.embed.attend(jnp.ones((*tokens.shape, m.WIDTH)))


@sharing_steps("model", "variables")
def make(model: Any, **options: Any) -> PipelineTrainer:
    options = {"num_microbatches": 2, "logging": False, "training": Training(ema_decay=0.5), **options}
    return PipelineTrainer(model, optax.sgd(0.1, momentum=0.9), m.mean_loss, **options)


def bits(tree: Any) -> dict[str, bytes]:
    def one(leaf: Any) -> bytes:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf if isinstance(leaf, jax.Array) else leaf.first_mpmd_replica)
        return np.asarray(leaf).tobytes()

    return {jax.tree_util.keystr(path): one(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


LAYOUTS: list[Any] = [
    {"num_stages": 2, "mesh": {"tensor": 2}},
    {"num_stages": 3},
    {"num_stages": 1},
    {"num_stages": 2, "mesh": MeshOptions(axes={"data": 2}, sharding_rules=[("tensor", None)])},
]


def same(tree: Any, eager: Any) -> None:
    """The values are those of the eager construction, which XLA rounds in other places."""
    plain = lambda tree: {path: np.frombuffer(of, np.uint8) for path, of in bits(tree).items()}  # noqa: E731
    found, wanted = plain(tree), plain(eager)
    kinds = {path: leaf.dtype for path, leaf in flatten(eager)[0].items()}
    assert found.keys() == wanted.keys()
    for (path, value), dtype in zip(found.items(), kinds.values(), strict=True):
        if dtype == np.float32:
            right = wanted[path].view(np.float32)
            scale = abs(right).max(initial=0.0)
            np.testing.assert_allclose(value.view(np.float32), right, rtol=1e-6, atol=1e-6 * scale, err_msg=path)
        else:
            np.testing.assert_array_equal(value, wanted[path], err_msg=path)


@pytest.mark.parametrize("kind", ["nnx", slow("linen")])
def test_first_values_have_the_same_bits_on_every_layout(kind: str):
    """On one, two and four stages, and divided by `fsdp`; at the places of the compiled step."""
    batch, cut = m.make_batch(8), MeshOptions(axes={"fsdp": 2}, sharding_rules=[("cut", "fsdp")])
    layouts: list[Any] = [{"num_stages": 1}, {"num_stages": 2}, {"num_stages": 4}, {"num_stages": 2, "mesh": cut}]
    linen = InitializedLinen()
    init = lambda key: linen.init(key, batch["tokens"], training=False)  # noqa: E731
    of = {"model": linen, "variables": init} if kind == "linen" else {"model": lambda rngs: Initialized(rngs)}
    first, *others = (make(**of, **layout) for layout in layouts)
    for trainer in others:
        assign_stages(trainer, batch)
        assert bits(trainer.state) == bits(first.state)
    kernels = (leaf for path, leaf in flatten(others[-1].state.params)[0].items() if path.endswith("kernel"))
    assert any(leaf.first_mpmd_replica.addressable_shards[0].data.shape[1] == leaf.shape[1] // 2 for leaf in kernels)


@pytest.mark.parametrize("every", [False, slow(True)])
def test_a_factory_gives_every_layout_the_same_bits(every: bool):
    """They are the values of the eager model."""
    layouts = LAYOUTS if every else LAYOUTS[:2]
    first, *others = (make(lambda rngs: Tied(rngs), **layout) for layout in layouts)
    with nnx.use_eager_sharding(False):
        eager = make(Tied(nnx.Rngs(0)), **layouts[0])
    assign_stages(first, m.make_batch(8))  # some after their leaves have ranks, some before it
    for trainer in others if every else ():
        trainer.compile(m.make_batch(8))
    for trainer in others:
        assert bits(trainer.state) == bits(first.state)
    same(first.state, eager.state)
    assert all(isinstance(leaf, MpmdArray) for leaf in jax.tree.leaves(first.state))


@pytest.mark.parametrize("stages", [slow(1), 2])
def test_linen_variables_from_a_function_have_the_values_of_init(stages: int):
    module, batch = m.LinenModel(1, dropout=0.1, batch_norm=True), m.make_batch(8)
    init: Callable[..., Any] = lambda key: module.init(key, batch["tokens"], training=False)  # noqa: E731
    lazy, eager = (make(module, variables=of, num_stages=stages) for of in (init, init(jax.random.key(0))))
    same(lazy.state, eager.state)
    same(lazy.gather_variables(), eager.gather_variables())
    bound = make(module, variables=lambda: init(jax.random.key(3)), num_stages=stages)  # with a key of its own
    same(bound.gather_variables(), init(jax.random.key(3)))


# ------------------------------------------------------------------ memory

WIDTH = 32
LEAF = WIDTH * WIDTH * 4
SHARE = 3 * LAYERS * LEAF // RANKS  # parameters and two moments
SMALL = 8192  # counters, keys and batches, and what a step computes


DATA = np.ones((8, WIDTH), np.float32)


@sharing_steps("model", "checkpoints")
def deep_trainer(model: Any = None, **options: Any) -> PipelineTrainer:
    model = (lambda rngs: Deep(WIDTH, rngs)) if model is None else model
    return PipelineTrainer(
        model, optax.adam(1e-2), deep_loss, num_stages=RANKS, num_microbatches=2, logging=False, **options
    )


class Peak:
    """Samples the live bytes of every device; `at(place)` asserts the limit and names the place."""

    def __init__(self) -> None:
        gc.collect()
        self._before = live_bytes()

    def at(self, place: str, extra: int = LEAF) -> None:
        now = live_bytes()
        worst = max(now[device] - self._before[device] for device in now)
        assert worst <= SHARE + extra + SMALL, f"{place}: {worst} bytes on a device"


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Peak:
    """Sampled after each leaf that is made, too."""
    found, call = Peak(), first_values._Program.__call__

    def sampled(self: Any, *operands: Any) -> Any:
        value = call(self, *operands)
        found.at("while a leaf is made")
        return value

    monkeypatch.setattr(first_values._Program, "__call__", sampled)
    return found


def test_no_device_holds_more_than_its_share(peak: Peak, tmp_path: Path):
    total = 3 * LAYERS * LEAF
    assert total == RANKS * SHARE
    trainer = deep_trainer(checkpoints=tmp_path / "run")
    peak.at("construction", extra=0)
    trainer.save(tmp_path / "before")
    peak.at("save before the first step", extra=0)
    trainer = deep_trainer(checkpoints=tmp_path / "run")
    trainer.evaluate([DATA])
    peak.at("evaluate as the first call", extra=0)
    placed = [leaf.to_mpmd_local_array for leaf in jax.tree.leaves(trainer.held.memory.params)]
    trainer.predict(DATA)
    after = [leaf.to_mpmd_local_array for leaf in jax.tree.leaves(trainer.held.memory.params)]
    assert all(a is b for a, b in zip(placed, after, strict=True)), "the weights are placed once"
    trainer.fit([DATA], steps=2)
    peak.at("two steps", extra=0)
    trainer.evaluate([DATA])
    peak.at("evaluate after training", extra=0)
    trainer.save()
    loss = float(trainer.train_step(DATA)["loss"])
    del trainer, placed, after
    gc.collect()
    restored = deep_trainer(checkpoints=tmp_path / "run")
    restored.restore(tmp_path / "run" / "2")
    peak.at("restore", extra=0)
    assert restored.predict(DATA).shape == DATA.shape
    assert float(restored.train_step(DATA)["loss"]) == loss
    peak.at("the first step after it", extra=0)
    del restored
    gc.collect()
    finished = deep_trainer(checkpoints=tmp_path / "run")
    assert finished.fit([DATA], steps=2, resume=True)["loss"] > 0
    peak.at("a finished job that resumes", extra=0)


SOURCES: dict[str, Callable[[Path], PipelineTrainer]] = {
    "a module": lambda saved: deep_trainer(Deep(WIDTH, nnx.Rngs(0))),
    "a factory": lambda saved: deep_trainer(),
    "weights from memory": lambda saved: given(deep_trainer(), lambda t: t.set_weights(Deep(WIDTH, nnx.Rngs(1)))),
    "a checkpoint": lambda saved: given(deep_trainer(), lambda t: t.restore(saved)),
    "weights of a checkpoint": lambda saved: given(deep_trainer(), lambda t: t.restore(saved, only="params/*")),
    "files": lambda saved: given(deep_trainer(), lambda t: t.load_pretrained(saved)),
}


def given(trainer: PipelineTrainer, source: Callable[[PipelineTrainer], None]) -> PipelineTrainer:
    source(trainer)
    return trainer


def test_the_state_is_born_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From whatever source: no leaf has a value before the step is compiled, and none moves."""
    trained = deep_trainer(checkpoints=tmp_path / "run")
    trained.fit([DATA], steps=1)
    moved, move = list[Any](), placement.spmd_to_mpmd_reshard

    def noted(mesh: Any, leaves: Any, places: Any, *, donate: bool) -> Any:
        moved.extend(leaf for leaf in leaves if isinstance(leaf, MpmdArray))
        return move(mesh, leaves, places, donate=donate)

    monkeypatch.setattr(placement, "spmd_to_mpmd_reshard", noted)
    for name, make in SOURCES.items():
        trainer = make(tmp_path / "run" / "1")
        leaves = jax.tree.leaves(trainer.held.memory)
        assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves), name
        trainer.train_step(DATA)
        assert not moved, name
    resumed = deep_trainer(checkpoints=tmp_path / "run")
    resumed.fit([DATA], steps=2, resume=True)
    assert resumed.step == 2
    assert not moved


def test_another_schedule_is_one_move_to_its_places():
    """What lies there already keeps its memory; what moves is freed where it was, before the step runs."""
    memory = Memory(optimizer_state="pinned_host")
    trainer = PipelineTrainer(
        Deep(WIDTH, nnx.Rngs(0)), optax.adam(1e-2), deep_loss, num_stages=2, num_microbatches=2, memory=memory,
        logging=False,
    )  # fmt: skip
    trainer.train_step(DATA)
    before = flatten(trainer.state)[0]
    trainer.use_schedule("interleaved_1f1b", num_stages=4)
    compiled = trainer.compile(DATA)
    after, wanted = flatten(trainer.state)[0], flatten(compiled.in_shardings[0][0])[0]
    assert {path: leaf.sharding for path, leaf in after.items()} == wanted
    moved = {path for path, leaf in before.items() if after[path].sharding.ranks != leaf.sharding.ranks}
    assert {path for path, leaf in before.items() if leaf.is_deleted()} == moved
    assert "params/layers/2/kernel" in moved
    assert "opt_state/0/mu/layers/2/kernel" in moved
    assert "params/layers/0/kernel" not in moved
    trainer.train_step(DATA)
    places = trainer.held.places
    trainer.train_step(DATA[:4])
    assert trainer.held.places is places, "a step for other batches takes the same places"


def test_what_is_saved_before_the_first_step_is_the_first_state(tmp_path: Path):
    lazy, eager = deep_trainer(), deep_trainer(Deep(WIDTH, nnx.Rngs(0)))
    for name, trainer in (("lazy", lazy), ("eager", eager)):
        trainer.save(tmp_path / name)
    for name, trainer in (("lazy", lazy), ("eager", eager)):
        read = deep_trainer()
        read.restore(tmp_path / name)
        assert bits(read.state) == bits(trainer.state)
    same(lazy.state, eager.state)


# ------------------------------------------------------------------ models without values, and models too large


def test_an_abstract_module_needs_values_first(tmp_path: Path):
    values, batch = deep_trainer(), DATA
    values.save(tmp_path / "saved")
    trainer = deep_trainer(nnx.eval_shape(lambda: Deep(WIDTH, nnx.Rngs(0))))
    assert trainer.abstract_model.layers[0].kernel.shape == (WIDTH, WIDTH)
    calls: list[Callable[[], Any]] = [
        lambda: trainer.train_step(batch),
        lambda: trainer.evaluate([batch]),
        lambda: trainer.save(tmp_path / "other"),
        lambda: trainer.gather_model(),
        lambda: trainer.state,
    ]
    for call in calls:
        with pytest.raises(ModelError, match=r"the model is abstract: 8 of its 8 leaves .*layers/0/.*trainer\.restore"):
            call()
    trainer.restore(tmp_path / "saved")
    assert float(trainer.train_step(batch)["loss"]) == float(values.train_step(batch)["loss"])
    weights = deep_trainer(nnx.eval_shape(lambda: Deep(WIDTH, nnx.Rngs(0))))
    weights.restore(tmp_path / "saved", only="params")  # the optimizer begins anew
    assert int(weights.state.opt_state[0].count) == 0
    assert bits(weights.state.params) == bits(deep_trainer().state.params)


def test_shapes_cost_nothing():
    trainer = deep_trainer()
    target = trainer.held.target()
    assert target.params.layers[LAYERS - 1].kernel.get_value().shape == (WIDTH, WIDTH)
    assert isinstance(trainer.abstract_model, Deep)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trainer.held.memory.params))


def test_a_model_that_does_not_fit_is_refused_before_anything_is_placed(
    peak: Peak, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from jaxpp_flax.engine.arrays import device_memory

    saved = deep_trainer().save(tmp_path / "saved")
    trainer = deep_trainer()
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: RANKS * SHARE // 2)
    with pytest.raises(
        ModelError, match=r"does not fit, even in parts: the share of .* \(opt_state 16.4 kB, params 8.19 kB, .*is"
    ):
        trainer.train_step(DATA)
    peak.at("the refusal", extra=-SHARE)
    for source in (trainer.restore, trainer.load_pretrained):
        source(saved)  # is read when the state is placed
        with pytest.raises(ModelError, match="does not fit, even in parts: the share of"):
            trainer.train_step(DATA)
    peak.at("the refusal of a restore", extra=-SHARE)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: LAYERS * LEAF - 1)
    with pytest.raises(
        ModelError, match=r"trainer\.gather_model copies all weights to one device: 32.8 kB to .*save\(\)"
    ):
        _ = trainer.gather_model()
    monkeypatch.undo()
    trainer.train_step(DATA)
    assert trainer.gather_model()(DATA).shape == DATA.shape
