"""Models with explicit caches: tokens and log-probabilities are those of the plain model, without a cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import ExplicitCache, Generated, MeshOptions
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
    ("implicit", 1, {}),
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
