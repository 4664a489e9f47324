"""`trainer.generate`: tokens equal to those of the model alone, caches on their own ranks, and refusals."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineStage, PipelineTrainer, mark_stage_end
from jaxpp_flax.engine.arrays import device_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import MeshOptions, ModelError, Training
from jaxpp_flax.trainers.state.train_state import is_abstract
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from tests.examples.running import load_example
from tests.helpers import slow, slow_but, tree_allclose
from tests.trainers import models as plain
from tests.trainers.generation import models as m
from tests.trainers.generation.models import NEW, PROMPTS, loss_fn


def small(rngs: nnx.Rngs) -> m.GPT:
    return m.GPT(rngs, num_blocks=2)


def make(model: Any, **options: Any) -> PipelineTrainer:
    made = (lambda rngs: model(rngs)) if isinstance(model, type) else model
    options = {"tx": optax.sgd(0.1), "num_stages": 2, **options}
    return PipelineTrainer(made, loss_fn=loss_fn, num_microbatches=2, logging=False, **options)


# Tests of the shared trainer have these groups and this length of a cache, so that they share programs too.
SHAPES = {"groups": 2, "cache_length": 12}


@pytest.fixture(scope="module")
def shared() -> PipelineTrainer:
    """Two blocks, one on each rank, and nothing placed; tests may train it: its head alone, without a backward pass."""
    return make(small, training=Training(frozen=["embed", "positions", "blocks"]))


class Constrained(m.GPT):
    """Names an axis: without a mesh, its constraint could not even be traced."""

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(super().__call__(tokens), P("data"))


LAYOUTS = {
    "2 stages on a rank, data, axes named": {
        "model": Constrained,
        "num_stages": 4,
        "schedule": "interleaved_1f1b",
        "mesh": MeshOptions(axes={"data": 2}, num_ranks=2),
    },
    "1 stage": {"num_stages": 1},
    "4 stages": {"num_stages": 4},
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "2 stages on a rank, data, axes named"))
def test_tokens_are_those_of_the_whole_model_up_to_an_end(layout: str):
    """An array with lengths holds the prompts; an end token ends each sequence by itself."""
    trainer = make(**{"model": m.GPT, **LAYOUTS[layout]})
    plain = nnx.graphdef(nnx.eval_shape(lambda: m.GPT(nnx.Rngs(0))))  # names no axis
    greedy = m.greedy(nnx.merge(plain, nnx.state(trainer.gather_model())), PROMPTS, NEW)
    padded = np.full((len(PROMPTS), 5), m.VOCABULARY + 5)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    ends = [int(greedy[0][2]), 12]
    expected = [row[: next((i for i, token in enumerate(row) if token in ends), NEW) + 1] for row in greedy]
    assert {len(row) == NEW for row in expected} == {False, True}
    options = {"lengths": list(map(len, PROMPTS)), "max_new_tokens": NEW, "eos_token_id": ends}
    m.assert_equal(trainer.generate(padded, **options), expected)


def test_samples_depend_on_seed_prompt_and_position_alone(shared: PipelineTrainer):
    one = make(shared.gather_model(), num_stages=1)
    options = {"max_new_tokens": NEW, "temperature": 1.5, "top_k": 9, "top_p": 0.95}
    found = shared.generate(PROMPTS, seed=0, **SHAPES, **options)
    m.assert_equal(found, one.generate(PROMPTS, groups=1, seed=0, **options))
    other = one.generate(PROMPTS, groups=1, seed=1, **options)
    assert any(a.tolist() != b.tolist() for a, b in zip(found, other, strict=True))


def numbers_in(state: Any) -> list[np.ndarray]:
    """Copies of all leaves but the keys of random numbers."""
    return [np.array(leaf) for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]


def test_generation_changes_no_state_and_follows_training(shared: PipelineTrainer):
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, m.VOCABULARY, (4, 5)).astype(np.int32) for name in ("tokens", "targets")}
    shared.train_step(batch)  # with dropout
    found = []
    for _ in range(2):
        before = numbers_in(shared.state)
        found.append(shared.generate(PROMPTS, max_new_tokens=NEW, **SHAPES))
        tree_allclose(numbers_in(shared.state), before, rtol=0, atol=0)
        model = shared.gather_model()
        shared.train_step(batch)
    m.assert_equal(found[-1], m.greedy(model, PROMPTS, NEW))
    assert any(a.tolist() != b.tolist() for a, b in zip(*found, strict=True)), "the weights matter"


@pytest.mark.parametrize(("window", "stages"), [(3, 1), slow(None, 2), slow(3, 2)])
def test_a_llama_takes_several_tokens_of_a_prompt_at_once(window: int | None, stages: int):
    example = load_example("pretrained/llama.py")
    config = example.LlamaConfig(
        vocabulary=m.VOCABULARY, width=8, hidden=8, heads=2, key_value_heads=1, head_size=4, window=window
    )
    prompts = [[1, 2, 3, 4], [9, 8, 7, 6, 5]]
    trainer = make(lambda rngs: example.Llama(config, rngs=rngs), num_stages=stages)
    expected = m.greedy(trainer.gather_model(), prompts, NEW)
    m.assert_equal(trainer.generate(prompts, max_new_tokens=NEW, prefill=4, groups=1), expected)


def test_each_cache_lies_on_its_own_rank(shared: PipelineTrainer, monkeypatch: pytest.MonkeyPatch):
    """Live bytes of a cache's shape on each device, during a generation: one block of two on each of two ranks."""
    seen = list[dict[int, int]]()
    shape = (3, SHAPES["cache_length"], 2, m.WIDTH // 2)  # three rows in a group, two heads
    for_decoding = CompiledSteps.for_decoding

    def counting(self: Any, *arguments: Any) -> Any:
        step = for_decoding(self, *arguments)

        def counted(*of: Any) -> Any:
            result = step(*of)
            del of
            jax.block_until_ready(result)
            live: dict[int, int] = {}
            for array in jax.live_arrays():
                if array.shape == shape and not array.is_deleted():
                    for shard in array.addressable_shards:
                        live[shard.device.id] = live.get(shard.device.id, 0) + shard.data.nbytes
            seen.append(live)
            return result

        counted.in_shardings = step.in_shardings  # type: ignore[attr-defined]
        return counted

    monkeypatch.setattr(CompiledSteps, "for_decoding", counting)
    gc.collect()
    shared.generate(PROMPTS, max_new_tokens=NEW, **SHAPES)
    each = 2 * SHAPES["groups"] * int(np.prod(shape)) * 4  # keys and values, float32
    devices = [shared.mesh.rank_devices(rank)[0].id for rank in range(2)]  # type: ignore[union-attr]
    assert seen[0] == dict.fromkeys(devices, each)
    assert all(live == seen[0] for live in seen[: len(seen) // 2])  # in place: no second copy
    assert all(isinstance(leaf, MpmdArray) for leaf in jax.tree.leaves(shared.state.params))
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 100)
    with pytest.raises(ModelError, match=r"the cache of this generation does not fit: .* has 100 B free"):
        shared.generate(PROMPTS, max_new_tokens=NEW, **SHAPES)


def test_calls_with_one_cache_length_share_their_compiled_steps():
    trainer = make(lambda rngs: m.GPT(rngs, num_blocks=1), num_stages=1, tx=optax.adam(0.1))
    for prompts in (PROMPTS, [[2], [3, 1], [4, 4, 4], [5], [6]]):
        trainer.generate(prompts, max_new_tokens=NEW, cache_length=12)
        assert len(trainer.steps.compiled) == 1
        assert is_abstract(trainer.held.memory.opt_state)  # no optimizer is made


class Forgetful(nnx.Module):
    """Attention that makes a cache, and does not use it."""

    def __init__(self, rngs: nnx.Rngs, *, made_at: str = "init_cache"):
        self.embed = nnx.Embed(m.VOCABULARY, m.WIDTH, rngs=rngs)
        self.layers = nnx.List([PipelineStage(nnx.Linear(m.WIDTH, m.VOCABULARY, rngs=rngs))])
        if made_at == "__init__":
            self.kept = nnx.Cache(jnp.zeros(3))

    def init_cache(self, input_shape: Any, dtype: Any = jnp.float32) -> None:
        if not hasattr(self, "kept"):
            self.kept = nnx.Cache(jnp.zeros(input_shape[:2], dtype))

    def __call__(self, tokens: Any) -> Any:
        return self.layers[0](self.embed(tokens))


class Attention(nnx.Linear):
    """A module without a cache whose name says that it looks at other positions."""


REFUSED_MODELS = [
    (Forgetful, {}, "does not write its cache variable kept"),
    (lambda rngs: Forgetful(rngs, made_at="__init__"), {}, "makes cache variables in its constructor (kept)"),
    (small, {"prefill": 4}, "prefill asks the model for 2 tokens in one call, which it refuses"),
    (small, {"cache_dtype": "bfloat16"}, "the model fails for the next token with its cache"),
    (small, {"max_new_tokens": 30}, "positions.init_cache refuses sequences of 31 tokens"),
]


def test_a_model_that_cannot_generate_is_refused_before_anything_runs():
    for model, options, text in REFUSED_MODELS:
        with pytest.raises(ModelError) as caught:
            make(model, num_stages=1).generate([[1, 2]], **{"max_new_tokens": 2, **options})
        assert text in str(caught.value)


def test_a_model_without_a_cache_is_told_what_to_add():
    class Plain(plain.Layers):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs=rngs)
            self.attention = Attention(1, 1, rngs=rngs)

    with pytest.raises(ModelError, match=r"Plain has no cache.*init_cache.*attention \(Attention\)"):
        make(Plain).generate([[1]], max_new_tokens=1)
    module = plain.LinenModel(2)
    variables = lambda key: module.init(key, jnp.ones((1, 2), jnp.int32))  # noqa: E731
    with pytest.raises(ModelError, match=r"LinenModel has neither a field `decode` nor an argument"):
        make(module, variables=variables).generate([[1]], max_new_tokens=1)


@pytest.mark.parametrize("stages", [slow(1), 2])
def test_a_linen_model_makes_its_cache_by_init(stages: int):
    module = m.LinenGPT()
    trainer = make(
        module,
        variables=lambda key: module.init(key, jnp.ones((1, 2), jnp.int32), training=False),
        num_stages=stages,
    )
    variables = trainer.gather_variables()
    expected = m.greedy_of(lambda tokens: module.apply(variables, tokens, training=False), PROMPTS, NEW)
    m.assert_equal(trainer.generate(PROMPTS, max_new_tokens=NEW), expected)
    with pytest.raises(ValueError, match="cache_dtype='bfloat16': the Linen module LinenGPT"):
        trainer.generate(PROMPTS, max_new_tokens=NEW, cache_dtype="bfloat16")


REFUSED_ARGUMENTS = [
    ({"prompts": []}, ValueError, "prompts is empty"),
    ({"prompts": [[1], []]}, ValueError, "prompts[1] is empty"),
    ({"prompts": "text"}, TypeError, "is text"),
    ({"prompts": [[0.5]]}, TypeError, "prompts[0] holds float64"),
    ({"prompts": [[1, 13]]}, ValueError, "prompts[0] has the token 13 at position 1, but the model has tokens from 0"),
    ({"prompts": [[1, -1]]}, ValueError, "prompts[0] has the token -1"),
    ({"prompts": [[1 << 40]]}, ValueError, "no 32-bit number"),
    ({"prompts": np.ones(3, int)}, ValueError, "prompts has shape (3,)"),
    ({"prompts": np.ones((2, 3), int), "lengths": [1, 4]}, ValueError, "lengths=[1, 4]: each must be from 1 to 3"),
    ({"prompts": np.ones((2, 3), int), "lengths": [1]}, ValueError, "lengths has shape (1,)"),
    ({"lengths": [1]}, ValueError, "lengths are for an array"),
    ({"max_new_tokens": 0}, ValueError, "max_new_tokens=0"),
    ({"cache_length": 2}, ValueError, "cache_length=2: the longest prompt, 2 tokens, with max_new_tokens=2 needs 3"),
    ({"prefill": 0}, ValueError, "prefill=0"),
    ({"groups": -1}, ValueError, "groups=-1"),
    ({"temperature": -1.0}, ValueError, "temperature=-1.0"),
    ({"temperature": float("nan")}, ValueError, "temperature=nan"),
    ({"temperature": float("inf")}, ValueError, "temperature=inf"),
    ({"top_k": 5}, ValueError, "top_k=5 and temperature=0.0"),
    ({"temperature": 1.0, "top_k": 14}, ValueError, "top_k=14: the model has 13 tokens"),
    ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p=0.0"),
    ({"seed": -1}, ValueError, "seed=-1"),
    ({"eos_token_id": 13}, ValueError, "eos_token_id has the token 13"),
    ({"eos_token_id": "end"}, TypeError, "eos_token_id='end'"),
]


def test_arguments_that_do_not_fit_are_refused_before_anything_runs():
    untouched = make(small)
    for changed, kind, text in REFUSED_ARGUMENTS:
        with pytest.raises(kind) as caught:
            untouched.generate(**{"prompts": [[1, 2]], "max_new_tokens": 2, **changed})
        assert text in str(caught.value)
    assert not untouched.steps.compiled
    assert is_abstract(untouched.held.memory), "nothing is placed"


class WithMethod(m.GPT):
    """`decode` is an ordinary name for a method, as from features to logits."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs, num_blocks=2)

    def decode(self, x: jax.Array) -> jax.Array:
        return self.head(x)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.positions(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.decode(x)


class WithModule(WithMethod):
    """`decode` is the output layer, a module."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.decode, self.head = self.head, None


class WithProperty(WithModule):
    """`decode` only reads the switch of another module."""

    def __init__(self, rngs: nnx.Rngs):
        m.GPT.__init__(self, rngs, num_blocks=2)

    @property
    def decode(self) -> bool:
        return self.positions.decode

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return m.GPT.__call__(self, tokens)


@pytest.mark.parametrize("model", [WithMethod, WithModule, WithProperty])
def test_what_is_called_decode_and_is_no_switch_stays(model: Any):
    found = make(model(nnx.Rngs(0))).generate(PROMPTS[:2], max_new_tokens=3, **SHAPES)
    m.assert_equal(found, m.greedy(model(nnx.Rngs(0)), PROMPTS[:2], 3))


def test_a_linen_field_called_decode_that_is_no_switch_is_not_set():
    class Named(nn.Module):
        decode: str = "greedy"

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            return nn.Dense(3)(nn.Embed(5, 4)(tokens))

    module = Named()
    variables = module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    with pytest.raises(ModelError, match=r"Named has neither a field `decode` nor an .* that is a boolean"):
        make(module, variables=variables).generate(PROMPTS[:1], max_new_tokens=1)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="GPUs have this product")
@pytest.mark.parametrize("num_stages", [1, 2])
def test_attention_in_float16_is_refused_on_cpu(num_stages: int):
    class Half(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(5, 8, rngs=rngs, dtype=jnp.float16)
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, dtype=jnp.float16, rngs=rngs)
            self.head = PipelineStage(nnx.Linear(8, 5, rngs=rngs))

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return mark_stage_end(self.head(mark_stage_end(self.attention(self.embed(tokens)))))

    trainer = make(Half(nnx.Rngs(0)), num_stages=num_stages, mesh={})
    with pytest.raises(ModelError, match=r"lacks on these devices: .*F16_F16_F32.*float16.*dtype=jnp\.bfloat16"):
        trainer.generate([[1, 2]], max_new_tokens=1)
