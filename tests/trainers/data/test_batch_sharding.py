"""A batch may lie on any devices, on a mesh of its own: the step takes it as it takes NumPy arrays."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Inference
from jaxpp_flax.verify import verify
from tests.helpers import slow, tree_allclose
from tests.trainers.models import Layers, make_xy, squared_error

BATCH = make_xy(8)


def sharding(kind: str) -> Sharding:
    devices, explicit = np.array(jax.devices()), AxisType.Explicit
    return {
        "explicit": lambda: NamedSharding(Mesh(devices[:4], ("x",), axis_types=(explicit,)), PartitionSpec("x")),
        "two explicit axes": lambda: NamedSharding(
            Mesh(devices[:4].reshape(2, 2), ("x", "y"), axis_types=(explicit, explicit)), PartitionSpec(("x", "y"))
        ),
        "explicit and auto": lambda: NamedSharding(
            Mesh(devices[:4].reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto, explicit)), PartitionSpec("y")
        ),
        "the trainer's names": lambda: NamedSharding(
            Mesh(devices.reshape(2, 4), ("stage", "data"), axis_types=(explicit, explicit)), PartitionSpec("data")
        ),
        "auto": lambda: NamedSharding(Mesh(devices[:4], ("x",)), PartitionSpec("x")),
        "another device": lambda: SingleDeviceSharding(devices[5]),
    }[kind]()


def results(batch: Any, **options: Any) -> Any:
    trainer = PipelineTrainer(
        Layers(), optax.adam(1e-2), squared_error, num_microbatches=2, logging=False,
        inference=Inference(predict_fn=lambda model, batch: model(batch["x"])), **options,
    )  # fmt: skip
    trainer.train_step(batch)
    metrics = trainer.fit([batch], steps=1)
    return metrics["loss"], trainer.evaluate([batch]), trainer.predict(batch), verify(trainer, batch).agrees


KINDS = ["explicit", "two explicit axes", "explicit and auto", "the trainer's names", "auto", "another device"]
DEFAULT = [("explicit", "two"), ("auto", "data"), ("another device", "one"), ("the trainer's names", "two")]


@pytest.mark.parametrize(
    ("kind", "stages"),
    [case if case in DEFAULT else slow(*case) for case in product(KINDS, ["one", "two", "data"])],
)
def test_a_batch_may_have_a_sharding_of_its_own(kind: str, stages: str):
    options = {"one": {"num_stages": 1}, "two": {"num_stages": 2}, "data": {"num_stages": 2, "mesh": {"data": 2}}}
    placed = jax.device_put(BATCH, sharding(kind))
    found, expected = (results(batch, **options[stages]) for batch in (placed, BATCH))
    tree_allclose(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("kind", ["explicit", "another device"])
def test_a_smaller_batch_to_evaluate_may_have_one_too(kind: str, stages: int):
    """It runs in the program of the larger one: its examples are repeated where they lie."""
    trainer = PipelineTrainer(
        Layers(), optax.adam(1e-2), squared_error, num_stages=stages, num_microbatches=2, logging=False
    )
    batches = [BATCH, jax.tree.map(lambda x: x[:4], BATCH)]
    found, expected = (trainer.evaluate(of) for of in (jax.device_put(batches, sharding(kind)), batches))
    tree_allclose(found, expected, rtol=0, atol=0)
    assert len(trainer.steps.compiled) == 1
