"""The training step as a pure function of a state that the user owns."""

from __future__ import annotations

import copy
from dataclasses import replace

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jaxpp_flax.checkpoint
from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import BatchError, Checkpoints, ModelError
from tests.helpers import slow, tree_allclose
from tests.trainers import models as m

BATCH = m.make_batch(4)


def make_trainer(num_stages: int = 2, **options) -> PipelineTrainer:
    return PipelineTrainer(
        m.Tokens(rngs=nnx.Rngs(0)), optax.adam(0.1), m.mean_loss, num_stages=num_stages, num_microbatches=2, mesh={},
        logging=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, 2])
def test_it_is_the_program_of_fit_and_gives_its_bits(num_stages):
    reference, trainer = make_trainer(num_stages), make_trainer(num_stages)
    reference.fit([BATCH], steps=3)
    step = trainer.compiled_step(BATCH)
    state, losses = trainer.state, []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert trainer.step == 0
    assert losses[0] > losses[1] > losses[2]
    tree_allclose(state, reference.state, rtol=0)
    trainer.set_state(state)
    assert trainer.step == 3
    assert trainer.evaluate([BATCH]) == reference.evaluate([BATCH])
    assert float(trainer.train_step(BATCH)["loss"]) == float(reference.train_step(BATCH)["loss"])
    assert step.program is trainer.compile(BATCH)
    assert [key[0] for key in trainer.steps.compiled] == ["train", "evaluate"]


def test_a_state_is_a_tree_that_can_be_printed_copied_and_saved(tmp_path):
    trainer = make_trainer()
    step = trainer.compiled_step(BATCH)
    state, _ = step(trainer.state, BATCH)
    assert "MpmdArray(shape=(8, 8)" in repr(state)
    kept = jax.tree.map(copy.deepcopy, state)
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "stock", state)
    jaxpp_flax.checkpoint.save(tmp_path / "own", state)
    first, _ = step(state, BATCH)
    again, _ = step(jaxpp_flax.checkpoint.restore(tmp_path / "own", kept), BATCH)
    tree_allclose(again, first, rtol=0)
    tree_allclose(step(kept, BATCH)[0], first, rtol=0)
    stored = ocp.StandardCheckpointer().restore(tmp_path / "stock")
    np.testing.assert_array_equal(stored["step"], 1)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_state_whose_memory_was_reused_is_refused_by_name(num_stages):
    trainer = make_trainer(num_stages)
    step = trainer.compiled_step(BATCH)
    given = trainer.state
    state, _ = step(given, BATCH)
    with pytest.raises(RuntimeError, match="this state was given to a step before"):
        step(given, BATCH)
    calls = {
        "train_step": lambda: trainer.train_step(BATCH),
        "evaluate": lambda: trainer.evaluate([BATCH]),
        "save": lambda: trainer.save("nowhere"),
        "state": lambda: trainer.state,
        "fit": lambda: trainer.fit([BATCH]),
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"trainer\.{name}: the trainer has no state, .*set_state\(state\)"):
            call()
    trainer.set_state(state)
    trainer.train_step(BATCH)


def test_a_run_resumes_after_a_loop_of_the_users_own(tmp_path):
    trainer = make_trainer(checkpoints=Checkpoints(tmp_path, every=1))
    trainer.fit([BATCH], steps=1)
    step, state = trainer.compiled_step(BATCH), trainer.state
    state, _ = step(state, BATCH)
    trainer.set_state(state)
    trainer.save()
    step(trainer.state, BATCH)
    trainer.fit([BATCH], steps=3, resume=True)
    assert trainer.step == 3


def test_what_does_not_fit_is_refused():
    trainer = make_trainer()
    step = trainer.compiled_step(BATCH)
    with pytest.raises(BatchError, match=r"compiled for a batch of \['mask'\] float32\[4, 5\].*, not of .*\[6, 5\]"):
        step(trainer.state, m.make_batch(6))
    state = trainer.state
    with pytest.raises(ModelError, match="opt_state/0/count: it lacks this leaf"):
        trainer.set_state(replace(state, opt_state=()))
    with pytest.raises(ModelError, match="got a State: it takes a `TrainState`"):
        trainer.set_state(state.params)
    with pytest.raises(TypeError, match="a compiled step got a dict as its state"):
        step(BATCH, state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="values that are being traced"):
        jax.jit(step)(state, BATCH)
    with pytest.raises(ModelError, match=r"step: int32\[\] without a value"):
        trainer.set_state(jax.eval_shape(lambda given: given, state))
    with pytest.raises(ModelError, match=r"step: the int 0, and the trainer has int32\[\]"):
        trainer.set_state(replace(state, step=0))  # type: ignore[arg-type]
    narrow = replace(state, step=np.int64(0))
    with pytest.raises(ModelError, match=r"step: int64\[\], and the trainer has int32\[\]"):
        trainer.set_state(narrow)
    trainer.train_step(BATCH)
    with pytest.raises(ModelError, match="step: a step has reused its memory"):
        trainer.set_state(state)


@pytest.mark.parametrize("num_stages", [slow(1), 2])
def test_a_state_of_numpy_arrays_is_taken(num_stages):
    trainer, reference = make_trainer(num_stages), make_trainer(num_stages)
    state = jax.tree.map(np.asarray, reference.state)
    trainer.set_state(state)
    for _ in range(2):
        assert float(trainer.train_step(BATCH)["loss"]) == float(reference.train_step(BATCH)["loss"])
    trainer.set_state(state)
    trainer.set_weights(reference.gather_model())
    assert trainer.step == 0
    assert trainer.evaluate([BATCH]) == reference.evaluate([BATCH])


def test_a_state_that_is_gone_is_refused_before_a_run_without_a_checkpoint(tmp_path):
    trainer = make_trainer(checkpoints=Checkpoints(tmp_path, every=2))
    trainer.compiled_step(BATCH)(trainer.state, BATCH)
    with pytest.raises(RuntimeError, match=r"trainer\.fit: the trainer has no state"):
        trainer.fit([BATCH], steps=1, resume=True)


def test_a_state_that_is_gone_is_not_kept_beside_restored_leaves(tmp_path):
    trainer = make_trainer()
    trainer.save(tmp_path / "whole")
    state, _ = trainer.compiled_step(BATCH)(trainer.state, BATCH)
    with pytest.raises(RuntimeError, match=r"restore would keep step, .*, but a step"):
        trainer.restore(tmp_path / "whole", only="params/*")
    with pytest.raises(RuntimeError, match="restore would keep opt_state/0/count, "):
        trainer.restore(tmp_path / "whole", only=lambda path: not path.startswith("opt_state"), missing="keep")
    trainer.set_state(state)
    trainer.restore(tmp_path / "whole", only="params/*")
    assert trainer.step == 1
    trainer.train_step(BATCH)
