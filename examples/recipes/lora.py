"""LoRA (arXiv 2106.09685): weights of a base in, adapters trained, one plain model out.

    pip install -e ".[huggingface]"
    python examples/recipes/lora.py --output tuned

Reads a Llama, Mistral, Qwen2 or Qwen3 directory by `--model`; else makes a tiny base.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.layers import add_lora
from jaxpp_flax.pretrained import export_pretrained, load_pretrained
from jaxpp_flax.trainers import Logging, Training

# A copy of this file needs examples/pretrained/llama.py beside it.
sys.path.append(str(Path(__file__).resolve().parents[1] / "pretrained"))
from llama import NAMES, Llama, LlamaConfig

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "rms_norm_eps": 1e-6,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
Batch = dict[str, Any]


def write_base(directory: Path) -> None:
    """A tiny base, as files: random weights, which know nothing."""
    model = Llama(LlamaConfig.from_huggingface(TINY), rngs=nnx.Rngs(1))
    export_pretrained(nnx.state(model, nnx.Param), directory, map=NAMES, config=TINY)


def read_model(directory: Path) -> Llama:
    """A plain model with the weights of a directory, without a trainer."""
    text = json.loads((directory / "config.json").read_text())
    model = Llama(LlamaConfig.from_huggingface(text), rngs=nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    nnx.update(model, load_pretrained(directory, params, map=NAMES, cast=True))
    return model


def loss_fn(model: Llama, batch: Batch) -> jax.Array:
    logits, targets = model(batch["tokens"]), batch["targets"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def make_trainer(config: LlamaConfig, **options: Any) -> PipelineTrainer:
    def model(rngs: nnx.Rngs) -> Llama:
        base = Llama(config, rngs=rngs)
        return add_lora(base, rank=8, alpha=16, layers="blocks/*", rngs=rngs)

    train = Training(wrt=nnx.LoRAParam)  # the base is frozen: no gradient, no moments
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
    base = args.model or args.output / "base"
    if args.model is None:
        write_base(base)
    config = json.loads((base / "config.json").read_text())
    trainer = make_trainer(
        LlamaConfig.from_huggingface(config),
        num_stages=2,
        num_microbatches=4,
        logging=Logging(every=20),
    )
    # Files of a base have no adapters: those keep the values of `add_lora`.
    trainer.load_pretrained(base, map=NAMES, cast=True, keep="*/lora_*")
    held_out = next(rows(seed=1))
    print(f"held-out loss {trainer.evaluate([held_out])['loss']:.3f}, of the base")
    trainer.fit(rows(seed=0), steps=args.steps)
    print(f"held-out loss {trainer.evaluate([held_out])['loss']:.3f}, with adapters")
    trainer.save(args.output / "adapters", only="params/*")
    config |= {"dtype": "float32"}  # the type of the files
    trainer.export_pretrained(args.output / "model", map=NAMES, config=config)
    merged = read_model(args.output / "model")
    print(f"held-out loss {loss_fn(merged, held_out):.3f}, of the merged files")


if __name__ == "__main__":
    main()
