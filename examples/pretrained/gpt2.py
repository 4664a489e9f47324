"""GPT-2 in NNX: tokens (batch, length) to logits of the next token. `NAMES` is the map of its weights.

The activations are those of evaluation and of fine-tuning without dropout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpp_flax import PipelineStage
from jaxpp_flax.pretrained import NameMap, Rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config:
    vocabulary: int = 256
    length: int = 64
    width: int = 64
    layers: int = 4
    heads: int = 4
    hidden: int = 256
    epsilon: float = 1e-5

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> GPT2Config:
        """Read the content of a `config.json`; refuse what this model does not compute."""
        for what, default, known in (
            ("model_type", None, "gpt2"),
            ("activation_function", "gelu_new", "gelu_new"),
            ("scale_attn_by_inverse_layer_idx", False, False),
            ("add_cross_attention", False, False),
            ("tie_word_embeddings", True, True),
        ):
            if config.get(what, default) != known:
                raise ValueError(
                    f"config.json has {what} {config.get(what)!r}; examples/pretrained/gpt2.py computes {known!r}."
                )
        return cls(
            vocabulary=config["vocab_size"],
            length=config["n_positions"],
            width=config["n_embd"],
            layers=config["n_layer"],
            heads=config["n_head"],
            hidden=config.get("n_inner") or 4 * config["n_embd"],
            epsilon=config["layer_norm_epsilon"],
        )


class Block(nnx.Module):
    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.query_key_value = nnx.Linear(config.width, 3 * config.width, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x):
        parts = jnp.split(self.query_key_value(self.attention_norm(x)), 3, axis=-1)
        query, key, value = (part.reshape(*x.shape[:2], self.heads, -1) for part in parts)
        x = x + self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x)), approximate=True))


class GPT2(nnx.Module):
    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.position = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(config, rngs=rngs)) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))  # the embedding is the output layer, too


def _norm(leaf: str, tensor: str) -> tuple[Rule, ...]:
    return Rule(f"{leaf}/scale", f"{tensor}.weight"), Rule(f"{leaf}/bias", f"{tensor}.bias")


def _linear(leaf: str, tensor: str) -> tuple[Rule, ...]:  # GPT-2 keeps weights as (in, out), as Flax does
    return Rule(f"{leaf}/kernel", f"{tensor}.weight"), Rule(f"{leaf}/bias", f"{tensor}.bias")


NAMES = NameMap(
    rules=(
        Rule("embed/embedding", "transformer.wte.weight"),
        Rule("position/embedding", "transformer.wpe.weight"),
        *_norm("blocks/*/attention_norm", "transformer.h.*.ln_1"),
        *_linear("blocks/*/query_key_value", "transformer.h.*.attn.c_attn"),
        *_linear("blocks/*/out", "transformer.h.*.attn.c_proj"),
        *_norm("blocks/*/mlp_norm", "transformer.h.*.ln_2"),
        *_linear("blocks/*/up", "transformer.h.*.mlp.c_fc"),
        *_linear("blocks/*/down", "transformer.h.*.mlp.c_proj"),
        *_norm("norm", "transformer.ln_f"),
    ),
    prefix="transformer.",
    # Masks that early versions wrote among the weights.
    ignore=("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"),
    ties={"lm_head.weight": "transformer.wte.weight"},
)
