"""Train on 4 stages, be killed, go on with 2 stages x 2 data-parallel devices, then load into the plain model.

    python examples/resume_on_another_layout.py

The first part runs in a process of its own, which is killed by SIGKILL while it trains: this is not for the launcher.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.checkpoint import load_nnx
from jaxpp_flax.trainers import Checkpoints

STEPS, BATCH, MICROBATCHES, WIDTH = 60, 32, 4, 32


class MLP(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs, marked: bool = True):
        self.widen = nnx.Linear(2, WIDTH, rngs=rngs)
        layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)]
        self.layers = nnx.List([PipelineStage(layer) for layer in layers] if marked else layers)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        x = self.widen(x)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return self.head(x)


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_batch(seed):
    x = np.random.default_rng(seed).uniform(-1, 1, (BATCH, 2)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, :1]) * x[:, 1:]}


def batches():
    for seed in range(STEPS):
        yield make_batch(seed)


def make_trainer(directory, asynchronous=True, **layout):
    return PipelineTrainer(
        MLP(rngs=nnx.Rngs(0)), optax.adam(1e-2), loss_fn, num_microbatches=MICROBATCHES,
        checkpoints=Checkpoints(directory, every=5, keep=2, asynchronous=asynchronous),
        logging=False, **layout,
    )  # fmt: skip


def train_until_killed(directory):
    trainer = make_trainer(directory, asynchronous=False, num_stages=4, mesh={})
    for step, metrics in trainer.training_steps(batches()):
        print(f"4 stages           step {step:2}  loss {float(metrics['loss']):.4f}", flush=True)
        if step == 23:
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--until-killed", metavar="DIRECTORY")
    arguments = parser.parse_args()
    if jax.distributed.is_initialized():
        raise SystemExit("this example starts and kills a process itself: run it without jaxpp_flax.launch.")
    jax.config.update("jax_num_cpu_devices", 4)
    if arguments.until_killed:
        train_until_killed(Path(arguments.until_killed))

    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "run"
        first = subprocess.run([sys.executable, __file__, "--until-killed", str(directory)], check=False)
        steps = sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())
        print(f"killed (status {first.returncode}); checkpoints of steps {steps}")

        trainer = make_trainer(directory, num_stages=2, mesh={"data": 2})
        trainer.fit(batches(), steps=STEPS, resume=True)
        held_out = make_batch(STEPS)
        pipelined = trainer.evaluate([held_out])["loss"]
        print(f"2 stages x 2 data  step {trainer.step}  held-out loss {pipelined:.6f}")

        plain = load_nnx(MLP(rngs=nnx.Rngs(1), marked=False), directory / str(STEPS))
        print(f"plain model                 held-out loss {float(loss_fn(plain, held_out)):.6f}")


if __name__ == "__main__":
    main()
