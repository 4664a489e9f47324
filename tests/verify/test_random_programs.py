"""No false alarm: random correct programs and layouts, in float32, bfloat16 and both, agree with the plain step.

`look(seed)` verifies one program again; a failure names its seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Memory, Precision
from jaxpp_flax.verify import Report, verify
from tests.fuzz.layers import DIM
from tests.fuzz.programs import OPTIMIZERS, Program, arguments, draw, model
from tests.fuzz.test_random_programs import many
from tests.trainers.test_matches_plain import mesh_of

# A program may mix examples, and its products may take what is random in float32: neither is a difference.
pytestmark = [
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchLossWarning"),
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.PrecisionWarning"),
]

PRECISIONS = [None, "bfloat16", Precision(compute="bfloat16", params="bfloat16")]


class Drawn(nnx.Module):
    """The stages of a program, and behind them, perhaps, a choice for each row."""

    def __init__(self, program: Program, *, routes: bool, dtype: Any) -> None:
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), arguments(program)[0])
        self.stages = nnx.List(
            [
                nnx.List([nnx.Dict({name: nnx.Param(x) for name, x in layer.items()}) for layer in stage])
                for stage in params["stages"]
            ]
        )
        self.shared = nnx.Param(params["shared"])
        experts = np.random.default_rng(program.seed).normal(size=(DIM, DIM))
        self.experts = nnx.Param(jnp.asarray(experts, dtype)) if routes else None
        self.program = nnx.static(program)

    def __call__(self, batch: Any) -> Any:
        stages = [[{name: p[...] for name, p in layer.items()} for layer in stage] for stage in self.stages]
        key = jax.random.fold_in(jax.random.key(self.program.seed), batch["number"].max())
        x = model(self.program, {"stages": stages, "shared": self.shared[...]}, batch, key)["x"]
        x = x * (1 + self.shared[...])  # there are parameters, and none is without use
        if self.experts is None:
            return x
        gate, index = jax.lax.top_k(jax.nn.softmax(x), 2)
        return x + (gate[..., None] * self.experts[index]).sum(1)


def mean_loss(model: Any, batch: Any) -> Any:
    return jnp.mean((model(batch) - batch["y"]) ** 2 * batch["weight"][:, None])


def weighted_loss(model: Any, batch: Any) -> Any:
    return jnp.sum((model(batch) - batch["y"]) ** 2 * batch["weight"][:, None]), batch["weight"].sum()


def loss_with_metrics(model: Any, batch: Any) -> Any:
    x = model(batch)
    right = x.argmax(-1) == batch["y"].argmax(-1)
    return jnp.mean((x - batch["y"]) ** 2), {"right": right.mean(), "largest": jnp.abs(x).max()}


def look(seed: int) -> Report:
    """Verify the program of a seed; a trainer's loop has its own carry, and shards parameters by its own rules."""
    rng = random.Random(seed)
    program = replace(draw(seed), microbatch_axis=0, axis=None, explicit=False)
    # No complex number has parts in bfloat16.
    precision = None if "wave" in program.carried else rng.choice(PRECISIONS)
    dtype = "bfloat16" if isinstance(precision, Precision) else "float32"
    trainer = PipelineTrainer(
        Drawn(program, routes=rng.random() < 0.5, dtype=dtype),
        OPTIMIZERS[program.optimizer](),
        rng.choice([mean_loss, weighted_loss, loss_with_metrics]),
        num_stages=len(program.stages),
        num_microbatches=program.microbatches,
        schedule=program.schedule,
        mesh=mesh_of(program.ranks, **dict(program.submesh)),
        precision=precision,
        memory=Memory(remat=rng.choice([None, None, "full"])),
        logging=False,
    )
    _, _, batch = arguments(program)
    return verify(trainer, {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()})


def check_seeds(seeds: Iterable[int]) -> None:
    wrong: list[str] = []
    for seed in seeds:
        try:
            report = look(seed)
            if not report.agrees:
                wrong.append(f"{seed}: {report}")
        except Exception as e:  # any error is a finding, and the other seeds run all the same
            wrong.append(f"{seed}: {type(e).__name__}: {e}")
        jax.clear_caches()
    assert not wrong, "\n\n".join(wrong)


def test_a_random_program():
    """One of few layers, in bfloat16, sharded, with a choice for each row."""
    check_seeds([77])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seeds", many(0, 500))
def test_many_random_programs(seeds: range):
    check_seeds(seeds)
