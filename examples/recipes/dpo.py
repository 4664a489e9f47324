"""Preference training (DPO, arXiv 2305.18290); the reference has adapters off.

    python examples/recipes/dpo.py

A batch holds pairs of texts: an answer that people chose, and one that they rejected.
The loss compares how much more likely each is under the model than under the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.layers import add_lora, without_adapters
from jaxpp_flax.trainers import Logging, Training

# A copy of this file needs examples/pretrained/llama.py beside it.
sys.path.append(str(Path(__file__).resolve().parents[1] / "pretrained"))
from llama import Llama, LlamaConfig

BETA, PROMPT = 0.1, 8  # the strength of the reference; tokens before the answer
Batch = dict[str, Any]


def answer_log_probs(model: Llama, texts: jax.Array) -> jax.Array:
    """The log-probability of each text's answer, given its prompt; in float32."""
    logits = model(texts[:, :-1]).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, texts[:, 1:])
    return -each[:, PROMPT - 1 :].sum(-1)


def loss_fn(model: Llama, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    pairs = batch["texts"]  # (pairs, 2, length): the chosen text, then the rejected one
    texts = pairs.reshape(-1, pairs.shape[-1])
    now, before = (answer_log_probs(m, texts) for m in (model, without_adapters(model)))
    rewards = (BETA * (now - jax.lax.stop_gradient(before))).reshape(-1, 2)
    margin = rewards[:, 0] - rewards[:, 1]
    metrics = {"accuracy": (margin > 0).mean(), "margin": margin.mean()}
    return -jax.nn.log_sigmoid(margin).mean(), metrics


def make_trainer(config: LlamaConfig, **options: Any) -> PipelineTrainer:
    def model(rngs: nnx.Rngs) -> Llama:
        base = Llama(config, rngs=rngs)
        return add_lora(base, rank=8, alpha=16, layers="blocks/*", rngs=rngs)

    train = Training(wrt=nnx.LoRAParam)  # the base is frozen: no gradient, no moments
    return PipelineTrainer(model, optax.adam(3e-3), loss_fn, training=train, **options)


def at_real_size(layers: int = 32, **options: Any) -> tuple[PipelineTrainer, Batch]:
    """Llama 3.1 8B on 64 pairs of 1,024 tokens, for `plan quote`."""
    sizes = {"width": 4096, "hidden": 14336, "heads": 32, "key_value_heads": 8}
    sizes |= {"vocabulary": 128_256, "head_size": 128}
    config = LlamaConfig(layers=layers, dtype=jnp.bfloat16, **sizes)
    shape = jax.ShapeDtypeStruct((64, 2, 1025), jnp.int32)
    return make_trainer(config, **options), {"texts": shape}


def pairs(seed: int, size: int = 32, length: int = 16) -> Iterator[Batch]:
    """Prompts that count up; the chosen answer goes on, the rejected one is noise."""
    rng = np.random.default_rng(seed)
    while True:
        text = (rng.integers(0, 256, (size, 1)) + np.arange(PROMPT + length)) % 256
        noise = text.copy()
        noise[:, PROMPT:] = rng.integers(0, 256, (size, length))
        yield {"texts": np.stack([text, noise], axis=1).astype(np.int32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # else the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 2)  # takes effect on CPU alone
    trainer = make_trainer(
        LlamaConfig(), num_stages=2, num_microbatches=4, logging=Logging(every=20)
    )
    held_out = next(pairs(seed=1))
    trainer.fit(pairs(seed=0), steps=steps)
    scores = trainer.evaluate([held_out])
    print(f"held-out accuracy {scores['accuracy']:.2f}, margin {scores['margin']:.2f}")


if __name__ == "__main__":
    main()
