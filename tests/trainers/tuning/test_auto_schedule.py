"""`schedule="auto"`: with steps whose times are known exactly, and once for real."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.assignment import AssignmentError
from jaxpp_flax.schedules import Costs, ResidualPlan, Schedule, ScheduleError, by_name, names, replay, simulate
from jaxpp_flax.schedules.simulation.simulate import Event
from jaxpp_flax.trainers import AutoSchedule, Logging
from jaxpp_flax.trainers.tuning.auto_schedule import ScheduleTuner
from jaxpp_flax.trainers.tuning.step_profile import StepProfile
from tests.trainers import models as m


@dataclass(frozen=True)
class Stage:
    activation_bytes: int
    weight_bytes: int
    sent_bytes: int = 0


class Fake:
    """A trainer whose tasks take exactly the time they are said to, on a model with so many marks."""

    def __init__(self, options: AutoSchedule, forward, *, ranks=2, microbatches=6, activation=8, slow=()):
        self.num_microbatches, self.num_ranks, self.activation = microbatches, ranks, activation
        self.forward = forward  # of each of the model's blocks
        self.slow = slow  # schedules whose steps take three times as long when they are run for a second time
        self.schedule: Schedule = by_name("1f1b", ranks)
        self.tuner = ScheduleTuner(options, self.schedule)
        self.ran: list[str] = []
        self.compiled: list[Schedule] = []
        self.messages: list[str] = []

    def use_schedule(self, schedule, num_stages=None):
        if isinstance(schedule, str):
            schedule = by_name(schedule, num_stages, self.num_ranks)
        self.schedule = schedule

    def compile(self, batch):
        if self.schedule.num_stages > len(self.forward):
            raise AssignmentError(f"num_stages={self.schedule.num_stages} needs more marks")
        self.compiled.append(self.schedule)

    def message(self, text):
        self.messages.append(text)

    def residuals(self) -> ResidualPlan | None:
        return None

    def costs(self, num_stages: int) -> Costs:
        parts = np.array_split(np.array(self.forward), num_stages)
        f = [float(part.sum()) for part in parts]
        return Costs(
            forward=f,
            backward_input=[1.1 * t for t in f],
            backward_weight=[0.9 * t for t in f],
            activation=[float(self.activation * len(part)) for part in parts],
        )

    def profile_step(self, batch):
        costs = self.costs(self.schedule.num_stages)
        count, residuals = self.num_microbatches, self.residuals()
        step = simulate(self.schedule, costs, num_microbatches=count, residuals=residuals)
        # The first run of what was just compiled takes ten times as long, and must not count.
        scale = 10.0 if not self.ran or self.ran[-1] != repr(self.schedule) else 1.0
        scale *= 3.0 if self.tuner.report is not None and self.slow else 1.0
        self.ran.append(repr(self.schedule))
        events = [[Event(e.task, e.rank, scale * e.start, scale * e.end) for e in rank] for rank in step.events]
        held = costs.activation
        assert not isinstance(held, float)
        return StepProfile(
            metrics={"loss": len(self.ran)},
            schedule=self.schedule,
            measured=replay(events, costs),
            simulated=step,
            stages=[Stage(int(bytes_), int(bytes_)) for bytes_ in held],
        )

    def run(self):
        """Until it is done; the steps that this took."""
        for number in range(1, 100):
            metrics = self.tuner.step(self, {"x": np.zeros((4, 2))})
            assert metrics["loss"] == number  # every step is one of the training
            if self.tuner.done:
                return number
        raise AssertionError("it never ends")


UNEVEN = [1.0, 1.0, 1.0, 1.6]


def test_finds_predicts_and_measures():
    fake = Fake(AutoSchedule(steps=2), UNEVEN)
    steps = fake.run()
    report = fake.tuner.report
    assert [repr(by_name(n, s, 2)) for s, n in fake.tuner.options.trials(2, 2)] == list(dict.fromkeys(fake.ran))[:4]
    assert steps == len(fake.ran) == 5 * (1 + 2)  # four trials and the one found, each once to warm up and twice
    assert fake.schedule == report.chosen != report.first
    first = simulate(report.first, fake.costs(2), num_microbatches=6)
    assert report.predicted[0] == pytest.approx(first.makespan)
    chosen = simulate(report.chosen, fake.costs(report.chosen.num_stages), num_microbatches=6)
    assert report.predicted[1] == pytest.approx(chosen.makespan)
    # These tasks do as they are measured, so the gain is exactly what was predicted.
    assert report.predicted_gain > 0.05
    assert report.measured_gain == pytest.approx(report.predicted_gain)
    assert report.measured == pytest.approx(report.predicted)
    assert len(fake.messages) == 2
    assert "gained; measured" not in fake.messages[0]
    assert fake.messages[1] == str(report)
    assert "gained; measured" in fake.messages[1]
    assert "Timeline" not in repr(report)


@pytest.mark.parametrize("forward", [UNEVEN, [1.0, 1.0, 1.0, 1.0], [2.0, 1.0, 1.0, 0.5]])
def test_never_worse_than_a_named_schedule(forward):
    fake = Fake(AutoSchedule(steps=1), forward)
    fake.run()
    for stages in (2, 4):
        for name in names(stages, 2):
            named = simulate(by_name(name, stages, 2), fake.costs(stages), num_microbatches=6)
            assert fake.tuner.report.predicted[1] <= named.makespan * (1 + 1e-9), name


def test_equal_measurements_give_equal_schedules():
    one, two = (Fake(AutoSchedule(steps=1), UNEVEN) for _ in range(2))
    one.run()
    two.run()
    assert one.tuner.report.chosen == two.tuner.report.chosen
    assert one.ran == two.ran
    assert str(one.tuner.report) == str(two.tuner.report)


def test_keeps_the_first_schedule_for_a_small_gain():
    gain = Fake(AutoSchedule(steps=1), UNEVEN)
    gain.run()
    fake = Fake(AutoSchedule(steps=1, minimum_gain=gain.tuner.report.predicted_gain + 0.01), UNEVEN)
    assert fake.run() == 4 * 2
    report = fake.tuner.report
    assert fake.schedule == report.chosen == report.first == by_name("1f1b", 2)
    assert report.origin == "kept"
    assert report.measured_gain is None
    assert report.predicted_gain == pytest.approx(gain.tuner.report.predicted_gain)
    fake = Fake(AutoSchedule(steps=1, minimum_gain=gain.tuner.report.predicted_gain - 0.01), UNEVEN)
    fake.run()
    assert fake.tuner.report.chosen == gain.tuner.report.chosen


def test_more_stages_than_marks_are_left_out():
    fake = Fake(AutoSchedule(steps=1), [1.0, 1.3])
    fake.run()
    assert list(fake.tuner.report.skipped) == [4]
    assert "needs more marks" in fake.tuner.report.skipped[4]
    assert {of.num_stages for of in fake.compiled} == {2}
    assert fake.tuner.report.chosen.num_stages == 2


def test_memory_limit():
    free = Fake(AutoSchedule(steps=1, stages_per_rank=(1,)), UNEVEN, activation=8)
    free.run()
    at_first = simulate(by_name("1f1b", 2), free.costs(2), num_microbatches=6).peak_memory
    assert max(at_first) == 32  # two microbatches of two blocks
    fake = Fake(AutoSchedule(steps=1, stages_per_rank=(1,), memory_limit=16), UNEVEN, activation=8)
    fake.run()
    report = fake.tuner.report
    assert max(simulate(report.chosen, fake.costs(2), num_microbatches=6).peak_memory) <= 16
    assert report.predicted_gain < 0 < free.tuner.report.predicted_gain  # the first one would not fit, so it goes
    assert fake.schedule == report.chosen
    with pytest.raises(ScheduleError, match=r"memory_limit of rank 0 is 15, but one microbatch alone holds 16"):
        Fake(AutoSchedule(steps=1, stages_per_rank=(1,), memory_limit=15), UNEVEN, activation=8).run()


def test_a_schedule_that_is_slower_when_it_runs_is_given_up():
    fake = Fake(AutoSchedule(steps=1), UNEVEN, slow=True)
    fake.run()
    report = fake.tuner.report
    assert fake.schedule == report.chosen == report.first
    assert report.measured_gain < 0 < report.predicted_gain
    assert "was not faster" in fake.messages[-1]


def test_batches_of_another_shape_do_not_count():
    fake = Fake(AutoSchedule(steps=2), UNEVEN)
    fake.tuner.step(fake, {"x": np.zeros((4, 2))})
    for _ in range(5):
        fake.tuner.step(fake, {"x": np.zeros((2, 2))})
    assert set(fake.ran) == {repr(by_name("1f1b", 2))}
    assert fake.tuner.report is None


def test_options_are_checked():
    with pytest.raises(ValueError, match=r"steps has 0; it must be a whole number of at least 1"):
        AutoSchedule(steps=0)
    with pytest.raises(ValueError, match=r"stages_per_rank has 1\.5"):
        AutoSchedule(stages_per_rank=(1, 1.5))
    with pytest.raises(ValueError, match=r"minimum_gain=2 is a share"):
        AutoSchedule(minimum_gain=2)
    assert AutoSchedule(split_backward=False, stages_per_rank=(1, 3)).trials(2, 2) == [
        (2, "1f1b"),
        (6, "interleaved_1f1b"),
    ]
    assert AutoSchedule(stages_per_rank=(1,)).trials(4, 2)[0] == (4, "interleaved_1f1b")


@pytest.mark.usefixtures("verified")
def test_for_real(capsys):
    """The losses are those of 1F1B, whatever was chosen."""
    batches = [m.make_batch(8, seed) for seed in range(12)]

    def train(schedule, progress):
        t = PipelineTrainer(
            m.Model(4, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=4,
            schedule=schedule, logging=Logging(progress=progress),
        )  # fmt: skip
        return t, [float(metrics["loss"]) for _, metrics in t.training_steps(batches)]

    plain, expected = train("1f1b", False)
    assert plain.schedule_report is None
    auto, losses = train(AutoSchedule(steps=1, minimum_gain=0.0), True)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert auto.step == 12
    report = auto.schedule_report
    assert auto.schedule == report.chosen
    assert set(report.found) == {2, 4}
    assert all(0 < seconds < 60 for seconds in report.predicted)
    out = capsys.readouterr().out
    assert "schedule: " in out
    assert "gained" in out
    assert auto.evaluate([m.make_batch(6)])["loss"] == pytest.approx(plain.evaluate([m.make_batch(6)])["loss"])


def test_one_stage_has_nothing_to_choose():
    t = PipelineTrainer(
        m.Model(1, rngs=nnx.Rngs(0)), optax.sgd(0.1), m.mean_loss, num_stages=1, num_microbatches=2, schedule="auto",
        logging=False,
    )  # fmt: skip
    t.train_step(m.make_batch(4))
    assert t.schedule_report is None
