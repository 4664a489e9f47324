"""Trains a byte-level GPT on the source of Python's standard library, in four pipeline stages.

    python examples/train_gpt.py                      # 4 stages on 4 virtual CPU devices, or on 4 accelerators
    JAX_PLATFORMS=cpu python examples/train_gpt.py    # on a machine with fewer accelerators than that
    python examples/train_gpt.py --no-pipeline        # the same training under plain jax.jit
    python examples/train_gpt.py --stages 8 --ranks 4 --schedule interleaved_1f1b
    python examples/train_gpt.py --stages 2 --data-parallel 2

All that makes it a pipeline is `PipelineStage` in `GPT.__init__`, and `PipelineTrainer` in `train_pipelined`.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.trainers import MeshOptions, Training

Batch = dict[str, np.ndarray]
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


# ---------------------------------------------------------------- the model: ordinary Flax, with its blocks marked
@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int = 8
    width: int = 64
    heads: int = 4
    length: int = 64
    vocabulary: int = 256  # bytes


class Block(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        zeros = nnx.initializers.zeros_init()  # a new block is the identity, which trains much faster
        self.heads = cfg.heads
        self.norm1 = nnx.RMSNorm(cfg.width, rngs=rngs)
        self.attend = nnx.Linear(cfg.width, 3 * cfg.width, use_bias=False, rngs=rngs)
        self.mix = nnx.Linear(cfg.width, cfg.width, use_bias=False, kernel_init=zeros, rngs=rngs)
        self.norm2 = nnx.RMSNorm(cfg.width, rngs=rngs)
        self.widen = nnx.Linear(cfg.width, 4 * cfg.width, use_bias=False, rngs=rngs)
        self.narrow = nnx.Linear(4 * cfg.width, cfg.width, use_bias=False, kernel_init=zeros, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, width)
        batch, length, width = x.shape
        qkv = self.attend(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = jnp.moveaxis(qkv, 2, 0)
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.reshape(x.shape))
        return x + self.narrow(jax.nn.gelu(self.widen(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(cfg.vocabulary, cfg.width, rngs=rngs)
        self.position = nnx.Embed(cfg.length, cfg.width, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(cfg, rngs=rngs), name=f"block_{i}") for i in range(cfg.layers)])
        self.norm = nnx.RMSNorm(cfg.width, rngs=rngs)
        self.head = nnx.Linear(cfg.width, cfg.vocabulary, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:  # (batch, length) -> (batch, length, vocabulary)
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model: GPT, batch: Batch) -> jax.Array:
    """Mean cross-entropy in nats per byte."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()


# ---------------------------------------------------------------- the data: source text that every machine has
def read_source() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the training files, and of the held-out ones (every tenth file)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    parts: tuple[list[str], list[str]] = ([], [])
    for i, path in enumerate(path for path in paths if not SKIPPED_FOLDERS.intersection(path.parts)):
        try:
            parts[i % 10 == 9].append((root / path).read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # the few files in another encoding
    if not parts[0] or not parts[1]:
        raise SystemExit(f"found no source files under {root}: this Python comes without its library's source")
    train, held_out = (np.frombuffer("\n".join(texts).encode(), np.uint8) for texts in parts)
    return train, held_out


def windows(data: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    text = data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return {"tokens": text[:, :-1], "targets": text[:, 1:]}


def training_batches(data: np.ndarray, batch_size: int, length: int, seed: int) -> Iterator[Batch]:
    """Random windows, without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield windows(data, rng.integers(0, len(data) - length, size=batch_size), length)


def held_out_batches(data: np.ndarray, batch_size: int, length: int, batches: int = 16) -> list[Batch]:
    """Windows spread evenly over the held-out text: the same ones in every run."""
    starts = np.linspace(0, len(data) - length - 1, num=batches * batch_size).astype(np.int64)
    return [windows(data, part, length) for part in np.split(starts, batches)]


# ---------------------------------------------------------------- the training, pipelined and plain
def train_pipelined(args: argparse.Namespace, cfg: Config, tx: optax.GradientTransformation, train, held_out):
    trainer = PipelineTrainer(
        lambda rngs: GPT(cfg, rngs=rngs),  # each parameter is made on the devices of its stage
        tx,
        loss_fn,
        num_stages=args.stages,
        num_microbatches=args.microbatches,
        schedule=args.schedule,
        mesh=MeshOptions(axes={"data": args.data_parallel}, num_ranks=args.ranks),
        training=Training(seed=args.seed),
    )
    trainer.fit(train, steps=args.steps)
    return trainer.gather_model(), trainer.evaluate(held_out)["loss"]


def train_plain(args: argparse.Namespace, cfg: Config, tx: optax.GradientTransformation, train, held_out):
    """Gradient accumulation over the same microbatches, on one device."""
    graphdef, params = nnx.split(GPT(cfg, rngs=nnx.Rngs(args.seed)))
    opt_state = tx.init(params)

    def loss_of(params, batch):
        return loss_fn(nnx.merge(graphdef, params), batch)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        def accumulate(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(params, microbatch)), None

        microbatches = jax.tree.map(lambda x: x.reshape(args.microbatches, -1, *x.shape[1:]), batch)
        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(accumulate, zero, microbatches)
        loss, grads = jax.tree.map(lambda x: x / args.microbatches, total)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    start = time.perf_counter()
    for step, batch in zip(range(1, args.steps + 1), train, strict=False):
        params, opt_state, loss = train_step(params, opt_state, batch)
        if step == 1 or step % 50 == 0 or step == args.steps:
            print(f"step {step:5d}  loss {loss:.4f}  {time.perf_counter() - start:6.1f} s", flush=True)
    evaluate = jax.jit(loss_of)
    loss = np.mean([evaluate(params, batch) for batch in held_out])
    return nnx.merge(graphdef, params), loss


def sample(model: GPT, cfg: Config, prompt: str, num_bytes: int, seed: int, temperature: float = 0.7) -> str:
    """Continues the prompt, byte by byte, in a window of fixed size: compiled once."""
    graphdef, params = nnx.split(model)

    @jax.jit
    def continue_text(params, window, key):
        def next_byte(window, key):
            logits = nnx.merge(graphdef, params)(window[None])[0, -1]
            byte = jax.random.categorical(key, logits / temperature)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, window, jax.random.split(key, num_bytes))[1]

    window = jnp.array(list(prompt.encode().rjust(cfg.length, b"\n")[-cfg.length :]))
    written = np.asarray(continue_text(params, window, jax.random.key(seed)))
    return prompt + bytes(written.astype(np.uint8)).decode(errors="replace")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--layers", default=Config.layers, help="transformer blocks (default %(default)s)")
    add("--width", default=Config.width, help="width of the model (default %(default)s)")
    add("--heads", default=Config.heads, help="attention heads (default %(default)s)")
    add("--length", default=Config.length, help="bytes of context (default %(default)s)")
    add("--stages", default=4, help="pipeline stages (default %(default)s)")
    add("--ranks", help="groups of devices that the stages go round (default: as many as stages)")
    add("--data-parallel", default=1, help="devices in each group (default %(default)s)")
    add("--microbatches", default=8, help="microbatches in a batch (default %(default)s)")
    add("--batch-size", default=32, help="examples in a batch (default %(default)s)")
    add("--steps", default=300, help="optimizer steps (default %(default)s)")
    add("--seed", default=0)
    parser.add_argument("--learning-rate", default=6e-3, type=float, metavar="X", help="its peak (default %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, ... (default %(default)s)")
    parser.add_argument("--no-pipeline", action="store_true", help="train under plain jax.jit instead")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        # Takes effect on CPU alone, and only before JAX's first use.
        jax.config.update("jax_num_cpu_devices", max(4, (args.ranks or args.stages) * args.data_parallel))

    cfg = Config(layers=args.layers, width=args.width, heads=args.heads, length=args.length)
    warmup = min(40, args.steps // 5)
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, args.steps, 0.05 * args.learning_rate)
    tx = optax.adamw(rate, b2=0.98, weight_decay=0.05)

    train_data, held_out_data = read_source()
    train = training_batches(train_data, args.batch_size, cfg.length, args.seed)
    held_out = held_out_batches(held_out_data, args.batch_size, cfg.length)
    print(f"{len(train_data):,} bytes to train on, {len(held_out_data):,} bytes held out")

    run = train_plain if args.no_pipeline else train_pipelined
    model, loss = run(args, cfg, tx, train, held_out)
    print(f"held-out loss: {loss:.3f} nats/byte")
    print(sample(model, cfg, "import os\n\n\ndef ", num_bytes=400, seed=args.seed))


if __name__ == "__main__":
    main()
