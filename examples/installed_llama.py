"""Fine-tunes the Llama of an installed package, `transformers`, as a pipeline: one line marks its layers. No PyTorch.

    pip install -e . huggingface_hub safetensors "transformers<5"      # 5 has no Flax models
    python examples/installed_llama.py --output first                  # a tiny one, from random weights
    python examples/installed_llama.py --output second --model first   # any directory with a Llama's safetensors

Its text is this Python's standard library, a byte a token: for a real model give `batches` your own tokens.

At real size: Llama 3 of 8 billion parameters under AdamW holds 16 bytes a parameter beside its residuals, 128 GB
in all, and 32 GB on each of 4 stages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train_gpt import held_out_batches, read_source, training_batches
from transformers import LlamaConfig
from transformers.models.llama.modeling_flax_llama import FlaxLlamaDecoderLayer, FlaxLlamaForCausalLMModule

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.linen import pipeline_stage
from jaxpp_flax.pretrained import NameMap, Rule

STAGES, MICROBATCHES, BATCH_SIZE, LENGTH = 4, 8, 32, 64
TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip

# PyTorch keeps a linear layer as (out, in), Flax as (in, out).
PRODUCTS = (*(f"self_attn/{name}_proj" for name in "qkvo"), *(f"mlp/{name}_proj" for name in ("gate", "up", "down")))
NAMES = NameMap(
    rules=(
        Rule("model/embed_tokens/embedding", "model.embed_tokens.weight"),
        *(
            Rule(f"model/layers/*/{name}/kernel", f"model.layers.*.{name.replace('/', '.')}.weight", transpose=(1, 0))
            for name in PRODUCTS
        ),
        Rule("model/layers/*/input_layernorm/weight", "model.layers.*.input_layernorm.weight"),
        Rule("model/layers/*/post_attention_layernorm/weight", "model.layers.*.post_attention_layernorm.weight"),
        Rule("model/norm/weight", "model.norm.weight"),
        Rule("lm_head/kernel", "lm_head.weight", transpose=(1, 0)),
    ),
    ignore=("*.rotary_emb.inv_freq",),
)


def loss_fn(model, batch):
    tokens = batch["tokens"]
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    # The module's own arguments: a mask of ones, since no row is padded.
    logits = model(tokens, np.ones(tokens.shape, np.int32), positions, deterministic=not model.training).logits
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a directory with config.json and safetensors")
    parser.add_argument("--output", required=True, help="the directory of the new weights")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", STAGES)  # takes effect on CPU alone

    config = json.loads((args.model / "config.json").read_text()) if args.model else TINY
    pipeline_stage(FlaxLlamaDecoderLayer)  # the model may be cut after each layer
    # Its layers name their dtype, float32 by default, which `precision=` keeps.
    module = FlaxLlamaForCausalLMModule(LlamaConfig(**config), dtype=jnp.bfloat16)
    row = np.zeros((1, LENGTH), np.int32)
    trainer = PipelineTrainer(
        module,
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, args.steps // 10, args.steps)),
        loss_fn,
        variables=lambda key: module.init(key, row, row, row),  # each parameter is made on the devices of its stage
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        precision="bfloat16",
    )
    if args.model:
        trainer.load_pretrained(args.model, map=NAMES, cast=True)
    train, held_out = read_source()
    trainer.fit(training_batches(train, BATCH_SIZE, LENGTH, seed=0), steps=args.steps)
    loss = trainer.evaluate(held_out_batches(held_out, BATCH_SIZE, LENGTH))["loss"]
    trainer.export_pretrained(args.output, map=NAMES, config=config | {"dtype": "float32"})
    print(f"{args.output}: held-out loss {loss:.3f} nats/byte")


if __name__ == "__main__":
    main()
