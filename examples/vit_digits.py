"""Trains a vision transformer on scikit-learn's handwritten digits, in four pipeline stages.

    python examples/vit_digits.py                     # 4 stages on 4 virtual CPU devices, or on 4 accelerators
    python examples/vit_digits.py --no-pipeline       # the plain model under plain jax.jit
    python examples/vit_digits.py --stages 2 --schedule gpipe

The plain model is in `models/vit.py`, the one for the pipeline in `models/vit_pipelined.py`:
`docs/start/own_model.md` shows the difference. Needs scikit-learn, for the images alone: `pip install scikit-learn`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from models import vit, vit_pipelined

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Logging

Batch = dict[str, np.ndarray]


def read_digits() -> tuple[Batch, Batch]:
    """1,437 images of 8 x 8 to train on, and 360 held out: the same ones in every run."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit(
            "the images come with scikit-learn, which is not installed: pip install scikit-learn"
        ) from None
    digits = load_digits()
    images = (digits.images[..., None] / 8 - 1).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = (
        {"image": images[part], "label": digits.target[part].astype(np.int32)} for part in (order[360:], order[:360])
    )
    return train, held_out


def shift(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each image moved by up to one pixel in either direction."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    y, x = (rng.integers(0, 3, len(images))[:, None] + np.arange(8) for _ in range(2))
    return padded[np.arange(len(images))[:, None, None], y[:, :, None], x[:, None, :]]


def training_batches(data: Batch, batch_size: int, seed: int) -> Iterator[Batch]:
    """Random images, shifted, without end."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = rng.choice(len(data["label"]), batch_size, replace=False)
        yield {"image": shift(data["image"][chosen], rng), "label": data["label"][chosen]}


def train_pipelined(args: argparse.Namespace, model: nnx.Module, tx: optax.GradientTransformation, train, held_out):
    devices = jax.devices() if len(jax.devices()) >= args.stages else jax.devices("cpu")
    mesh = jax.sharding.Mesh(np.array(devices[: args.stages]), ("stage",))
    plan = {"num_stages": args.stages, "num_microbatches": args.microbatches, "schedule": args.schedule, "mesh": mesh}
    trainer = PipelineTrainer(model, tx, vit_pipelined.loss_fn, logging=Logging(every=50), **plan)
    trainer.fit(train, steps=args.steps)
    return trainer.evaluate([held_out])["accuracy"]


def train_plain(args: argparse.Namespace, model: nnx.Module, tx: optax.GradientTransformation, train, held_out):
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, batch):
        (loss, _), grads = nnx.value_and_grad(vit.loss_fn, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss

    start = time.perf_counter()
    for step, batch in zip(range(1, args.steps + 1), train, strict=False):
        loss = train_step(model, optimizer, batch)
        if step == 1 or step % 50 == 0 or step == args.steps:
            print(f"step {step:5d}  loss {loss:.4f}  {time.perf_counter() - start:6.1f} s", flush=True)
    model.eval()
    return nnx.jit(vit.loss_fn)(model, held_out)[1]["accuracy"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--layers", default=4, help="encoder blocks (default %(default)s)")
    add("--width", default=48, help="width of the model (default %(default)s)")
    add("--heads", default=4, help="attention heads (default %(default)s)")
    add("--stages", default=4, help="pipeline stages (default %(default)s)")
    add("--microbatches", default=4, help="microbatches in a batch (default %(default)s)")
    add("--batch-size", default=64, help="images in a batch (default %(default)s)")
    add("--steps", default=1400, help="optimizer steps (default %(default)s)")
    add("--seed", default=0)
    parser.add_argument("--learning-rate", default=2e-3, type=float, metavar="X", help="its peak (default %(default)s)")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, ... (default %(default)s)")
    parser.add_argument("--no-pipeline", action="store_true", help="train the plain model under plain jax.jit")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        # Takes effect on CPU alone, and only before JAX's first use.
        jax.config.update("jax_num_cpu_devices", max(4, args.stages))
    train_data, held_out = read_digits()
    print(f"{len(train_data['label'])} images to train on, {len(held_out['label'])} held out")

    config = {"size": 8, "patch": 2, "channels": 1, "classes": 10, "dropout_rate": 0.0}
    config |= {"width": args.width, "layers": args.layers, "heads": args.heads}
    rate = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, args.steps // 10, args.steps)
    tx = optax.adamw(rate, weight_decay=0.05)
    module, run = (vit, train_plain) if args.no_pipeline else (vit_pipelined, train_pipelined)
    model = module.ViT(**config, rngs=nnx.Rngs(args.seed))
    train = training_batches(train_data, args.batch_size, args.seed)
    accuracy = run(args, model, tx, train, jax.tree.map(jnp.asarray, held_out))
    print(f"held-out accuracy: {float(accuracy):.2f}")


if __name__ == "__main__":
    main()
