"""One step of a converted model as a pipeline, beside the plain model under plain `jax.jit`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jaxpp_flax import PipelineTrainer

MODELS = Path(__file__).resolve().parents[3] / "examples" / "models"
NAMES = ("vit", "decoder", "scanned")


def load(name: str) -> Any:
    """What a model's file defines."""
    spec = importlib.util.spec_from_file_location(f"models_{name}", MODELS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def keep_gradients() -> optax.GradientTransformation:
    """Changes no parameter; its state is the last gradients."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda grad: 0 * grad, grads), grads

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda leaf: 0 * leaf, params), update)


def pipelined_step(model: Any, loss_fn: Any, batch: Any, **options: Any) -> tuple[float, Any, Any]:
    """Loss and gradients of one step, and the trainer."""
    plan = {"num_stages": 4, "num_microbatches": 4, "mesh": {}, "logging": False} | options
    trainer = PipelineTrainer(model, keep_gradients(), loss_fn, **plan)
    loss = float(trainer.train_step(batch)["loss"])
    return loss, jax.tree.map(np.asarray, trainer.state.opt_state), trainer


def tokens(seed: int, batch: int, length: int, vocabulary: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, vocabulary, (batch, length)).astype(np.int32)
