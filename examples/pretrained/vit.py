"""ViT for classification in NNX: images (batch, height, width, channels) to class logits.

`NAMES` is the map of its weights. The activations are those of evaluation and of fine-tuning without dropout.
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
class ViTConfig:
    image: int = 16
    patch: int = 4
    channels: int = 3
    classes: int = 10
    width: int = 64
    layers: int = 4
    heads: int = 4
    hidden: int = 128
    epsilon: float = 1e-12

    @classmethod
    def from_huggingface(cls, config: Mapping[str, Any]) -> ViTConfig:
        """Read the content of a `config.json`; refuse what this model does not compute."""
        for what, default, known in (
            ("model_type", None, "vit"),
            ("hidden_act", "gelu", "gelu"),
            ("qkv_bias", True, True),
        ):
            if config.get(what, default) != known:
                raise ValueError(
                    f"config.json has {what} {config.get(what)!r}; examples/pretrained/vit.py computes {known!r}."
                )
        return cls(
            image=config["image_size"],
            patch=config["patch_size"],
            channels=config["num_channels"],
            classes=len(config["id2label"]) if "id2label" in config else config.get("num_labels", 2),
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            hidden=config["intermediate_size"],
            epsilon=config["layer_norm_eps"],
        )


class Block(nnx.Module):
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=config.heads, in_features=config.width, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.up = nnx.Linear(config.width, config.hidden, rngs=rngs)
        self.down = nnx.Linear(config.hidden, config.width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x)), approximate=False))


class ViT(nnx.Module):
    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        patches = (config.image // config.patch) ** 2
        window = (config.patch, config.patch)
        self.patch = nnx.Conv(config.channels, config.width, window, strides=window, padding="VALID", rngs=rngs)
        self.first = nnx.Param(jnp.zeros((1, 1, config.width)))
        self.position = nnx.Param(jax.random.normal(rngs.params(), (1, patches + 1, config.width)) * 0.02)
        self.blocks = nnx.List([PipelineStage(Block(config, rngs=rngs)) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, epsilon=config.epsilon, rngs=rngs)
        self.head = nnx.Linear(config.width, config.classes, rngs=rngs)

    def __call__(self, images):
        patches = self.patch(images)
        patches = patches.reshape(images.shape[0], -1, patches.shape[-1])
        first = jnp.broadcast_to(self.first[...], (images.shape[0], 1, patches.shape[-1]))
        x = jnp.concatenate([first, patches], axis=1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def _norm(leaf: str, tensor: str) -> tuple[Rule, ...]:
    return Rule(f"{leaf}/scale", f"{tensor}.weight"), Rule(f"{leaf}/bias", f"{tensor}.bias")


def _linear(leaf: str, tensor: str) -> tuple[Rule, ...]:  # PyTorch keeps weights as (out, in)
    return Rule(f"{leaf}/kernel", f"{tensor}.weight", transpose=(1, 0)), Rule(f"{leaf}/bias", f"{tensor}.bias")


def _into_heads(leaf: str, tensor: str) -> tuple[Rule, ...]:  # (heads * size, in) to (in, heads, size)
    return (
        Rule(f"{leaf}/kernel", f"{tensor}.weight", merge=(2, 1), transpose=(2, 0, 1)),
        Rule(f"{leaf}/bias", f"{tensor}.bias", merge=(2,)),
    )


_LAYER = "vit.encoder.layer.*"
NAMES = NameMap(
    rules=(
        Rule("first", "vit.embeddings.cls_token"),
        Rule("position", "vit.embeddings.position_embeddings"),
        # (out, in, height, width) to (height, width, in, out)
        Rule("patch/kernel", "vit.embeddings.patch_embeddings.projection.weight", transpose=(2, 3, 1, 0)),
        Rule("patch/bias", "vit.embeddings.patch_embeddings.projection.bias"),
        *_norm("blocks/*/attention_norm", f"{_LAYER}.layernorm_before"),
        *_into_heads("blocks/*/attention/query", f"{_LAYER}.attention.attention.query"),
        *_into_heads("blocks/*/attention/key", f"{_LAYER}.attention.attention.key"),
        *_into_heads("blocks/*/attention/value", f"{_LAYER}.attention.attention.value"),
        # (out, heads * size) to (heads, size, out)
        Rule("blocks/*/attention/out/kernel", f"{_LAYER}.attention.output.dense.weight", (1, 2, 0), (1, 2)),
        Rule("blocks/*/attention/out/bias", f"{_LAYER}.attention.output.dense.bias"),
        *_norm("blocks/*/mlp_norm", f"{_LAYER}.layernorm_after"),
        *_linear("blocks/*/up", f"{_LAYER}.intermediate.dense"),
        *_linear("blocks/*/down", f"{_LAYER}.output.dense"),
        *_norm("norm", "vit.layernorm"),
        *_linear("head", "classifier"),
    ),
    prefix="vit.",
)
