"""A GPT whose products are in float8, beside the same GPT in bfloat16.

    python examples/recipes/fp8.py

Each linear layer gets Flax's product with delayed scaling: inputs, weights and
gradients are rounded to 8 bits by scales, made of the largest numbers of earlier steps.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer

# A copy of this file needs examples/train_gpt.py beside it.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from train_gpt import (
    GPT,
    Config,
    held_out_batches,
    loss_fn,
    read_source,
    training_batches,
)

EXAMPLES = 16


def in_float8(model: nnx.Module) -> nnx.Module:
    """Give each linear layer of the blocks a float8 product of its own."""
    for path, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Linear) and "blocks" in path:
            op = nnx.bridge.ToNNX(nn.Fp8DirectDotGeneralOp(), rngs=nnx.Rngs(0))
            kernel, last_axis_with_first = layer.kernel[...], (((1,), (0,)), ((), ()))
            op.lazy_init(jnp.ones((2, len(kernel))), kernel, last_axis_with_first)
            layer.dot_general = nnx.data(op)
    return model


def states_of(model: nnx.Module) -> Any:
    """The scales and the histories of largest numbers that float8 products keep."""
    of_products = nnx.PathContains("dot_general")
    return nnx.state(model, nnx.All(of_products, nnx.Not(nnx.RngState)))


def make_trainer(cfg: Config, float8: bool = True, **options: Any) -> PipelineTrainer:
    def model(rngs: nnx.Rngs) -> nnx.Module:
        plain = GPT(cfg, rngs=rngs)
        return in_float8(plain) if float8 else plain

    options = {"precision": "bfloat16"} | options
    return PipelineTrainer(model, optax.adamw(3e-3), loss_fn, **options)


def at_real_size(layers: int = 32, **options: Any) -> tuple[PipelineTrainer, Any]:
    """A GPT of 6.7 billion parameters on 256 texts of 2,048 tokens, to quote."""
    cfg = Config(layers=layers, width=4096, heads=32, length=2048, vocabulary=32_000)
    tokens = jax.ShapeDtypeStruct((256, cfg.length), jnp.int32)
    return make_trainer(cfg, **options), {"tokens": tokens, "targets": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if not jax.distributed.is_initialized():  # else the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", 2)  # takes effect on CPU alone
    cfg, (text, held_out) = Config(layers=4), read_source()
    held_out = held_out_batches(held_out, EXAMPLES, cfg.length)
    for name, float8 in (("bfloat16", False), ("float8", True)):
        trainer = make_trainer(
            cfg, float8, num_stages=2, num_microbatches=4, mesh={}, logging=False
        )
        batches = training_batches(text, EXAMPLES, cfg.length, seed=0)
        for step, batch in enumerate(islice(batches, steps), start=1):
            loss = trainer.train_step(batch)["loss"]
            if step % 50 == 0 or step == steps:
                print(f"{name} step {step} loss {float(loss):.3f}", flush=True)
        print(f"{name}: held-out loss {trainer.evaluate(held_out)['loss']:.3f}")
    states = jax.tree.leaves(states_of(trainer.gather_model()))
    nbytes = sum(leaf.nbytes for leaf in states)
    print(f"float8 keeps {len(states)} scales and histories, {nbytes:,} bytes")


if __name__ == "__main__":
    main()
