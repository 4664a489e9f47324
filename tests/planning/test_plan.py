"""Plans: saved, edited, loaded; and what is said of those that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.planning import AssignmentError, Plan, PlannedBlock
from jaxpp_flax.planning.predicted.blocks import Work
from jaxpp_flax.schedules import CustomSchedule, Std1F1B, ZeroBubble
from jaxpp_flax.schedules.residuals import KEEP, ResidualPlan, StageResiduals
from jaxpp_flax.trainers.stages.assignment import resolve

MARKS = [Mark(name, True, "m.py:1") for name in ("embed", "block_0", "block_1", "block_2", "head")]


def example() -> Plan:
    work = [Work(1.0, 2.0), Work(1.0, 2.0), Work(1.0, 2.0), Work(1.0, 2.0), Work(4.0, 8.0), Work(0.5, 0.5)]
    return Plan.of(MARKS, (3,), 2, work=work, unit="s", source="measured", ranks=(0, 1), even_sizes=(3, 3))


def edited(tmp_path, change):
    path = example().save(tmp_path / "plan.json")
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return path


def test_a_plan_goes_to_a_file_and_back(tmp_path):
    plan = example()
    path = plan.save(tmp_path / "plan.json")
    loaded = Plan.load(path)
    assert loaded == plan
    assert (loaded.num_stages, loaded.unit, loaded.source) == (2, "s", "measured")
    for assignment in (str(path), path, loaded, plan):
        assert resolve(assignment)(MARKS, 2) == (3,)
    # A line for each block, for people and for diffs.
    assert sum('"stage"' in line for line in path.read_text().splitlines()) == 6


def test_residuals_go_to_a_file_and_back(tmp_path):
    residuals = ResidualPlan([StageResiduals(recompute=True, offload=0.5), KEEP], fetch_ahead=2, offload_within=2)
    plan = replace(example(), residuals=residuals)
    path = plan.save(tmp_path / "plan.json")
    assert Plan.load(path).residuals == residuals
    assert Plan.load(example().save(path)).residuals is None
    for change, text in (
        (lambda r: r["stages"][0].update(offload=2), "residuals of the plan: offload=2"),
        (lambda r: r["stages"][0].update(ofload=1), "stage 0 of residuals has the unknown key 'ofload'"),
        (lambda r: r["stages"].pop(), "the plan's residuals have 1 entries, but num_stages=2"),
    ):
        plan.save(path)
        found = json.loads(path.read_text())
        change(found["residuals"])
        path.write_text(json.dumps(found))
        with pytest.raises(AssignmentError, match=text):
            Plan.load(path)


@pytest.mark.parametrize(
    "schedule", [ZeroBubble(2), CustomSchedule(Std1F1B(2).tasks(4)), Std1F1B(2)], ids=["named", "tasks", "1f1b"]
)
def test_what_was_predicted_goes_to_a_file_and_back(tmp_path, schedule):
    plan = replace(
        example(), schedule=schedule, num_microbatches=4, layout={"stage": 2, "data": 4}, seconds=0.5,
        peak_bytes=(3e9, 2e9), host_bytes=(1e9, 0.0), notes=("because",),
    )  # fmt: skip
    loaded = Plan.load(plan.save(tmp_path / "plan.json"))
    assert loaded == plan
    assert loaded.schedule.tasks(4) == schedule.tasks(4)
    caption = plan.table().caption
    for part in (repr(schedule), "predicted step 500 ms", "predicted bytes on each device: 3 GB, 2 GB", "because"):
        assert part in caption


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({"name": "1f2b"}, r"schedule of the plan: unknown schedule '1f2b'\. Did you mean '1f1b'"),
        ({"nam": "1f1b"}, r"schedule has the unknown key 'nam'\. Did you mean 'name'"),
        ({}, r"schedule has neither 'name' nor 'tasks'"),
        ({"tasks": ["0F0 0B0 0X0", "1F0 1B0"]}, r"schedule, rank 0: '0X0' is not a task"),
        ({"name": "interleaved_1f1b", "num_ranks": 3}, r"num_stages=2 cannot be divided evenly"),
    ],
)
def test_a_schedule_that_cannot_be_read(tmp_path, schedule, text):
    with pytest.raises(AssignmentError, match=rf"plan.json: .*{text}"):
        Plan.load(edited(tmp_path, lambda found: found.update(schedule=schedule)))


def test_a_file_may_be_edited(tmp_path):
    def move(found):
        found["blocks"][3]["stage"] = 1
        del found["blocks"][5]  # what follows the last block stays with it

    assert resolve(str(edited(tmp_path, move)))(MARKS, 2) == (2,)


def stage(index, value):
    return lambda found: found["blocks"][index].update(stage=value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (stage(2, 5), r"plan.json: the plan puts 'block_1' on stage 5; stages are numbered 0 to 1 \(num_stages=2\)"),
        (stage(2, "1"), r"puts 'block_1' on stage '1'"),
        (stage(1, 1), r"not contiguous: 'block_1' is on stage 0, but 'block_0', which comes before it, is on stage 1"),
        (lambda f: f.update(num_stages=3), r"leaves stage 2 of num_stages=3 empty"),
        (lambda f: f.update(num_stages="2"), r"num_stages of the plan is '2'"),
        (lambda f: f["blocks"][2].update(name="block_0"), r"lists the block 'block_0' twice"),
        (
            lambda f: f["blocks"][2].update(stag=1),
            r"block 2 \('block_1'\) has the unknown key 'stag'\. Did you mean 'stage'",
        ),
        (lambda f: f["blocks"][2].pop("stage"), r"block 2 \('block_1'\) has no 'stage'"),
        (lambda f: f["blocks"][2].update(forward=-1), r"forward of 'block_1' is -1; costs are numbers of at least 0"),
        (lambda f: f.update(block=[]), r"unknown key 'block'\. Did you mean 'blocks'"),
        (lambda f: f.pop("blocks"), r"the plan has no 'blocks'"),
        (lambda f: f.update(format="other 7"), r"has format 'other 7'; this version reads 'jaxpp_flax plan 1'"),
        (lambda f: f.update(fsdp="always"), r"the plan's fsdp='always' is no known setting. Use \"step\""),
        (lambda f: f.update(blocks={}), r"blocks is a dict; it must be a list"),
        (lambda f: f.update(schedule="1f1b"), r"schedule is a str; it must be an object with 'name', 'num_ranks'"),
        (lambda f: f["blocks"].append("x"), r"block 6 is a str; it must be an object with 'name', 'stage'"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, change, text):
    with pytest.raises(AssignmentError, match=text):
        Plan.load(edited(tmp_path, change))


def test_a_file_that_holds_no_plan(tmp_path):
    (tmp_path / "plan.json").write_text('{"num_stages": 2,\n oops}')
    with pytest.raises(AssignmentError, match=r"plan.json is no JSON: .*line 2 column 2"):
        resolve(str(tmp_path / "plan.json"))
    with pytest.raises(FileNotFoundError, match=r"plann.json', does not exist\. Did you mean 'plan.json'"):
        resolve(tmp_path / "plann.json")


@pytest.mark.parametrize(
    ("marks", "num_stages", "text"),
    [
        (MARKS, 3, r"the plan is for 2 stages, but num_stages=3"),
        ([*MARKS[:2], Mark("blok_1", True, ""), *MARKS[3:]], 2, r"puts 'block_1' on stage 0, .* Did you mean 'blok_1'"),
        ([*MARKS[:3], Mark("more", True, ""), *MARKS[3:]], 2, r"leaves out the model's block 'more'"),
    ],
)
def test_a_plan_for_another_model(marks, num_stages, text):
    with pytest.raises(AssignmentError, match=text):
        example()(marks, num_stages)


def test_what_a_plan_says():
    plan = example()
    assert plan.stage_sizes == (4, 2)
    assert plan.rank_costs == (12.0, 13.0)
    assert plan.imbalance == pytest.approx(13 / 12.5)
    assert plan.even_imbalance == pytest.approx(16 / 12.5)
    assert plan.gain == pytest.approx(3 / 16)
    console = Console(width=120, record=True)
    console.print(plan)
    text = console.export_text()
    for part in (
        "embed",
        "after_head",
        "12 s",
        "48.0%",
        "even 1.280, here 1.040",
        "19% less",
    ):
        assert part in text, part


def test_a_plan_without_costs_or_ranks_says_less():
    plan = Plan(num_stages=1, blocks=[PlannedBlock(name="a", stage=0)])
    assert plan.rank_costs is None
    assert plan.imbalance is None
    assert plan.gain is None
    assert plan.table().row_count == 1


def test_a_long_table_joins_neighbours_of_equal_cost():
    blocks = [PlannedBlock(name=f"b{i}", stage=i // 48, forward=1.0 + (i == 95)) for i in range(96)]
    plan = Plan(num_stages=2, blocks=blocks, ranks=(0, 1))
    assert plan.table().row_count == 3
