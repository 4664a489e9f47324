"""What the trainer tells the process group of itself, for its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp_flax.processes import process_group, value_hash, value_text
from jaxpp_flax.trainers.data.stream import Batches, awaited
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.mesh import build_mesh
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.stages.assigner import Assigner
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.optimizer_memory import OptimizerMemory
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps


@pytest.mark.parametrize(("kind", "step"), [("train", 13), ("evaluate", 12)])
def test_the_step_in_messages_is_the_trainer_s(kind: str, step: int):
    unused: Any = None
    scheduling = Scheduling(2, "1f1b", num_stages=1)
    after_step_12: Any = SimpleNamespace(
        step=12,
        memory=TrainState(step=1, params={}, opt_state=(), model_state={}),
        place_weights=lambda _: None,
        meet=lambda *_: None,
        is_across=False,
        kept=OptimizerMemory(),
    )
    steps = CompiledSteps(
        scheduling, Assigner("even"), unused, after_step_12, unused,
        stage=StageContext(mesh=None), ignored={}, fsdp="microbatch", clock=Clock(), under_way=unused, orders=unused,
    )  # fmt: skip
    assert (
        steps.get(kind, {}, lambda: lambda state, batch: batch, donate=kind == "train")(after_step_12.memory, {}) == {}
    )
    assert process_group().step == step


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (lambda data: Batches(data), "the next batch of the data"),
        (lambda data: awaited(data, "the next batch to evaluate"), "the next batch to evaluate"),
    ],
)
def test_data_that_take_long_are_waited_for_by_name(draw: Any, what: str):
    seen: list[list[str]] = []

    def data() -> Any:
        for batch in range(2):
            seen.append(process_group().waits.texts())
            yield batch

    assert list(draw(data())) == [0, 1]
    assert seen == [[what], [what]]
    assert process_group().waits.texts() == []


def test_a_launched_run_with_too_few_devices_is_told_what_its_launcher_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    says = r"under `python -m jaxpp_flax.launch`, -n 9 for one in each process, or --devices-per-process 5 for so many"
    with pytest.raises(MeshError, match=says) as caught:
        build_mesh(9)
    assert "XLA_FLAGS" not in str(caught.value)


def test_numbers_that_differ_are_shown_as_such():
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=0.25, b1=0.5)
    numbers = LeafPrograms.trace(tx.init, {"w": jnp.zeros((3, 3))}).single_numbers()
    assert numbers["hyperparams/learning_rate"] == "0.25"
    assert numbers["hyperparams/b1"] == "0.5"
    assert value_text(jnp.zeros(2)) == value_hash(jnp.zeros(2))
    assert value_text(jax.random.key(0)) == value_hash(jax.random.key(0))
    assert value_text(np.float32(0.1)) != value_text(np.nextafter(np.float32(0.1), np.float32(1)))
