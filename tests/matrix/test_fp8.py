"""Flax's fp8 layers under each sort of schedule, in both families of formats: as plain accumulation.

A scale or a history that the pipeline takes from another microbatch, device or step than plain JAX does is another
number, so these are compared to the bit; each step begins with the same weights on both sides.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.linen import PipelineStage
from jaxpp_flax.trainers import MeshOptions
from tests.helpers import slow, tree_allclose

pytestmark = pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp is deprecated:DeprecationWarning")

WIDTH, LAYERS, STEPS, MICROBATCHES, RATE = 8, 4, 3, 4, 0.05
# NVIDIA's formats, and those of AMD, which have no infinities.
FORMATS = {
    "fn": (jnp.float8_e4m3fn, jnp.float8_e5m2),
    "fnuz": (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz),
}
# Each with the number of its stages on two ranks.
SCHEDULES = {"gpipe": 2, "1f1b": 2, "interleaved_1f1b": 4, "zero_bubble": 2, "zbv": 4, "dualpipe_v": 4}
DEFAULT = [("1f1b", "fn", 1), ("zbv", "fnuz", 2), ("interleaved_1f1b", "fn", 2)]
CASES = [
    case if (case := (schedule, formats, data)) in DEFAULT else slow(*case)
    for schedule in SCHEDULES
    for formats in FORMATS
    for data in (1, 2)
]


class Block(nn.Module):
    """A dense layer and an einsum, both in fp8, each with scales and histories of its own."""

    formats: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        forward, backward = FORMATS[self.formats]
        op = nn.Fp8DotGeneralOp if self.formats == "fn" else nn.NANOOFp8DotGeneralOp
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
        einsum = nn.Fp8Einsum(e4m3_dtype=forward, e5m2_dtype=backward, name="einsum")
        return x + einsum("bi,io->bo", nn.tanh(nn.Dense(WIDTH, dot_general_cls=op)(x)), kernel)


class Model(nn.Module):
    formats: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = PipelineStage(Block(self.formats, name=f"block_{i}"))(x)
        return x


def batch_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(4 * MICROBATCHES, WIDTH)).astype(np.float32) for name in "xy"}


def loss_fn(model: Any, batch: Any) -> jax.Array:
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


# To the bit on JAX 0.10. The newer XLA for CPU adds up a product's terms in another order in a program of other shape:
# the largest values that histories keep then differ by up to two units of float32's rounding.
HISTORIES = 0.0 if jax.__version_info__ < (0, 11) else 5e-7


@functools.cache
def accumulated(module: nn.Module) -> Any:
    """Return plain accumulation: gradients are added up, and of what overwrites its variable the largest is taken."""

    def of_one(variables: Any, microbatch: Any) -> Any:
        loss_of = lambda of: loss_fn(lambda x: module.apply(of, x), microbatch) / MICROBATCHES  # noqa: E731
        return jax.grad(loss_of)(variables)

    @jax.jit
    def step(variables: Any, batch: Any) -> Any:
        microbatches = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, WIDTH), batch)
        gradients = jax.lax.map(lambda microbatch: of_one(variables, microbatch), microbatches)
        params = jax.tree.map(lambda p, g: p - RATE * g.sum(0), variables["params"], gradients["params"])
        largest = jax.tree.map(lambda g: g.max(0), gradients[OVERWRITE_WITH_GRADIENT])
        return {"params": params, OVERWRITE_WITH_GRADIENT: largest}

    return step


@pytest.mark.parametrize(("schedule", "formats", "data"), CASES)
def test_equals_plain_accumulation(schedule: str, formats: str, data: int):
    module, stages = Model(formats), SCHEDULES[schedule]
    before = module.init(jax.random.key(0), batch_of(0)["x"])
    trainer = PipelineTrainer(
        module, optax.sgd(RATE), loss_fn, variables=before, num_stages=stages, num_microbatches=MICROBATCHES,
        schedule=schedule, mesh=MeshOptions(axes={"data": data}, num_ranks=2), logging=False,
    )  # fmt: skip
    for batch in map(batch_of, range(STEPS)):
        trainer.train_step(batch)
        after, expected = trainer.gather_variables(), accumulated(module)(before, batch)
        tree_allclose(after[OVERWRITE_WITH_GRADIENT], expected[OVERWRITE_WITH_GRADIENT], rtol=HISTORIES, atol=0)
        tree_allclose(after["params"], expected["params"])
        before = jax.tree.map(jnp.asarray, after)
    assert all(jnp.max(leaf) > 0 for leaf in jax.tree.leaves(before[OVERWRITE_WITH_GRADIENT])), "all of them move"
