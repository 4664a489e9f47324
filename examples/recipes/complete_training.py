"""Trains a GPT from a file of tokens, from the first batch to exported weights.

    python examples/recipes/complete_training.py --run run    # after Ctrl-C it goes on

Tokens are memory-mapped: a file may be larger than the memory. Every 50 steps the run
evaluates and saves; the best checkpoint is kept, and becomes the exported weights.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import Checkpoints, JsonlTracker, PipelineTrainer, pipeline_stage
from jaxpp_flax.trainers import Logging

VOCABULARY, WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 256, 64, 4, 4, 64, 16


@pipeline_stage  # the model may be cut after each block
class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.widen = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.attend(self.norm1(x)).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = jnp.moveaxis(heads, 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.reshape(x.shape))
        return x + self.narrow(jax.nn.gelu(self.widen(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(BLOCKS)])
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
    logits, targets = model(batch["tokens"]), batch["targets"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


class Windows:
    """Batches of random windows, without end; a resume sets the number of the next."""

    def __init__(self, path: Path):
        self.tokens, self.number = np.memmap(path, np.uint16, "r"), 0

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.number)
        self.number += 1
        starts = rng.integers(len(self.tokens) - LENGTH, size=(BATCH, 1))
        rows = self.tokens[starts + np.arange(LENGTH + 1)].astype(np.int32)
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    def get_state(self) -> dict[str, int]:  # a checkpoint holds it
        return {"number": self.number}

    def set_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def write_tokens(folder: Path) -> None:
    """A file to train on and one to evaluate on: bytes of Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", files[10:]), ("held_out", files[:10])):
        text = b"".join(path.read_bytes() for path in part)
        np.frombuffer(text, np.uint8).astype(np.uint16).tofile(folder / f"{name}.bin")


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a GPT from a file of tokens.")
    parser.add_argument("--run", type=Path, required=True, help="a directory")
    parser.add_argument("--steps", type=int, default=300)
    run, steps = vars(parser.parse_args()).values()
    jax.config.update("jax_num_cpu_devices", 4)  # takes effect on CPU alone
    if not any(run.glob("*.bin")):
        write_tokens(run)
    rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps)
    trainer = PipelineTrainer(
        lambda rngs: GPT(rngs=rngs), optax.adamw(rate), loss_fn,
        num_stages=4, num_microbatches=4, mesh={},
        checkpoints=Checkpoints(run / "steps", every=50, keep=2, best="eval_loss"),
        logging=Logging(tracker=JsonlTracker(run / "metrics.jsonl")),
    )  # fmt: skip
    train, held_out = (Windows(run / f"{name}.bin") for name in ("train", "held_out"))
    evaluated = [next(held_out) for _ in range(8)]  # the same ones each time
    trainer.fit(train, steps=steps, eval_data=evaluated, eval_every=50, resume=True)
    trainer.restore("best")
    trainer.export_pretrained(run / "model")
    print(f"the weights of step {trainer.step} are in {run / 'model'}")


if __name__ == "__main__":
    main()
