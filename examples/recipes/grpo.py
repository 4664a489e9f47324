"""Reinforcement with groups of samples (GRPO, arXiv 2402.03300), of adapters.

    python examples/recipes/grpo.py

The pipeline samples several answers to each prompt, the host gives each a reward, and
updates make those answers likelier that are above the mean of their group.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.layers import add_lora, without_adapters
from jaxpp_flax.trainers import Training

# A copy of this file needs examples/pretrained/llama.py beside it.
sys.path.append(str(Path(__file__).resolve().parents[1] / "pretrained"))
from llama import Llama, LlamaConfig

PROMPTS, SAMPLES, INNER = 8, 8, 2  # of a step: prompts, answers to each, updates
PROMPT, NEW = 4, 12  # tokens of a prompt, and of an answer
CLIP, KL = 0.2, 0.02
Batch = dict[str, Any]


def log_probs(model: Llama, tokens: jax.Array) -> jax.Array:
    """The log-probability of each token of the answers, in float32: (texts, NEW)."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return -each[:, -NEW:]


def loss_fn(model: Llama, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """The clipped objective and the distance from the reference, per counted token."""
    new = log_probs(model, batch["tokens"])
    reference = log_probs(without_adapters(model), batch["tokens"])
    ratio, advantage = jnp.exp(new - batch["old"]), batch["advantage"][:, None]
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gain = jnp.minimum(ratio * advantage, clipped * advantage)
    away = jax.lax.stop_gradient(reference) - new
    distance = jnp.exp(away) - away - 1  # at least 0; its mean is the KL divergence
    counted, total = batch["counted"], batch["counted"].sum()
    loss = jnp.sum((KL * distance - gain) * counted)
    return (loss, total), {"kl": (jnp.sum(distance * counted), total)}


def make_trainer(config: LlamaConfig, **options: Any) -> PipelineTrainer:
    def model(rngs: nnx.Rngs) -> Llama:
        base = Llama(config, rngs=rngs)
        return add_lora(base, rank=8, alpha=16, layers="blocks/*", rngs=rngs)

    train = Training(wrt=nnx.LoRAParam)  # the base is frozen: no gradient, no moments
    return PipelineTrainer(model, optax.adam(2e-3), loss_fn, training=train, **options)


def at_real_size(layers: int = 32, **options: Any) -> tuple[PipelineTrainer, Batch]:
    """An update of Llama 3.1 8B on 128 texts of 1,024 tokens, for `plan quote`."""
    sizes = {"width": 4096, "hidden": 14336, "heads": 32, "key_value_heads": 8}
    sizes |= {"vocabulary": 128_256, "head_size": 128}
    config = LlamaConfig(layers=layers, dtype=jnp.bfloat16, **sizes)
    batch = dict.fromkeys(
        ("old", "counted"), jax.ShapeDtypeStruct((128, NEW), jnp.float32)
    )
    batch["tokens"] = jax.ShapeDtypeStruct((128, 1025), jnp.int32)
    batch["advantage"] = jax.ShapeDtypeStruct((128,), jnp.float32)
    return make_trainer(config, **options), batch


def reward(answer: np.ndarray) -> float:
    """The share of even tokens. Yours may run a program, or ask a model."""
    return float((answer % 2 == 0).mean())


def sample(trainer: PipelineTrainer, prompts: list[list[int]], seed: int) -> Batch:
    """Answers with what the loss needs of them; prompts are of one length here."""
    options = {"max_new_tokens": NEW, "num_samples": SAMPLES, "temperature": 1.0}
    answers = trainer.generate(
        prompts, **options, seed=seed, logprobs="raw", prefill=PROMPT
    )
    rewards = np.array([reward(answer) for answer in answers]).reshape(-1, SAMPLES)
    centred = rewards - rewards.mean(1, keepdims=True)
    advantage = (centred / (rewards.std(1, keepdims=True) + 1e-4)).astype(np.float32)
    tokens = np.concatenate([np.repeat(prompts, SAMPLES, 0), np.stack(answers)], 1)
    old = np.stack(answers.logprobs)
    print(f"mean reward {rewards.mean():.3f}", end="  ")
    batch = {"old": old, "advantage": advantage.ravel(), "counted": np.ones_like(old)}
    return {"tokens": tokens.astype(np.int32), **batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # else the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 2)  # takes effect on CPU alone
    config, rng = LlamaConfig(vocabulary=32), np.random.default_rng(0)
    trainer = make_trainer(config, num_stages=2, num_microbatches=4, logging=False)
    for step in range(steps):
        prompts = rng.integers(0, config.vocabulary, (PROMPTS, PROMPT)).tolist()
        batch = sample(trainer, prompts, seed=step)
        for _ in range(INNER):
            metrics = trainer.train_step(batch)
        print(f"step {step + 1}, kl {float(metrics['kl']):.3f}", flush=True)


if __name__ == "__main__":
    main()
