"""`trainer.generate`: tokens equal to those of the model alone, caches on their own ranks, and refusals."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.engine.arrays import device_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.trainers import MeshOptions, ModelError
from jaxpp_flax.trainers.state.train_state import is_abstract
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from tests.examples.running import load_example
from tests.trainers import models as plain
from tests.trainers.generation import models as m
from tests.trainers.generation.models import NEW, PROMPTS, loss_fn


def make(model: Any, **options: Any) -> PipelineTrainer:
    made = (lambda rngs: model(rngs)) if isinstance(model, type) else model
    options = {"tx": optax.sgd(0.1), "num_stages": 2, **options}
    return PipelineTrainer(made, loss_fn=loss_fn, num_microbatches=2, logging=False, **options)


@pytest.fixture(scope="module")
def greedy() -> list[np.ndarray]:
    return m.greedy(m.GPT(nnx.Rngs(0)), PROMPTS, NEW)


LAYOUTS = [
    pytest.param({"num_stages": 1}, id="1 stage"),
    pytest.param({"num_stages": 2, "mesh": {"data": 2}}, id="2 stages, data"),
    pytest.param({"num_stages": 4}, id="4 stages"),
    pytest.param(
        {"num_stages": 4, "schedule": "interleaved_1f1b", "mesh": MeshOptions(num_ranks=2)}, id="2 stages on a rank"
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_greedy_tokens_are_those_of_the_whole_model(layout: dict[str, Any], greedy: list[np.ndarray]):
    trainer = make(m.GPT, **layout)  # nothing is placed before
    m.assert_equal(trainer.generate(PROMPTS, max_new_tokens=NEW), greedy)
    # An array with lengths holds the same prompts; an end token ends each sequence by itself.
    padded = np.full((len(PROMPTS), 5), m.VOCABULARY + 5)
    for row, prompt in zip(padded, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    end = int(greedy[0][2])
    cut = [row[: list(row).index(end) + 1] if end in row else row for row in greedy]
    assert any(len(row) < NEW for row in cut)
    lengths = list(map(len, PROMPTS))
    m.assert_equal(
        trainer.generate(padded, lengths=lengths, max_new_tokens=NEW, eos_token_id=[end, 12]),
        [row[: next(i for i, token in enumerate([*row, end]) if token in (end, 12)) + 1] for row in greedy],
    )


def test_samples_depend_on_seed_prompt_and_position_alone():
    found = [
        make(m.GPT(nnx.Rngs(0)), num_stages=stages).generate(
            PROMPTS, max_new_tokens=NEW, temperature=1.5, top_k=9, top_p=0.95, seed=seed, groups=groups
        )
        for stages, groups, seed in ((1, 1, 0), (2, 3, 0), (1, 1, 1))
    ]
    m.assert_equal(found[1], found[0])
    assert any(one.tolist() != other.tolist() for one, other in zip(found[0], found[2], strict=True))


def test_generation_changes_no_state_and_follows_training(greedy: list[np.ndarray]):
    trainer, model = make(m.GPT(nnx.Rngs(0), dropout=0.1)), m.GPT(nnx.Rngs(0), dropout=0.1)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, m.VOCABULARY, (4, 5)).astype(np.int32) for name in ("tokens", "targets")}
    m.assert_equal(trainer.generate(PROMPTS, max_new_tokens=NEW), greedy)
    trainer.train_step(batch)
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves((trainer.state.params, trainer.state.opt_state))]
    nnx.update(model, nnx.state(trainer.gather_model(), nnx.Param))
    after_step = trainer.generate(PROMPTS, max_new_tokens=NEW)
    m.assert_equal(after_step, m.greedy(model, PROMPTS, NEW))
    assert [row.tolist() for row in after_step] != [row.tolist() for row in greedy]  # the weights matter
    for old, new in zip(before, jax.tree.leaves((trainer.state.params, trainer.state.opt_state)), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))
    reference = make(m.GPT(nnx.Rngs(0), dropout=0.1))
    reference.train_step(batch)
    assert float(trainer.train_step(batch)["loss"]) == float(reference.train_step(batch)["loss"])


@pytest.mark.parametrize(("window", "stages"), [(None, 2), (3, 1)])
def test_a_llama_takes_several_tokens_of_a_prompt_at_once(window: int | None, stages: int):
    example = load_example("pretrained/llama.py")
    config = example.LlamaConfig(
        vocabulary=m.VOCABULARY, width=8, hidden=8, heads=2, key_value_heads=1, head_size=4, window=window
    )
    prompts = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1]]
    expected = m.greedy(example.Llama(config, rngs=nnx.Rngs(3)), prompts, NEW)
    trainer = make(example.Llama(config, rngs=nnx.Rngs(3)), num_stages=stages)
    m.assert_equal(trainer.generate(prompts, max_new_tokens=NEW, prefill=4, groups=1), expected)


def test_each_cache_lies_on_its_own_rank(monkeypatch: pytest.MonkeyPatch):
    """Live bytes of a cache's shape on each device, during a generation: one block of four on each of four ranks."""
    trainer, seen = make(m.GPT(nnx.Rngs(0)), num_stages=4), list[dict[int, int]]()
    groups, rows, length = 2, 3, 5 + NEW - 1
    shape = (rows, length, 2, m.WIDTH // 2)
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
    trainer.generate(PROMPTS, max_new_tokens=NEW, groups=groups)
    each = 2 * groups * int(np.prod(shape)) * 4  # keys and values, float32
    devices = [trainer.mesh.rank_devices(rank)[0].id for rank in range(4)]  # type: ignore[union-attr]
    assert seen[0] == dict.fromkeys(devices, each)
    assert all(live == seen[0] for live in seen[: len(seen) // 2])  # in place: no second copy
    assert all(isinstance(leaf, MpmdArray) for leaf in jax.tree.leaves(trainer.state.params))


def test_calls_with_one_cache_length_share_their_compiled_steps(
    greedy: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
):
    trainer = make(m.GPT(nnx.Rngs(0)), tx=optax.adam(0.1))
    for prompts in (PROMPTS, [[2], [3, 1], [4, 4, 4], [5], [6]]):
        found = trainer.generate(prompts, max_new_tokens=NEW, cache_length=12)
        assert len(trainer._core.executables.compiled) == 1
        assert is_abstract(trainer._core.held.memory.opt_state)  # no optimizer is made
        if prompts is PROMPTS:
            m.assert_equal(found, greedy)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 100)
    with pytest.raises(ModelError, match=r"the cache of this generation does not fit: .* has 100 B free"):
        trainer.generate(PROMPTS, max_new_tokens=NEW, cache_length=12)


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
    (m.GPT, {"prefill": 4}, "prefill asks the model for 2 tokens in one call, which it refuses"),
    (m.GPT, {"cache_dtype": "bfloat16"}, "the model fails for the next token with its cache"),
    (m.GPT, {"max_new_tokens": 30}, "positions.init_cache refuses sequences of 31 tokens"),
]


@pytest.mark.parametrize(("model", "options", "text"), REFUSED_MODELS, ids=[text for *_, text in REFUSED_MODELS])
def test_a_model_that_cannot_generate_is_refused_before_anything_runs(model: Any, options: Any, text: str):
    trainer = make(model, num_stages=1)
    with pytest.raises(ModelError) as caught:
        trainer.generate([[1, 2]], **{"max_new_tokens": 2, **options})
    assert text in str(caught.value)


def test_a_model_without_a_cache_is_told_what_to_add():
    class Plain(plain.Model):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(2, rngs=rngs)
            self.attention = Attention(1, 1, rngs=rngs)

    with pytest.raises(ModelError, match=r"Plain has no cache.*init_cache.*attention \(Attention\)"):
        make(Plain).generate([[1]], max_new_tokens=1)
    module = plain.LinenModel(2)
    variables = module.init(jax.random.key(0), jnp.ones((1, 2), jnp.int32))
    with pytest.raises(ModelError, match=r"LinenModel has neither a field `decode` nor an argument"):
        make(module, variables=variables).generate([[1]], max_new_tokens=1)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_linen_model_makes_its_cache_by_init(stages: int):
    module = m.LinenGPT()
    variables = module.init(jax.random.key(0), jnp.ones((1, 2), jnp.int32), training=False)
    expected = m.greedy_of(lambda tokens: module.apply(variables, tokens, training=False), PROMPTS, NEW)
    trainer = make(
        module,
        variables=lambda key: module.init(key, jnp.ones((1, 2), jnp.int32), training=False),
        num_stages=stages,
    )
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
    ({"top_k": 5}, ValueError, "top_k=5 and temperature=0.0"),
    ({"temperature": 1.0, "top_k": 14}, ValueError, "top_k=14: the model has 13 tokens"),
    ({"temperature": 1.0, "top_p": 0.0}, ValueError, "top_p=0.0"),
    ({"seed": -1}, ValueError, "seed=-1"),
    ({"eos_token_id": 13}, ValueError, "eos_token_id has the token 13"),
    ({"eos_token_id": "end"}, TypeError, "eos_token_id='end'"),
]


@pytest.fixture(scope="module")
def untouched() -> PipelineTrainer:
    return make(m.GPT)


@pytest.mark.parametrize(("changed", "kind", "text"), REFUSED_ARGUMENTS, ids=[text for *_, text in REFUSED_ARGUMENTS])
def test_arguments_that_do_not_fit_are_refused_before_anything_runs(
    untouched: PipelineTrainer, changed: dict[str, Any], kind: type[Exception], text: str
):
    with pytest.raises(kind) as caught:
        untouched.generate(**{"prompts": [[1, 2]], "max_new_tokens": 2, **changed})
    assert text in str(caught.value)
    assert not untouched._core.executables.compiled
    assert is_abstract(untouched._core.held.memory), "nothing is placed"
