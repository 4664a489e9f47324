"""Pretrains the GPT of train_gpt.py from a grain pipeline. The same command again goes on with exactly the next batch.

    pip install -e ".[grain]"
    python examples/grain_gpt.py --output run --steps 60       # stop it by Ctrl-C, and start it again

At real size: a model of 7 billion parameters under AdamW in bfloat16 holds 16 bytes a parameter beside its residuals,
112 GB in all, and 28 GB on each of 4 stages. `python -m jaxpp_flax plan quote` ranks layouts before devices are rented.
"""

from __future__ import annotations

import argparse
from functools import partial

import grain
import jax
import numpy as np
import optax
from train_gpt import GPT, Config, held_out_batches, loss_fn, read_source

from jaxpp_flax import Checkpoints, PipelineTrainer

STAGES, MICROBATCHES, BATCH_SIZE = 4, 8, 32


class Windows:
    """A source as grain wants it: a length, and items by index. Each item is one window of the text."""

    def __init__(self, data: np.ndarray, length: int):
        self.data, self.length = data, length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        text = self.data[index * self.length :][: self.length + 1].astype(np.int32)
        return {"tokens": text[:-1], "targets": text[1:]}


def make_batches(data: np.ndarray, length: int) -> grain.IterDataset:
    windows = grain.MapDataset.source(Windows(data, length)).shuffle(seed=0).repeat()  # another order in each pass
    return windows.batch(BATCH_SIZE, drop_remainder=True).to_iter_dataset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="the directory of checkpoints")
    add = partial(parser.add_argument, type=int)
    add("--steps", default=300)
    add("--layers", default=8)
    add("--width", default=64)
    add("--length", default=64)
    args = parser.parse_args()
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", STAGES)  # takes effect on CPU alone

    cfg = Config(layers=args.layers, width=args.width, length=args.length)
    train, held_out = read_source()
    trainer = PipelineTrainer(
        lambda rngs: GPT(cfg, rngs=rngs),  # each parameter is made on the devices of its stage
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 6e-3, args.steps // 10, args.steps)),
        loss_fn,
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        precision="bfloat16",
        checkpoints=Checkpoints(args.output, every=20, keep=2),
    )
    trainer.fit(make_batches(train, cfg.length), steps=args.steps, resume=True)
    loss = trainer.evaluate(held_out_batches(held_out, BATCH_SIZE, cfg.length))["loss"]
    print(f"step {trainer.step}, held-out loss: {loss:.3f} nats/byte")


if __name__ == "__main__":
    main()
