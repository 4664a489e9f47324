"""The model of a Hugging Face directory: made on the ranks that use it, with adapters or without, and its loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from settings import Settings

from jaxpp_flax.layers import add_lora

# In a copy of this folder, llama.py lies beside this file.
sys.path.append(str(Path(__file__).resolve().parents[1] / "pretrained"))
from llama import NAMES, Llama, LlamaConfig

__all__ = ["NAMES", "Llama", "LlamaConfig", "end_token", "loss_fn", "model_factory", "read_config"]


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


def end_token(config: Mapping[str, Any]) -> int:
    """The token that ends a document; the first one, if the configuration has several."""
    found = config.get("eos_token_id")
    first = found[0] if isinstance(found, list) and found else found
    if not isinstance(first, int):
        raise SystemExit(f"config.json has eos_token_id {found!r}: a number is needed, which ends each document.")
    return first


def model_factory(config: Mapping[str, Any], settings: Settings) -> Callable[[nnx.Rngs], Llama]:
    """A function for the trainer, by which no device ever holds more than its stage."""
    ours = replace(LlamaConfig.from_huggingface(config), dtype=jnp.dtype(settings.dtype))

    def make(rngs: nnx.Rngs) -> Llama:
        model = Llama(ours, rngs=rngs)
        if not settings.lora_rank:
            return model
        lora = {"rank": settings.lora_rank, "alpha": settings.lora_alpha, "layers": settings.lora_layers}
        return add_lora(model, **lora, rngs=rngs)

    return make


def loss_fn(model: Llama, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The sum of the cross-entropies in nats, and their number: the trainer divides the sums of the whole batch."""
    logits = model(batch["inputs"], batch["segments"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    counted = batch["segments"] != 0
    return jnp.sum(losses * counted), jnp.sum(counted)
