"""The optimizer's state on the host, beside weights that are sharded in each way."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Memory, MeshOptions
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

LAYOUTS: dict[str, tuple[Any, MeshOptions]] = {
    "fsdp": (("fsdp", None), MeshOptions(axes={"fsdp": 2})),
    "fsdp_step": (("fsdp", None), MeshOptions(axes={"fsdp": 2}, fsdp="step")),
    "tensor": ((None, "tensor"), MeshOptions(axes={"tensor": 2})),
    "data": (None, MeshOptions(axes={"data": 2})),
}
OPTIMIZERS = {
    "clip_adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
}
CASES = [
    ("fsdp_step", "clip_adamw", 2),
    *(slow(*case, 2) for case in (("fsdp", "adam"), ("tensor", "momentum"), ("data", "clip_adamw"))),
    *(slow(*case, 1) for case in (("fsdp", "momentum"), ("tensor", "clip_adamw"), ("data", "adam"))),
]


def make(layout: str | None, optimizer: str, num_stages: int = 1, memory: Memory | None = None) -> PipelineTrainer:
    names, mesh = (None, None) if layout is None else LAYOUTS[layout]
    init = nnx.initializers.lecun_normal()
    with nnx.use_eager_sharding(False):
        model = m.Layers(2, 8, kernel_init=init if names is None else nnx.with_partitioning(init, names))
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    return PipelineTrainer(
        model, OPTIMIZERS[optimizer], m.squared_error, num_stages=num_stages, num_microbatches=2, logging=False,
        memory=memory, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("layout", "optimizer", "num_stages"), CASES)
def test_training_equals_plain_jax(layout: str, optimizer: str, num_stages: int):
    batch = m.make_xy(8, 8)
    trainer = make(layout, optimizer, num_stages, Memory(optimizer_state="pinned_host"))
    ordinary = make(None, optimizer)
    plain, state = jax.jit(ordinary.step_function(batch)), jax.tree.map(np.asarray, ordinary.state)
    microbatches = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch)
    for _ in range(3):
        loss = float(trainer.train_step(batch)["loss"])
        state, metrics = plain(state, microbatches)
        np.testing.assert_allclose(loss, float(metrics["loss"]), rtol=1e-5)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(trainer.state.opt_state) if x.size > 1} == {"pinned_host"}
    # Sums over shards are in another order; updates of size 1e-2 beside weights of size 1.
    found, expected = (list(map(np.asarray, jax.tree.leaves(s.params))) for s in (trainer.state, state))
    tree_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if num_stages > 1:
        check_donations(trainer.compile(batch))


def check_donations(compiled: Any) -> None:
    """What the plan of live bytes counts as donated, XLA takes over, each in a result of its own memory."""
    program, donated = compiled.program, 0
    for task, executable in zip(program.tasks, compiled.executables.tasks, strict=True):
        if task.name.startswith("outer"):
            head = executable.as_text().splitlines()[0]
            aliases = re.search(r"input_output_alias=\{(.*?) \}, entry", head)
            pairs = re.findall(r"\{\d*\}: \((\d+)", aliases[1]) if aliases else []
            assert {int(position) for position in pairs} == task.donate
            donated += len(pairs)
    assert donated
