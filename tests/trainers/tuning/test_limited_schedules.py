"""`schedule="auto"` under `memory_limit=`: each schedule that fits, with its cheapest mixture of residuals."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.assignment import AssignmentError
from jaxpp_flax.assignment.limited import LimitedPlan
from jaxpp_flax.planning import Choice, Hardware, StageLoad, StepModel
from jaxpp_flax.planning.choice import best_mixture
from jaxpp_flax.schedules import ResidualPlan, StageResiduals, by_name, names, simulate
from jaxpp_flax.trainers import Assignment, AutoSchedule
from jaxpp_flax.trainers.tuning.auto_schedule import ScheduleTuner
from jaxpp_flax.trainers.tuning.limited_schedules import LimitedSchedules
from tests.helpers import tree_allclose
from tests.trainers import models as m
from tests.trainers.tuning.test_auto_schedule import Fake

FORWARD = [1.0, 1.0, 1.0, 1.6]
CARD = Hardware(flops=1.0, host_bandwidth=2.0)
OPTIONS = AutoSchedule(steps=1, stages_per_rank=(1,), evaluations=50)


def planner(limit, *, num_ranks=2, fixed=100.0, scale=1.0):
    """Plan a schedule of the fake trainer's model as the trainer does; its estimated seconds are wrong by `scale`."""

    def plan_with(schedule) -> LimitedPlan:
        parts = np.array_split(np.array(FORWARD), schedule.num_stages)
        loads = [
            StageLoad(
                forward=scale * part.sum(), backward=scale * 2 * part.sum(), residual_bytes=8.0 * len(part),
                input_bytes=1.0, fixed_bytes={"parameters": fixed * num_ranks / schedule.num_stages},
            )
            for part in parts
        ]  # fmt: skip
        model = StepModel(schedule=schedule, num_microbatches=6, stages=loads, hardware=CARD)
        choice = best_mixture(model, limit)
        if choice.excess:
            raise AssignmentError(f"{schedule!r} is above by {choice.excess:g}", choice.excess)
        return LimitedPlan(model=model, choice=choice, limits=(limit,) * num_ranks)

    return plan_with


class Limited(Fake):
    """A fake trainer under a memory limit: its schedules compile only if they fit."""

    def __init__(self, options, plan_with):
        super().__init__(options, FORWARD)
        self.plan_with = plan_with
        step = self.tuner.step
        self.tuner.step = lambda trainer, batch: step(trainer, batch, None, plan_with)

    def compile(self, batch):
        self.plan_with(self.schedule)
        super().compile(batch)

    def residuals(self):
        return self.plan_with(self.schedule).choice.residuals


def test_the_schedule_of_no_limit_does_not_fit_and_another_is_chosen():
    free = Fake(OPTIONS, FORWARD)
    free.run()
    without = free.tuner.report.chosen
    assert without.splits_backward  # a zero-bubble schedule is the fastest one, and holds more
    peak = max(simulate(without, free.costs(2), num_microbatches=6).peak_memory)
    limit = 100.0 + 24.0
    assert 100.0 + peak > limit
    fake = Limited(OPTIONS, planner(limit))
    fake.run()
    report = fake.tuner.report
    assert report.chosen != without
    assert report.choice.excess == 0
    assert max(report.choice.prediction.peak_bytes) <= limit
    # It is as fast as the best of the named schedules, each with its own mixture.
    fitting = [name for name in names(2, 2) if by_name(name, 2, 2) not in report.refused]
    assert without in report.refused
    best = min(
        simulate(
            by_name(name, 2, 2), fake.costs(2), num_microbatches=6,
            residuals=planner(limit)(by_name(name, 2, 2)).choice.residuals, host_link=CARD.host_link,
        ).makespan
        for name in fitting
    )  # fmt: skip
    assert report.predicted[1] <= best * (1 + 1e-9)
    assert "schedules fit within memory_limit; " in fake.messages[0]
    assert f"{len(report.candidates)} of {len(report.candidates) + len(report.refused)}" in str(report)


def test_a_schedule_whose_compiled_step_exceeds_the_limit_gives_way_to_the_next():
    free = Limited(OPTIONS, planner(1e9))
    free.run()
    best = free.tuner.report.chosen
    assert best != free.tuner.report.first

    class TooLarge(Limited):
        def compile(self, batch):
            if self.tuner.report is not None and self.schedule == best:  # not while it is measured
                raise AssignmentError("the compiled step is too large", 5.0)
            super().compile(batch)

    fake = TooLarge(OPTIONS, planner(1e9))
    fake.run()
    report = fake.tuner.report
    assert report.chosen != best
    assert report.refused[best] == "the compiled step is too large"
    assert best not in [candidate.schedule for candidate in report.candidates]


def test_the_time_of_recomputation_and_of_copies_decides():
    """A mixture that is chosen by wrong estimates is judged by measured seconds."""
    fake = Limited(OPTIONS, planner(100.0 + 24.0, scale=1e-3))
    fake.run()
    report = fake.tuner.report
    for candidate in report.candidates:
        kept = simulate(candidate.schedule, report.costs, num_microbatches=6).makespan
        assert candidate.seconds >= kept * (1 - 1e-9)  # seconds as measured, not as estimated
        assert candidate.origin != "gpipe" or candidate.seconds > 1.2 * kept  # both stages recompute
    assert any(not of.choice.residuals.is_kept for of in report.candidates)
    assert any("stage 0: " in of.residuals_text for of in report.candidates)


def test_measured_times_of_a_recomputing_step_are_those_of_a_keeping_one():
    plan = planner(1e9)(by_name("1f1b", 2))
    recomputes = ResidualPlan([StageResiduals(recompute=True), StageResiduals()])
    choice = Choice(
        residuals=recomputes, prediction=plan.choice.prediction, keep=plan.choice.keep, excess=0, exact=True
    )
    limited = LimitedSchedules(lambda schedule: LimitedPlan(model=plan.model, choice=choice, limits=plan.limits))
    schedule, costs = by_name("1f1b", 2), plan.model.costs
    step = simulate(schedule, costs, num_microbatches=6, residuals=recomputes)
    kept = simulate(schedule, costs, num_microbatches=6)
    lengths = lambda ranks: [{repr(e.task): round(e.end - e.start, 9) for e in rank} for rank in ranks]  # noqa: E731
    assert lengths(step.events) != lengths(kept.events)
    assert lengths(limited.as_kept(schedule, step.events)) == lengths(kept.events)


def test_a_first_schedule_that_does_not_fit_is_left_out():
    plan_with = planner(1e9)

    def without_first(schedule):
        if schedule == by_name("1f1b", 2):
            raise AssignmentError("1f1b is too large", 7.0)
        return plan_with(schedule)

    fake = Limited(OPTIONS, without_first)
    fake.run()
    report = fake.tuner.report
    assert report.first == by_name("zero_bubble", 2)
    assert by_name("1f1b", 2) not in [of.schedule for of in report.candidates]
    assert report.refused[by_name("1f1b", 2)] == "1f1b is too large"


def test_a_limit_that_nothing_satisfies_names_the_closest_plan():
    fake = Limited(OPTIONS, planner(50.0))
    with pytest.raises(AssignmentError, match=r"measures 2 schedules, and none .* fits .*closest is .* is above by 67"):
        fake.tuner.step(fake, {"x": np.zeros((4, 2))})
    assert not fake.ran
    other = ScheduleTuner(OPTIONS, by_name("1f1b", 2))
    with pytest.raises(AssignmentError, match="needs more marks"):  # an error of another kind stays as it is
        other.begin(fake, lambda: (_ for _ in ()).throw(AssignmentError("needs more marks")))


def trainer_of(schedule, **options) -> PipelineTrainer:
    return PipelineTrainer(
        m.Model(4, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=8, schedule=schedule,
        assignment=Assignment("even", **options), logging=False,
    )  # fmt: skip


def test_for_real():
    """The chosen schedule runs with the residuals that were chosen with it; the training is that of plain `jax.jit`."""
    wide = trainer_of("gpipe", memory_limit=1e12)
    wide.compile(m.make_batch(512))
    limit = 0.5 * max(wide.plan.rank_bytes)  # GPipe's residuals do not fit
    batches = [m.make_batch(512, seed=seed) for seed in range(7)]
    options = AutoSchedule(steps=1, stages_per_rank=(1,), minimum_gain=0.0, evaluations=50)
    trainer = trainer_of(options, memory_limit=limit)
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    report = trainer.schedule_report
    assert report is not None
    assert len(report.candidates) > 4
    for candidate in report.candidates:
        assert max(candidate.choice.prediction.peak_bytes) <= limit
    gpipe = next(of for of in report.candidates if of.origin == "gpipe")
    assert not gpipe.choice.residuals.is_kept
    assert trainer.schedule == report.chosen
    assert trainer.plan.residuals == report.choice.residuals
    expected, after = m.plain_training(m.Model(4, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, batches, 8)
    tree_allclose(losses, expected, rtol=1e-5)
    tree_allclose(jax.device_get(trainer.state.params), after[-1], rtol=1e-5, atol=1e-6)


def test_a_limit_below_everything_is_refused_before_the_first_step():
    trainer = trainer_of("auto", memory_limit=1000.0)
    with pytest.raises(AssignmentError, match=r"measures 4 schedules, .* The closest is .*rank \d holds .* bytes"):
        trainer.compile(m.make_batch(16))
    with pytest.raises(
        ValueError, match=r"both AutoSchedule\(memory_limit=8\), for activations alone, and memory_limit=9"
    ):
        trainer_of(AutoSchedule(memory_limit=8), memory_limit=9)
