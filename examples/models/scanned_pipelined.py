"""A transformer in Linen with layers under `nn.scan`, each under `nn.remat`, and logical names of axes."""

import dataclasses

import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxpp_flax.linen as pipeline

AXIS_RULES = (
    ("batch", "data"),
    *((name, None) for name in ("vocabulary", "length", "layers", "embed", "heads", "mlp")),
)


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    vocabulary: int = 256
    width: int = 64
    hidden: int = 256
    heads: int = 4
    layers: int = 8
    length: int = 64


def dense(features, axes, name):
    kernel_init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
    return nn.Dense(features, use_bias=False, kernel_init=kernel_init, name=name)


def norm(name):
    return nn.RMSNorm(scale_init=nn.with_logical_partitioning(nn.initializers.ones_init(), ("embed",)), name=name)


class DecoderLayer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, x, mask):
        cfg = self.config
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        y = norm("attention_norm")(x)
        query, key, value = (
            dense(cfg.width, ("embed", "heads"), name)(y).reshape(*y.shape[:2], cfg.heads, -1)
            for name in ("query", "key", "value")
        )
        y = nn.dot_product_attention(query, key, value, mask=mask)
        x = x + dense(cfg.width, ("heads", "embed"), "attention_out")(y.reshape(x.shape))
        y = nn.gelu(dense(cfg.hidden, ("embed", "mlp"), "mlp_in")(norm("mlp_norm")(x)))
        y = nn.with_logical_constraint(y, ("batch", "length", "mlp"))
        return x + dense(cfg.width, ("mlp", "embed"), "mlp_out")(y), None


class Transformer(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens):
        cfg = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocabulary", "embed"))
        x = nn.Embed(cfg.vocabulary, cfg.width, embedding_init=init, name="embed")(tokens)
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("length", "embed"))
        position = self.param("position", init, (cfg.length, cfg.width))
        x = x + position[: tokens.shape[1]]
        layers = pipeline.scan(
            nn.remat(DecoderLayer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=cfg.layers,
            stages=4,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(cfg, name="layers")(x, nn.make_causal_mask(tokens))
        return dense(cfg.vocabulary, ("embed", "vocabulary"), "head")(norm("final_norm")(x))


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))
