"""A vision transformer in NNX: images (batch, height, width, channels) to class logits."""

import jax.numpy as jnp
import optax
from flax import nnx

from jaxpp_flax import PipelineStage


class EncoderBlock(nnx.Module):
    def __init__(self, width, heads, dropout_rate, *, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=heads,
            in_features=width,
            dropout_rate=dropout_rate,
            deterministic=False,
            decode=False,
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(dropout_rate, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
            nnx.Dropout(dropout_rate, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nnx.Module):
    def __init__(self, *, size, patch, channels, classes, width, layers, heads, dropout_rate=0.1, rngs):
        patches = (size // patch) ** 2
        self.patch_embedding = nnx.Conv(
            channels, width, kernel_size=(patch, patch), strides=(patch, patch), padding="VALID", rngs=rngs
        )
        init = nnx.initializers.truncated_normal(0.5)
        self.class_token = nnx.Param(init(rngs.params(), (1, 1, width)))
        self.position_embedding = nnx.Param(init(rngs.params(), (1, patches + 1, width)))
        self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)
        settings = width, heads, dropout_rate
        blocks = [EncoderBlock(*settings, rngs=rngs) for _ in range(layers)]
        self.encoder = nnx.Sequential(*[PipelineStage(block) for block in blocks])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.classifier = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images):
        patches = self.patch_embedding(images)
        batch, height, width, features = patches.shape
        x = patches.reshape(batch, height * width, features)
        class_token = jnp.broadcast_to(self.class_token[...], (batch, 1, features))
        x = jnp.concatenate([class_token, x], axis=1)
        x = self.dropout(x + self.position_embedding[...])
        x = self.encoder(x)
        return self.classifier(self.norm(x)[:, 0])


def loss_fn(model, batch):
    logits = model(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}
