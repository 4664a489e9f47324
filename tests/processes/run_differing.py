"""Run by `test_compare_values.py`: arguments and settings may differ between two processes. Prints each error.

Usage: run_differing.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jaxpp_flax.trainers import Checkpoints
from tests.processes.running import join_run, run_case

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.checkpoint import CheckpointSaveError, shared_directory  # noqa: E402
from jaxpp_flax.processes.store import CoordinationError  # noqa: E402

ME = jax.process_index()
FOLDER = sys.argv[1]
BATCHES = [np.full((8, 4), 0.1 * i, np.float32) for i in range(4)]
shared_directory._PATIENCE = 0.5


def trainer(tx: optax.GradientTransformation | None = None, **arguments: Any) -> PipelineTrainer:
    layers = [PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i), kernel_init=nnx.initializers.ones)) for i in range(2)]
    return PipelineTrainer(
        nnx.Sequential(*layers),
        tx or optax.sgd(0.1),
        lambda model, x: jnp.mean(model(x) ** 2),
        **{"num_stages": 2, "num_microbatches": 2, "logging": False, **arguments},
    )


def case(name: str, function: Callable[[], Any]) -> None:
    run_case(name, function, CoordinationError, CheckpointSaveError)


def setting() -> None:
    """What the program does not show: how its random bits are made."""
    jax.config.update("jax_threefry_partitionable", ME == 0)
    try:
        trainer().fit(BATCHES)
    finally:
        jax.config.update("jax_threefry_partitionable", True)


def restored() -> None:
    made = trainer()
    for name in "01":
        made.fit(BATCHES[:1])
        made.save(f"{FOLDER}/{name}")
    made.restore(f"{FOLDER}/{ME}")


case("setting", setting)
case("hyperparameter", lambda: trainer(optax.inject_hyperparams(optax.sgd)(0.1 + 0.1 * ME)).fit(BATCHES))
noisy = [optax.chain(optax.add_noise(0.1, 0.5, seed), optax.sgd(0.1)) for seed in range(2)]
case("noise", lambda: trainer(noisy[ME]).fit(BATCHES))
case("equal", lambda: trainer(noisy[0]).fit(BATCHES))
case("steps", lambda: trainer().fit(BATCHES, steps=2 + ME))
case("eval_data", lambda: trainer().fit(BATCHES, eval_data=BATCHES[:1] if ME == 0 else None))
saved = f"{FOLDER}/saved"
case("every", lambda: trainer(checkpoints=Checkpoints(saved, every=2 + ME)).fit(BATCHES))
case("one directory", lambda: trainer(checkpoints=saved if ME == 0 else None).fit(BATCHES))
case("two directories", lambda: trainer(checkpoints=Checkpoints(f"{saved}{ME}", every=2)).fit(BATCHES))
case("two files", lambda: trainer().save(f"{FOLDER}/of{ME}/file"))
case("restore", restored)
case("same directory", lambda: trainer(checkpoints=Checkpoints(saved, every=2)).fit(BATCHES))
case("one process alone", lambda: trainer(num_stages=1, mesh={}).fit(BATCHES) if ME == 0 else None)
