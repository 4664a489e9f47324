"""Measured steps: they train, they run what the schedule says, and can be drawn beside the simulated ones."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass

import jax
import numpy as np
import optax
import pytest

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning.profile import task_costs
from jaxpp_flax.schedules import Event, FusedTask, Task, TaskKind, by_name, draw, simulate
from jaxpp_flax.schedules.tools.cli import main as command_line
from tests.helpers import tree_allclose
from tests.trainers import models as m

_F, _B, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


pytestmark = pytest.mark.usefixtures("verified")


def trainer(schedule: object, num_stages: int = 3, **options: object) -> PipelineTrainer:
    options = {"num_microbatches": 4, "logging": False, **options}
    tx = optax.adam(0.01)
    return PipelineTrainer(m.Layers(4), tx, m.squared_error, num_stages=num_stages, schedule=schedule, **options)


def on_host(tree: object) -> object:
    return jax.tree.map(np.asarray, tree)


@pytest.fixture(scope="module")
def measured():
    """The second step of 1F1B and of zero-bubble, measured, and the trainers after it."""
    found = {}
    for name in ("1f1b", "zero_bubble"):
        t = trainer(name)
        t.train_step(m.make_xy(8))
        found[name] = (t.profile_step(m.make_xy(8, seed=1)), t)
    return found


def test_a_measured_step_trains_as_any_other(measured):
    profile, t = measured["zero_bubble"]
    same = trainer("zero_bubble")
    same.train_step(m.make_xy(8))
    before = on_host(same.state.params)
    metrics = same.train_step(m.make_xy(8, seed=1))
    assert t.step == 2
    tree_allclose(on_host(profile.metrics), on_host(metrics), rtol=0, atol=0)
    tree_allclose(on_host(t.state), on_host(same.state), rtol=0, atol=0)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b).max(), t.state.params, before)
    assert min(jax.tree.leaves(moved)) > 1e-4


def test_what_was_measured_is_the_schedule(measured):
    for name, (profile, _) in measured.items():
        order = [[event.task for event in rank] for rank in profile.measured.events]
        assert order == by_name(name, 3).tasks(4)
        assert all(event.end > event.start for rank in profile.measured.events for event in rank)
        for rank in profile.measured.events:
            assert all(a.end <= b.start for a, b in itertools.pairwise(rank))
        assert [[event.task for event in rank] for rank in profile.simulated.events] == order


def test_zero_bubble_idles_less_in_a_measured_step(measured):
    """What really ran, in its order, with every pass a unit of time: (p-1)(f+b) against (p-1)(f+i-w)."""
    idle = {}
    for name, (profile, _) in measured.items():
        unit = simulate([[event.task for event in sorted(r, key=lambda e: e.start)] for r in profile.measured.events])
        idle[name] = unit.idle
    assert idle["1f1b"] == (6.0, 6.0, 6.0)
    assert idle["zero_bubble"] == (2.0, 2.0, 2.0)


def test_both_are_drawn(measured, tmp_path):
    profile, _ = measured["zero_bubble"]
    text = profile.draw(tmp_path / "step.json")
    assert "measured: makespan" in text
    assert "simulated: makespan" in text
    trace = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == list(dict(profile.panels))
    tasks = [e for e in trace if e["ph"] == "X" and e["pid"] == 0]
    assert len(tasks) == profile.measured.num_tasks
    long = max(e["ts"] + e["dur"] for e in tasks)
    assert long == pytest.approx(1e6 * profile.measured.makespan)  # a trace counts microseconds
    assert draw(profile.panels, tmp_path / "step.svg") == draw(profile.panels)
    assert (tmp_path / "step.svg").read_text().count("simulated: makespan") == 1


def test_measured_costs_compare_schedules_from_a_terminal(measured, tmp_path, capsys):
    profile, _ = measured["zero_bubble"]
    (tmp_path / "costs.json").write_text(json.dumps(asdict(profile.simulated.costs)))
    counts = ["--ranks", "3", "--microbatches", "4", "--stages-per-rank", "1"]
    assert command_line(["compare", *counts, "--costs", str(tmp_path / "costs.json")]) == 0
    row = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("zero_bubble "))
    assert f"{profile.simulated.makespan:.4g}" in row


def test_memory_is_in_bytes(measured):
    profile, _ = measured["zero_bubble"]
    held = profile.stages[1].activation_bytes
    # At least the input of the stage's one block: microbatches of two examples, float32.
    assert held >= 2 * m.Layers.WIDTH * 4
    live = by_name("zero_bubble", 3).max_live_microbatches(1, 4)
    assert profile.measured.peak_memory[1] >= held
    assert profile.measured.peak_memory[1] <= live * max(held, profile.stages[1].weight_bytes)
    # In 1F1B the last stage's forward and backward are one task, between whose parts nothing is handed on.
    assert measured["1f1b"][0].stages[2].activation_bytes == 0
    assert profile.stages[2].activation_bytes > 0


def test_one_stage_without_a_mesh_has_no_tasks():
    t = trainer("1f1b", num_stages=1)
    with pytest.raises(ValueError, match=r"profile_step needs a pipeline.*num_stages=1.*mesh=\{'data': 1\}"):
        t.profile_step(m.make_xy(8))
    assert t.step == 0
    with pytest.raises(ValueError, match=r"use_schedule\('gpipe'\) needs a pipeline"):
        t.use_schedule("gpipe")


@dataclass(frozen=True)
class Stage:
    sent_bytes: int = 3
    activation_bytes: int = 5
    weight_bytes: int = 4


def events(*timed: tuple[object, float]) -> list[list[Event]]:
    """One rank's tasks, one after the other."""
    listed, now = [], 0.0
    for task, seconds in timed:
        listed.append(Event(task, 0, now, now + seconds))
        now += seconds
    return [listed]


def test_fused_tasks_are_taken_apart_by_the_forward_measured_alone():
    whole = FusedTask(Task(_F, 0, 0), Task(_B, 0, 0))
    alone = events((whole, 6.0))
    costs = task_costs([alone], [Stage()])
    assert (costs.forward, costs.backward) == ((2.0,), (4.0,))
    split = events((Task(_F, 0, 0), 1.0), (Task(_I, 0, 0), 3.0), (Task(_W, 0, 0), 2.5))
    costs = task_costs([alone, split], [Stage()])
    assert (costs.forward, costs.backward) == ((1.0,), (5.0,))
    assert (costs.backward_input, costs.backward_weight) == ((3.0,), (2.5,))
    assert (costs.sent, costs.activation, costs.weight_activation) == ((3.0,), (5.0,), (4.0,))


def test_a_stage_without_a_gradient_costs_nothing_there():
    frozen = events((Task(_F, 0, 0), 1.0), (Task(_F, 1, 0), 1.0), (Task(_I, 1, 0), 2.0))
    costs = task_costs([frozen], [Stage(), Stage()])
    assert (costs.backward, costs.backward_input, costs.backward_weight) == ((0.0, 2.0), (0.0, 2.0), (0.0, 0.0))


@pytest.mark.slow
def test_changing_the_schedule_changes_no_result():
    """From two stages to four, to two in a V on each rank, and back."""
    steady, moving = trainer("1f1b", 2), trainer("1f1b", 2)
    for number, (name, stages) in enumerate([("zero_bubble", 2), ("zbv", 4), ("interleaved_1f1b", 4), ("1f1b", 2)]):
        moving.use_schedule(name, stages)
        batch = m.make_xy(8, seed=number)
        tree_allclose(on_host(moving.train_step(batch)), on_host(steady.train_step(batch)), rtol=1e-5)
        assert moving.schedule == by_name(name, stages, 2)
        assert moving.num_stages == stages
    tree_allclose(on_host(moving.state), on_host(steady.state), rtol=1e-5)
    moving.use_schedule(by_name("zbv", 4, 2))
    assert moving.num_stages == 4
    # Inference is not bound to the schedule's number of microbatches, nor to its backward.
    assert moving.evaluate([m.make_xy(3)])["loss"] == pytest.approx(steady.evaluate([m.make_xy(3)])["loss"])
    with pytest.raises(ValueError, match=r"num_stages=3 cannot be divided evenly"):
        moving.use_schedule("interleaved_1f1b", 3)
