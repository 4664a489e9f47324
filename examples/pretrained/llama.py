"""Llama, Mistral, Qwen2 and Qwen3 in NNX: tokens (batch, length) to logits of the next token.

`LlamaConfig.from_huggingface` reads a `config.json`; `NAMES` is the map of the weights for `load_pretrained` and
`export_pretrained`. Attention has grouped heads, rotary positions, and a cache for `trainer.generate`, which takes
several tokens of a prompt at once; the blocks are marked as possible cuts. A row may hold several documents: with
`segments`, the number of each token's document, a token sees only its own one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp_flax import PipelineStage
from jaxpp_flax.pretrained import NameMap, Rule

_MODELS = ("llama", "mistral", "qwen2", "qwen3")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    vocabulary: int = 256
    width: int = 64
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head_size: int = 16
    epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] | None = None  # Llama 3.1's, as in its config.json
    qkv_bias: bool = False  # Qwen2
    head_norm: bool = False  # Qwen3: queries and keys are normalized in each head
    window: int | None = None  # Mistral: how many tokens a token sees, itself included
    tied: bool = False  # the embedding is the output layer, too
    dtype: Any = jnp.float32  # of the computation; parameters are float32

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read the content of a `config.json`; refuse what this model does not compute."""
        kind = config.get("model_type")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        mixed = len(set(config.get("layer_types") or [])) > 1
        biased = config.get("attention_bias") or config.get("mlp_bias")
        for what, value, known in (
            ("model_type", kind, _MODELS),
            ("rope_type", rope_type, ("default", "llama3")),
            ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
            ("layer_types with several kinds of attention", mixed, (False,)),
            ("attention_bias or mlp_bias", bool(biased), (False,)),
        ):
            if value not in known:
                raise ValueError(f"config.json has {what} {value!r}; examples/pretrained/llama.py computes {known}.")
        windowed = kind == "mistral" or config.get("use_sliding_window")
        return cls(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            hidden=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            epsilon=config["rms_norm_eps"],
            rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
            rope_scaling=rope if rope_type == "llama3" else None,
            qkv_bias=kind == "qwen2",
            head_norm=kind == "qwen3",
            window=config.get("sliding_window") if windowed else None,
            tied=bool(config.get("tie_word_embeddings", False)),
        )


class Attention(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config, self.decode = config, False
        width, size = config.width, config.head_size

        def linear(ins: int, outs: int, bias: bool = False) -> nnx.Linear:
            return nnx.Linear(ins, outs, use_bias=bias, dtype=config.dtype, rngs=rngs)

        self.query = linear(width, config.heads * size, config.qkv_bias)
        self.key = linear(width, config.key_value_heads * size, config.qkv_bias)
        self.value = linear(width, config.key_value_heads * size, config.qkv_bias)
        self.out = linear(config.heads * size, width)
        if config.head_norm:
            self.query_norm = nnx.RMSNorm(size, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)
            self.key_norm = nnx.RMSNorm(size, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)

    def init_cache(self, input_shape, dtype=None):
        """Make the cache of `trainer.generate`, for sequences of shape (batch, length, ...)."""
        config = self.config
        shape = (*input_shape[:2], config.key_value_heads, config.head_size)
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype or config.dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype or config.dtype))
        self.cache_index = nnx.Cache(jnp.int32(0))  # the position of the next token

    def __call__(self, x, segments=None):
        config = self.config
        heads = (*x.shape[:2], -1, config.head_size)
        query, key, value = (layer(x).reshape(heads) for layer in (self.query, self.key, self.value))
        if config.head_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        positions = jnp.arange(x.shape[1]) + (self.cache_index[...] if self.decode else 0)
        # Rotary positions count only as differences, so they need not begin anew with each document.
        angles = positions[:, None] * frequencies(config)
        query, key = rotate(query, angles), rotate(key, angles)
        if self.decode:
            mixed = self.attend_to_cache(query, key, value, positions)
        else:
            window = None if config.window is None else (config.window - 1, 0)
            own = None if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
            mixed = jax.nn.dot_product_attention(query, key, value, mask=own, is_causal=True, local_window_size=window)
        return self.out(mixed.reshape(*x.shape[:2], -1))

    def attend_to_cache(self, query, key, value, positions):
        """Add the keys and values of one or more tokens to the cache; each token sees itself and those before it."""
        for cached, new in ((self.cached_key, key), (self.cached_value, value)):
            start = (0, self.cache_index[...], 0, 0)
            cached[...] = jax.lax.dynamic_update_slice(cached[...], new.astype(cached.dtype), start)
        self.cache_index[...] += key.shape[1]
        distance = positions[:, None] - jnp.arange(self.cached_key.shape[1])
        seen = (distance >= 0) & (distance < (self.config.window or distance.shape[1]))
        key, value = (cached[...].astype(query.dtype) for cached in (self.cached_key, self.cached_value))
        return jax.nn.dot_product_attention(query, key, value, mask=seen[None, None])


def frequencies(config: LlamaConfig) -> np.ndarray:
    """The angle of each pair of features from one position to the next."""
    size = config.head_size
    angles = 1.0 / config.rope_theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    if (scaling := config.rope_scaling) is not None:
        # Llama 3.1: slow turns become slower by `factor`, fast ones stay, those between are blended.
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * angles / (2 * math.pi)
        fast = np.clip((turns - low) / (high - low), 0, 1)
        angles = fast * angles + (1 - fast) * angles / scaling["factor"]
    return angles.astype(np.float32)


def rotate(x, angles):
    """Turn the features i and i + size/2 of each head by the position's angles."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def linear(ins: int, outs: int) -> nnx.Linear:
            return nnx.Linear(ins, outs, use_bias=False, dtype=config.dtype, rngs=rngs)

        self.attention_norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)
        self.gate, self.up = linear(config.width, config.hidden), linear(config.width, config.hidden)
        self.down = linear(config.hidden, config.width)

    def __call__(self, x, segments=None):
        x = x + self.attention(self.attention_norm(x), segments)
        y = self.mlp_norm(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocabulary, config.width, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List(
            [PipelineStage(Block(config, rngs=rngs), name=f"block_{i}") for i in range(config.layers)]
        )
        self.norm = nnx.RMSNorm(config.width, epsilon=config.epsilon, dtype=config.dtype, rngs=rngs)
        if not config.tied:
            self.head = nnx.Linear(config.width, config.vocabulary, use_bias=False, dtype=config.dtype, rngs=rngs)
        self.tied = config.tied

    def __call__(self, tokens, segments=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, segments)
        x = self.norm(x)
        return self.embed.attend(x) if self.tied else self.head(x)


_T = (1, 0)  # PyTorch keeps weights as (out, in)
NAMES = NameMap(
    rules=(
        Rule("embed/embedding", "model.embed_tokens.weight"),
        Rule("blocks/*/attention_norm/scale", "model.layers.*.input_layernorm.weight"),
        Rule("blocks/*/attention/query/kernel", "model.layers.*.self_attn.q_proj.weight", _T),
        Rule("blocks/*/attention/key/kernel", "model.layers.*.self_attn.k_proj.weight", _T),
        Rule("blocks/*/attention/value/kernel", "model.layers.*.self_attn.v_proj.weight", _T),
        Rule("blocks/*/attention/query/bias", "model.layers.*.self_attn.q_proj.bias"),
        Rule("blocks/*/attention/key/bias", "model.layers.*.self_attn.k_proj.bias"),
        Rule("blocks/*/attention/value/bias", "model.layers.*.self_attn.v_proj.bias"),
        Rule("blocks/*/attention/query_norm/scale", "model.layers.*.self_attn.q_norm.weight"),
        Rule("blocks/*/attention/key_norm/scale", "model.layers.*.self_attn.k_norm.weight"),
        Rule("blocks/*/attention/out/kernel", "model.layers.*.self_attn.o_proj.weight", _T),
        Rule("blocks/*/mlp_norm/scale", "model.layers.*.post_attention_layernorm.weight"),
        Rule("blocks/*/gate/kernel", "model.layers.*.mlp.gate_proj.weight", _T),
        Rule("blocks/*/up/kernel", "model.layers.*.mlp.up_proj.weight", _T),
        Rule("blocks/*/down/kernel", "model.layers.*.mlp.down_proj.weight", _T),
        Rule("norm/scale", "model.norm.weight"),
        Rule("head/kernel", "lm_head.weight", _T),
    ),
    prefix="model.",
    ignore=("*.rotary_emb.inv_freq",),
    ties={"lm_head.weight": "model.embed_tokens.weight"},
)
