"""One GPT in bfloat16, int8, float8, and fine-tuned by adapters over weights of 4 bits: loss, bytes, seconds.

    pip install -e ".[qwix]"
    python benchmarks/formats.py [--steps 200] [--only bfloat16,int8] [--json FILE]

The model and the data are those of `examples/train_gpt.py`; two stages on two virtual CPU devices. Each row: the loss
on held-out text after these steps, the bytes of each rank as planned and as compiled, and the median of a step's
seconds. `QLoRA` begins with the weights that `bfloat16` has trained, in 4 bits (nf4), and trains adapters of rank 8:
its column "before" is the loss of the quantised weights. A CPU has no fast products of 8 bits: the
seconds show what rounding costs, not what an accelerator gains.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning import compiler_report, plan
from jaxpp_flax.trainers import Training

STAGES, MICROBATCHES, EXAMPLES = 2, 4, 16


def load_example() -> Any:
    """Import `examples/train_gpt.py`."""
    path = Path(__file__).parents[1] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


GPT = load_example()


# ------------------------------------------------------------------ the formats


def in_int8(model: nnx.Module, tokens: Any) -> nnx.Module:
    """Round inputs, weights and gradients of products with weights to int8. The scales leave room for no tie."""
    rule = qwix.QtRule(
        weight_qtype=jnp.int8, act_qtype=jnp.int8, bwd_qtype=jnp.int8,
        weight_calibration_method="absmax,1.01", act_calibration_method="absmax,1.01",
        bwd_calibration_method="absmax,1.01", op_names=("dot_general",),
    )  # fmt: skip
    return qwix.quantize_model(model, qwix.QtProvider([rule]), tokens)


def in_float8(model: nnx.Module, _tokens: Any) -> nnx.Module:
    """Give each linear layer Flax's product in float8, with scales of its own."""
    for i, (_, layer) in enumerate(nnx.iter_modules(model)):
        if isinstance(layer, nnx.Linear):
            op = nnx.bridge.ToNNX(nn.Fp8DirectDotGeneralOp(), rngs=nnx.Rngs(i))
            kernel = layer.kernel[...]
            made = op.lazy_init(jnp.ones((2, len(kernel))), kernel, (((1,), (0,)), ((), ())))
            layer.dot_general = nnx.data(made)
    return model


def with_adapters(model: nnx.Module, tokens: Any) -> nnx.Module:
    """Store weights of products in 4 bits, and add adapters, which alone are trained."""
    provider = qwix.LoraProvider(module_path="blocks.*", rank=8, alpha=16.0, weight_qtype="nf4", tile_size=32)
    return qwix.apply_lora_to_model(model, provider, tokens, rngs=nnx.Rngs(1))


FORMATS: dict[str, Callable[[nnx.Module, Any], nnx.Module]] = {
    "bfloat16": lambda model, _: model,
    "int8": in_int8,
    "float8": in_float8,
    "QLoRA": with_adapters,
}


# ------------------------------------------------------------------ a row


def batches(text: np.ndarray, seed: int) -> Iterator[Any]:
    return GPT.training_batches(text, EXAMPLES, GPT.Config().length, seed)


def row_of(name: str, model: nnx.Module, train: np.ndarray, held_out: list[Any], steps: int) -> tuple[Any, Any]:
    """Train one format; return its row, and the trained model."""
    tokens = held_out[0]["tokens"][:2]
    trainer = PipelineTrainer(
        FORMATS[name](model, tokens), optax.adamw(1e-3), GPT.loss_fn, num_stages=STAGES,
        num_microbatches=MICROBATCHES, mesh={}, precision="bfloat16", logging=False,
        training=Training(wrt=nnx.LoRAParam if name == "QLoRA" else nnx.Param),
    )  # fmt: skip
    data, seconds = batches(train, seed=1), list[float]()
    first = next(data)
    planned = plan(trainer, first).peak_bytes
    compiled = compiler_report(trainer.compile(first))
    before = trainer.evaluate(held_out)["loss"]
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready(trainer.train_step(next(data)))
        seconds.append(time.perf_counter() - began)
    return {
        "format": name, "before": float(before), "loss": float(trainer.evaluate(held_out)["loss"]),
        "planned": list(planned), "compiled": [rank.total for rank in compiled.ranks],
        "parameters": [rank.kinds["parameters"] + rank.kinds.get("model state", 0) for rank in compiled.ranks],
        "seconds": statistics.median(seconds[1:]),
    }, trainer.gather_model()  # fmt: skip


def show(row: dict[str, Any]) -> str:
    megabytes = ("/".join(f"{n / 1e6:.2f}" for n in row[key]) for key in ("planned", "compiled", "parameters"))
    columns = "".join(f"{text:>13}" for text in megabytes)
    return f"{row['format']:10}{row['before']:8.3f}{row['loss']:8.3f}{columns}{row['seconds']:9.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", default=",".join(FORMATS), help="some of the formats")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    train, held_out = GPT.read_source()
    windows = GPT.held_out_batches(held_out, EXAMPLES, GPT.Config().length)
    print(f"{'format':10}{'before':>8}{'loss':>8}{'planned MB':>13}{'compiled':>13}{'weights':>13}{'seconds':>9}")
    rows, trained = list[Any](), None
    for name in args.only.split(","):
        base = nnx.clone(trained) if name == "QLoRA" and trained else GPT.GPT(GPT.Config(), rngs=nnx.Rngs(0))
        row, model = row_of(name, base, train, windows, args.steps)
        trained = model if name == "bfloat16" else trained
        rows.append(row)
        print(show(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
