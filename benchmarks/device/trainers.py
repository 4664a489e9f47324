"""The trainer of `examples/train_gpt.py`, with all ranks on the devices there are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import workload


def flags_of(description: str) -> argparse.ArgumentParser:
    """The flags of a benchmark, with the sizes of the example."""
    flags = workload.parser(description)
    flags.set_defaults(blocks=8, width=64, length=64, microbatches=8, batch=4)
    return flags


def example() -> Any:
    """The module `examples/train_gpt.py`."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    import train_gpt

    return train_gpt


def config(arguments: argparse.Namespace) -> Any:
    """The sizes of the model."""
    sizes = {"layers": arguments.blocks, "width": arguments.width, "length": arguments.length}
    return example().Config(**sizes, heads=max(1, arguments.width // 64))


def trainer_of(arguments: argparse.Namespace, schedule: str = "1f1b", **more: Any) -> Any:
    """A trainer of the example's model with AdamW; several ranks share a device where there are fewer devices."""
    import optax

    from jaxpp_flax import PipelineTrainer

    gpt, sizes, ranks = example(), config(arguments), arguments.stages
    stages = 2 * ranks if schedule.startswith("interleaved") else ranks
    return PipelineTrainer(
        lambda rngs: gpt.GPT(sizes, rngs=rngs), optax.adamw(1e-3), gpt.loss_fn, num_stages=stages,
        num_microbatches=arguments.microbatches, schedule=schedule, logging=False,
        mesh=workload.devices_of(ranks), **more,
    )  # fmt: skip


def batches(arguments: argparse.Namespace, steps: int) -> list[Any]:
    """Batches of random bytes: the same ones in every run."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (arguments.microbatches * arguments.batch, arguments.length + 1)
    texts = [rng.integers(0, 256, shape).astype(np.int32) for _ in range(steps)]
    return [{"tokens": text[:, :-1], "targets": text[:, 1:]} for text in texts]
