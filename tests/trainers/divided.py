"""A model with adapters whose kernels are divided along an axis "fsdp", if the mesh has one."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.layers import add_lora
from jaxpp_flax.trainers import MeshOptions, Training
from tests.trainers import models as m

BATCH = m.make_batch(8)
CUT = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "fsdp"))


def divided(rngs: nnx.Rngs) -> nnx.Module:
    """Blocks with a divided kernel; the second factors have values, as after training."""
    model = m.Model(4, rngs=rngs)
    for block in model.blocks:
        block.widen = nnx.Linear(m.WIDTH, 2 * m.WIDTH, rngs=rngs, kernel_init=CUT)
    model = add_lora(model, rank=3, alpha=2, layers="blocks", rngs=rngs)
    for path, factor in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        factor[...] = jax.random.normal(jax.random.key(len(str(path))), factor.shape, factor.dtype)
    return model


def make_trainer(stages: int, mesh: Any = None, seed: int = 0) -> PipelineTrainer:
    """A trainer of the adapters of `divided`."""
    rules = [] if mesh else [("fsdp", None)]
    return PipelineTrainer(
        divided, optax.adam(0.1), m.mean_loss, num_stages=stages, num_microbatches=4, logging=False,
        mesh=MeshOptions(axes=mesh or {}, sharding_rules=rules), training=Training(wrt=nnx.LoRAParam, seed=seed),
    )  # fmt: skip
