"""`Memory`: what it takes, and what it refuses when the trainer is made."""

from __future__ import annotations

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.arrays import memory_kinds
from jaxpp_flax.schedules import ResidualPlan, ScheduleError, StageResiduals
from jaxpp_flax.trainers import BatchError, Memory, ModelError
from tests.trainers import models as m


def make(memory, num_stages=2, model=None):
    return PipelineTrainer(
        model or m.Layers(2),
        optax.adam(0.1),
        m.squared_error,
        num_stages=num_stages,
        num_microbatches=2,
        logging=False,
        memory=memory,
    )


def test_kinds_that_no_type_knows_are_refused():
    text = r"^Memory\(optimizer_state=\) has the memory kind 'unpinned_host', but .* 'device' and 'pinned_host'.*Use '"
    with pytest.raises(ValueError, match=text):
        Memory(optimizer_state="unpinned_host")
    with pytest.raises(
        TypeError, match=r"^optimizer_state must be a memory kind such as 'pinned_host'.*got bool: True"
    ):
        Memory(optimizer_state=True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^memory must be Memory\(\.\.\.\), got str: 'pinned_host'"):
        make("pinned_host")
    assert Memory.of(None) == Memory()
    assert Memory(optimizer_state="device").optimizer_state == "device"


def test_a_kind_that_the_platform_lacks_is_refused_with_the_kinds_it_has(monkeypatch):
    monkeypatch.setattr(memory_kinds, "kinds_of", lambda device: {"device", "unpinned_host"})
    text = (
        r"^Memory\(optimizer_state=\) asks for the memory kind 'pinned_host', which .*lacks: it has 'device', "
        r"'unpinned_host'\. Use one of these, or leave the kind out"
    )
    for num_stages in (1, 2):
        with pytest.raises(ValueError, match=text):
            make(Memory(optimizer_state="pinned_host"), num_stages)
        make(Memory(), num_stages)


def test_residuals_are_refused_where_they_do_not_fit():
    with pytest.raises(TypeError, match=r"^residuals must be ResidualPlan.*got str: 'offload'"):
        Memory(residuals="offload")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="has 3 entries, but the schedule has 2 stages"):
        make(Memory(residuals=ResidualPlan.keep(3)))
    with pytest.raises(ValueError, match=r"^Memory\(residuals=\) needs a pipeline"):
        make(Memory(residuals=ResidualPlan.keep(1)), num_stages=1)


def test_another_schedule_keeps_the_number_of_stages_of_the_plan():
    trainer = make(Memory(residuals=ResidualPlan.keep(2)), model=m.Layers(4))
    before = trainer.schedule
    text = (
        r"^use_schedule\('interleaved_1f1b'\) with Memory\(residuals=\): the ResidualPlan has 2 entries, but the "
        r"schedule has 4 stages: .* keep num_stages=2, or make a trainer with another plan"
    )
    with pytest.raises(ScheduleError, match=text):
        trainer.use_schedule("interleaved_1f1b", num_stages=4)
    assert trainer.schedule is before
    trainer.use_schedule("gpipe")


def test_residuals_reach_the_training_step():
    """Offloading changes nothing but the place of bytes; a recomputed step is the same within rounding."""
    plan = ResidualPlan([StageResiduals(recompute=True), StageResiduals(offload=1.0)])
    losses = {}
    for name, memory in (("kept", None), ("moved", Memory(residuals=plan))):
        trainer = PipelineTrainer(
            m.Layers(2), optax.adam(0.1), m.squared_error, num_stages=2, num_microbatches=4, schedule="gpipe",
            logging=False, memory=memory,
        )  # fmt: skip
        losses[name] = [float(trainer.train_step(m.make_xy(8, seed=seed))["loss"]) for seed in range(3)]
        (compiled,) = trainer.steps.compiled.values()
        assert ("offload" in compiled.as_text()) == (memory is not None)
    assert losses["moved"] == pytest.approx(losses["kept"], rel=1e-5)
    assert losses["kept"][0] != losses["kept"][-1]


def test_a_model_or_a_batch_in_other_memory_is_refused_by_name():
    host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    batch = {**m.make_xy(8), "x": jax.device_put(m.make_xy(8)["x"], host)}
    with pytest.raises(BatchError, match=r"\['x'\].* is a jax.Array in 'pinned_host' memory.*np\.asarray"):
        make(None).train_step(batch)
    model = m.Layers(2)
    nnx.update(model, jax.device_put(nnx.state(model), host))
    with pytest.raises(
        ModelError, match=r"leaf \['layers'\]\[0\]\['bias'\].* of Layers lies in 'pinned_host' memory.*Memory\("
    ):
        make(None, model=model)
