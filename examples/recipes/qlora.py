"""QLoRA (arXiv 2305.14314): weights of 4 bits, adapters trained, one model out.

    pip install -e ".[qwix,huggingface]"
    python examples/recipes/qlora.py --output tuned

Reads a Llama, Mistral, Qwen2 or Qwen3 directory by `--model`; else makes a tiny base.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.pretrained import export_pretrained, load_pretrained
from jaxpp_flax.trainers import Logging, Training

# A copy of this file needs examples/pretrained/llama.py beside it.
sys.path.append(str(Path(__file__).resolve().parents[1] / "pretrained"))
from llama import NAMES, Llama, LlamaConfig

RANK, ALPHA = 8, 16.0
Batch = dict[str, Any]


def load_base(config: LlamaConfig, directory: Path) -> Llama:
    """The weights of a directory in a plain model, in the host's memory."""
    model = Llama(config, rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, load_pretrained(directory, params, map=NAMES, cast=True))
    return model


def with_adapters(base: Llama, weights: str = "nf4") -> Llama:
    """Store the blocks' weights in 4 bits ("nf4", "int4"), and add adapters."""
    provider = qwix.LoraProvider(
        module_path="blocks.*",
        rank=RANK,
        alpha=ALPHA,
        weight_qtype=weights,
        tile_size=32,
    )
    example = jnp.zeros((1, 8), jnp.int32)
    return qwix.apply_lora_to_model(base, provider, example, rngs=nnx.Rngs(1))


def merged(adapted: Llama, base: Llama) -> Llama:
    """Give a plain model the trained weights: those of 4 bits, with the adapters."""
    trained = dict(nnx.iter_modules(adapted))
    for path, layer in nnx.iter_modules(base):
        of = trained[path]
        if hasattr(of, "kernel_lora_a"):
            bits, scale = of.kernel.array.qvalue[...], of.kernel.array.scale[...]
            kernel = qwix.dequantize(replace(of.kernel.array, qvalue=bits, scale=scale))
            term = ALPHA / RANK * of.kernel_lora_a[...] @ of.kernel_lora_b[...]
            layer.kernel[...] = kernel + term.reshape(kernel.shape)
    return base


def loss_fn(model: Llama, batch: Batch) -> jax.Array:
    logits, targets = model(batch["tokens"]), batch["targets"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_trainer(model: Any, **options: Any) -> PipelineTrainer:
    train = Training(wrt=nnx.LoRAParam)  # no gradient, no moments for the 4 bits
    return PipelineTrainer(model, optax.adamw(5e-3), loss_fn, training=train, **options)


def rows(seed: int, size: int = 32, length: int = 32) -> Iterator[Batch]:
    """Texts that count up by a step of their own."""
    rng = np.random.default_rng(seed)
    while True:
        start, step = rng.integers(0, 256, (size, 1)), rng.integers(1, 4, (size, 1))
        text = ((start + step * np.arange(length + 1)) % 256).astype(np.int32)
        yield {"tokens": text[:, :-1], "targets": text[:, 1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--output", type=Path, default=Path("tuned"))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if not jax.distributed.is_initialized():  # else the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 2)  # takes effect on CPU alone
    config, text = LlamaConfig(), None
    if args.model is None:
        base = Llama(config, rngs=nnx.Rngs(0))
    else:
        text = json.loads((args.model / "config.json").read_text())
        config = LlamaConfig.from_huggingface(text)
        base = load_base(config, args.model)
    trainer = make_trainer(
        with_adapters(base), num_stages=2, num_microbatches=4, logging=Logging(every=20)
    )
    trainer.fit(rows(seed=0), steps=args.steps)
    held_out = next(rows(seed=1))
    print(f"held-out loss {trainer.evaluate([held_out])['loss']:.3f}, in 4 bits")
    trainer.save(args.output / "adapters", only="params/*")
    model = merged(trainer.gather_model(), base)
    print(f"held-out loss {loss_fn(model, held_out):.3f}, of the merged model")
    params = nnx.state(model, nnx.Param)
    export_pretrained(params, args.output / "model", map=NAMES, config=text)


if __name__ == "__main__":
    main()
