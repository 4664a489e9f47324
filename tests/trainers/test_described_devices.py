"""A trainer on devices that are only described compiles, and says in one sentence why it does nothing else.

JAX describes no CPUs, so these are attached ones that are called described. `tests/compilers` has real descriptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.arrays import mesh as meshes
from jaxpp_flax.trainers.mesh import describe_mesh
from tests.trainers import models as m

TOKENS = jax.ShapeDtypeStruct((8, m.LENGTH), np.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> PipelineTrainer:
    monkeypatch.setattr(meshes, "is_described", lambda device: True)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",))
    return PipelineTrainer(
        m.Model(2, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=4, mesh=mesh,
        logging=False,
    )  # fmt: skip


def test_it_compiles_and_places_nothing(trainer: PipelineTrainer):
    compiled = trainer.compile(BATCH)
    assert [memory.rank for memory in compiled.memory_analysis()] == [0, 1]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(trainer.held.memory))
    assert trainer.leaves_read(BATCH) == {"tokens": True, "targets": True}
    assert trainer.rows_read(BATCH, "evaluate")["tokens"].shape == (8,)
    assert trainer.planning_step(BATCH).num_microbatches == 4
    assert isinstance(trainer.abstract_model, m.Model)
    with pytest.raises(RuntimeError, match="a value of the trainer's state needs the mesh's devices"):
        trainer.held.whole()
    assert trainer.mesh is not None
    assert "2 devices that are only described" in describe_mesh(trainer.mesh)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fit", lambda of: of.fit([BATCH])),
        ("train_step", lambda of: of.train_step(BATCH)),
        ("training_steps", lambda of: of.training_steps([BATCH])),
        ("profile_step", lambda of: of.profile_step(BATCH)),
        ("evaluate", lambda of: of.evaluate([BATCH])),
        ("predict", lambda of: of.predict(TOKENS)),
        ("generate", lambda of: of.generate([[1]], max_new_tokens=1)),
        ("state", lambda of: of.state),
        ("gather_model", lambda of: of.gather_model()),
        ("gather_variables", lambda of: of.gather_variables()),
        ("set_weights", lambda of: of.set_weights({})),
        ("save", lambda of: of.save("nowhere")),
        ("restore", lambda of: of.restore("nowhere")),
        ("load_pretrained", lambda of: of.load_pretrained("nowhere")),
        ("export_pretrained", lambda of: of.export_pretrained("nowhere")),
    ],
)
def test_what_it_cannot_do(trainer: PipelineTrainer, name: str, call: Callable[[Any], Any]):
    with pytest.raises(RuntimeError, match=rf"^trainer\.{name} needs the mesh's devices, but .* description of them"):
        call(trainer)
