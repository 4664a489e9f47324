"""Models with explicit caches: tokens and log-probabilities are those of the plain model, without a cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import ExplicitCache, Generated, MeshOptions, ModelError
from tests.helpers import slow
from tests.trainers.generation import explicit_models as e
from tests.trainers.generation import models as m
from tests.trainers.generation.plain_loop import generate_plainly, plain_model

NEW = 5
SAMPLED = {"temperature": 0.9, "top_k": 8, "top_p": 0.95, "seed": 5, "eos_token_id": 3, "num_samples": 3}


def make(model: Any, stages: int, **options: Any) -> PipelineTrainer:
    return PipelineTrainer(
        model, optax.sgd(0.1), m.loss_fn, num_stages=stages, num_microbatches=2, logging=False, **options
    )


def linen(stages: int, **options: Any) -> PipelineTrainer:
    module = e.LinenStack()
    variables = lambda key: module.init(key, jnp.ones((1, 2), jnp.int32))  # noqa: E731
    return make(module, stages, variables=variables, **options)


MODELS: dict[str, tuple[Any, ExplicitCache | None]] = {
    "attention": (lambda *of, **options: make(lambda rngs: e.Stack(e.AttentionBlock, rngs), *of, **options), e.KEYS),
    "recurrent": (lambda *of, **options: make(lambda rngs: e.Stack(e.RecurrentBlock, rngs), *of, **options), e.STATE),
    "linen": (linen, e.LINEN),
    "implicit": (lambda *of, **options: make(lambda rngs: m.GPT(rngs, num_blocks=2), *of, **options), None),
}
DATA = {"mesh": MeshOptions(axes={"data": 2})}


def check(trainer: PipelineTrainer, cache: ExplicitCache | None, prompts: Any, new: int, **options: Any) -> Generated:
    """Compare a generation with the plain loop."""
    of_loop = {"logprobs": "raw", **options}
    own = {name: of_loop.pop(name) for name in ("prefill", "groups", "cache_length") if name in options}
    tokens, scores, of_prompts = generate_plainly(plain_model(trainer), prompts, new, length=m.POSITIONS, **of_loop)
    found = trainer.generate(prompts, max_new_tokens=new, cache=cache, prompt_logprobs=True, **own, **of_loop)
    assert [row.tolist() for row in found] == tokens
    assert found.logprobs is not None
    assert found.prompt_logprobs is not None
    # Sums of float32 in another order: logits of about 5 are rounded by 5e-7 in each of several operations.
    for ours, theirs in ((found.logprobs, scores), (found.prompt_logprobs, of_prompts)):
        assert [row.shape for row in ours] == [np.shape(row) for row in theirs]
        np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs), rtol=1e-5, atol=1e-5)
    return found


CASES = [
    ("attention", 2, {}),
    ("recurrent", 1, {}),
    slow("implicit", 1, {}),
    slow("attention", 1, {}),
    slow("recurrent", 2, {}),
    slow("linen", 1, {}),
    slow("linen", 2, {}),
    slow("implicit", 2, {}),
    slow("attention", 2, DATA),
    slow("recurrent", 2, DATA),
    slow("implicit", 2, DATA),
]


@pytest.mark.parametrize(("kind", "stages", "options"), CASES)
def test_ragged_prompts_and_their_samples_are_those_of_a_loop_without_a_cache(kind: str, stages: int, options: Any):
    make_trainer, cache = MODELS[kind]
    trainer = make_trainer(stages, **options)
    check(trainer, cache, m.PROMPTS, NEW)
    found = check(trainer, cache, m.PROMPTS, NEW, logprobs="processed", **SAMPLED)
    assert {len(row) == NEW for row in found} == {True, False}, "some samples end early"
    if kind == "attention" and stages == 2:  # the cache of each block is on the devices of its own stage alone
        for step in [of for key, of in trainer.steps.compiled.items() if key[0] == "generate"]:
            by_block = [{leaf.ranks for leaf in block} for block in step.in_shardings[0][1][0]]
            assert by_block == [{(0,)}, {(1,)}]


WITHOUT_PADDING = {
    "one token in a call": ExplicitCache(init_cache=e.init_states, apply=e.apply, tokens_per_call=1),
    "no padding": ExplicitCache(init_cache=e.init_states, apply=e.apply, takes_padding=False),
}


@pytest.mark.parametrize("of", [slow(name) for name in WITHOUT_PADDING])
def test_a_cache_that_takes_no_padding_is_prefilled_up_to_the_shortest_prompt(of: str):
    check(MODELS["recurrent"][0](1), WITHOUT_PADDING[of], m.PROMPTS, NEW)


def test_prompts_are_padded_to_few_lengths_and_go_through_once():
    trainer, seen = MODELS["recurrent"][0](1), list[tuple[int, ...]]()

    def counted(model: Any, inputs: Any, cache: Any) -> Any:
        seen.append(inputs.tokens.shape)
        return e.apply(model, inputs, cache)

    cache = ExplicitCache(init_cache=e.init_states, apply=counted)
    options = {"max_new_tokens": 3, "cache": cache, "groups": 1, "temperature": 1.0, "num_samples": 2}
    trainer.generate([[1, 2, 3], [4, 5, 6, 7]], **options)
    assert set(seen) == {(2, 4), (4, 1)}, "two prompts at once, then a token of each of four samples"
    traced = len(seen)
    trainer.generate([[1, 2, 3, 4], [4, 5, 6]], **options)
    assert len(seen) == traced, "these lengths have the same programs"


def with_apply(**changed: Any) -> ExplicitCache:
    return ExplicitCache(**{"init_cache": e.init_states, "apply": e.apply, **changed})


def half(model: Any, rows: int, length: int) -> Any:
    return [jnp.zeros((4, e.WIDTH)) for _ in model.blocks]


REFUSED = [
    ({"cache": e.KEYS, "max_new_tokens": 40}, ModelError, "ExplicitCache.init_cache refuses sequences of 43 tokens"),
    (
        {"cache": with_apply(init_cache=half)},
        ModelError,
        "the cache leaf 0, float32[4, 8], has no dimension",
    ),
    ({"cache": with_apply(init_cache=lambda *_: [])}, ModelError, "init_cache returns no array"),
    ({"cache": with_apply(apply=lambda model, x, cache: e.apply(model, x, cache)[0])}, ModelError, "(logits, cache)"),
    (
        {"cache": with_apply(apply=lambda model, x, cache: (e.apply(model, x, cache)[0], cache))},
        ModelError,
        "ExplicitCache.apply must return the new cache",
    ),
    (
        {"cache": with_apply(apply=lambda model, x, cache: (e.apply(model, x, cache)[0], cache[:1]))},
        ModelError,
        "Return a cache of the same structure",
    ),
    ({"cache": e.apply}, TypeError, "it must be an ExplicitCache(init_cache=, apply=)"),
    ({"cache": e.STATE, "cache_dtype": "bfloat16"}, ValueError, "cache_dtype='bfloat16': an explicit cache has"),
    (
        {"cache": WITHOUT_PADDING["one token in a call"], "prefill": 4},
        ValueError,
        "prefill=4: the model's cache takes",
    ),
    (
        {"cache": e.STATE, "cache_length": 4},
        ValueError,
        "cache_length=4: the longest prompt, 4 tokens, with",
    ),
    ({"cache": e.STATE, "num_samples": 2}, ValueError, "num_samples=2 and temperature=0.0"),
    ({"cache": e.STATE, "num_samples": 0}, ValueError, "num_samples=0"),
    ({"cache": e.STATE, "logprobs": 5}, ValueError, "logprobs=5"),
]


def test_what_cannot_work_is_refused_before_anything_runs():
    trainer = MODELS["recurrent"][0](1)
    attends = MODELS["attention"][0](1)
    for changed, kind, text in REFUSED:
        of = attends if changed["cache"] is e.KEYS else trainer
        with pytest.raises(kind) as caught:
            of.generate(**{"prompts": [[1, 2, 3, 4]], "max_new_tokens": 2, **changed})
        assert text in str(caught.value)
    assert not trainer.steps.compiled
    with pytest.raises(TypeError, match="ExplicitCache\\(apply=3\\): it must be a function"):
        with_apply(apply=3)
