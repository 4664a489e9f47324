"""Fragment rules: the order and the merges that a `PipelineSchedule` asks for, and what it may not ask for."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import pytest

from jaxpp_flax import mpmd
from jaxpp_flax.mpmd import pipeline
from jaxpp_flax.mpmd.pipeline import FragmentInfo, FragmentMergeRule, FragmentOrigin, FragmentScheduleRule
from jaxpp_flax.schedules import ScheduleError
from tests.helpers import tree_allclose
from tests.mpmd.programs import accumulate, batches, in_runs, runs_of, topology, weights

STAGES, MICROBATCHES = 2, 3


def one_forward_one_backward(a, b, context):
    """The predicate of 1F1B, written out: which fragments of a stage come before which."""
    one, other = pipeline.get_scheduling_unit_info(a), pipeline.get_scheduling_unit_info(b)
    if one is None or other is None:
        return False
    (call_a, back_a), (call_b, back_b) = one, other
    if back_a == back_b:
        return call_a < call_b
    warmup = context.num_meshes - a.stage_id
    return call_b == call_a + warmup if back_a else call_a == call_b + warmup - 1


def all_forwards_first(a, b, _):
    one, other = pipeline.get_scheduling_unit_info(a), pipeline.get_scheduling_unit_info(b)
    return one is not None and other is not None and one[::-1] < other[::-1]


def same_direction(a, b, _):
    return pipeline.maybe_unique_transpose_count(a) == pipeline.maybe_unique_transpose_count(b)


def ordered(predicate):
    return functools.partial(pipeline.build_schedule_rules_from_predicate, before_pred=predicate)


def merged(predicate):
    return functools.partial(pipeline.build_merge_rules_from_predicate, pred=predicate)


def lower(*builders, options=None, **required):
    schedule = mpmd.PipelineSchedule(builders, required or None)
    cfg = mpmd.make_config(
        topology(1, 1), in_runs(4, 2), pipeline_schedule=schedule, partitioning_options=options or {}
    )
    return mpmd.jit(accumulate, cfg).lower(weights(4), batches(MICROBATCHES))


def check_numbers(lowered):
    args = weights(4), batches(MICROBATCHES)
    tree_allclose(lowered.compile()(*args), jax.jit(accumulate)(*args))


@pytest.mark.parametrize(
    ("predicate", "first"),
    [(one_forward_one_backward, "ffbfbb"), (all_forwards_first, "fffbbb")],
)
def test_each_mesh_runs_in_the_order_of_the_rules(predicate, first):
    lowered = lower(ordered(predicate))
    found = ["".join(label[0] for label, call in runs_of(lowered, mesh) if call >= 0) for mesh in range(STAGES)]
    assert found == [first, "fbfbfb" if predicate is one_forward_one_backward else first]
    check_numbers(lowered)


def test_rules_that_reverse_the_microbatches():
    """The order is the rules', not the program's: the last microbatch goes forward first."""
    lowered = lower(ordered(lambda a, b, _: same_direction(a, b, _) and not backward(a) and counter(a) > counter(b)))
    forwards = [call for label, call in runs_of(lowered, 0) if label.startswith("fwd")]
    assert forwards == [2, 1, 0]
    check_numbers(lowered)


def counter(info):
    return info.call_counter


def backward(info):
    return pipeline.maybe_unique_transpose_count(info) == 1


def test_merged_microbatches_run_as_one_program():
    """All forwards of a mesh are one program, and all backwards."""
    lowered = lower(merged(same_direction))
    calls = [line for line in lowered.as_text().splitlines() if "fragment_call" in line and '"block' in line]
    assert len(calls) == 2 * STAGES
    assert all("merged" in line for line in calls)
    check_numbers(lowered)


def test_a_merge_of_forward_and_backward_on_the_last_mesh():
    """Forward and backward of a microbatch on the last mesh, in a schedule that its options name."""
    last = merged(lambda a, b, _: a.mesh_name == "m1" and a.call_counter == b.call_counter)
    lowered = lower(last, mpmd_pipeline_schedule="1F1B")
    assert [call for label, call in runs_of(lowered, 1) if label == "merged"] == [0, 1, 2]
    assert [label[:3] for label, call in runs_of(lowered, 0) if call >= 0] == ["fwd", "fwd", "bwd", "fwd", "bwd", "bwd"]
    check_numbers(lowered)


def test_split_backward_computations():
    seen: set[str] = set()

    def weights_last(infos, context):
        halves = [info for info in infos if info.split_type is not None]
        seen.update(info.split_type.name for info in halves)
        keep = [info for info in halves if info.split_type is pipeline.SplitFragmentType.KEEP_TRANSFERRED]
        drop = [info for info in halves if info.split_type is pipeline.SplitFragmentType.DROP_TRANSFERRED]
        return [FragmentScheduleRule([a, b]) for a in keep for b in drop], []

    lowered = lower(weights_last, mpmd_split_bwd_fragments=True)
    assert seen == {"KEEP_TRANSFERRED", "DROP_TRANSFERRED"}
    kinds = [label for label, _ in runs_of(lowered, 1) if label.startswith("bwd")]
    assert kinds == ["bwd_i_1"] * MICROBATCHES + ["bwd_w_1"] * MICROBATCHES
    check_numbers(lowered)


def test_named_schedules_of_the_registry():
    with pytest.raises(KeyError, match=r"unknown schedule 'GPIP'.* Did you mean 'GPIPE'"):
        mpmd.pipeline_registry.get_pipeline_schedule("GPIP")
    found = mpmd.pipeline_registry.get_pipeline_schedule("ONE_FWD_ONE_BWD")
    cfg = mpmd.make_config(topology(1, 1), in_runs(4, 2), pipeline_schedule=found)
    assert cfg.schedule == "ONE_FWD_ONE_BWD"
    reverse = ordered(lambda a, b, _: counter(a) > counter(b))
    both = replace(found, schedule_merge_rule_builders=[*(found.schedule_merge_rule_builders or ()), reverse])
    cfg = replace(cfg, pipeline_schedule=both)
    with pytest.raises(ScheduleError, match=r"cannot run by ONE_FWD_ONE_BWD: .* circle.*of microbatch 1 before"):
        mpmd.jit(accumulate, cfg).lower(weights(4), batches(MICROBATCHES))


def stranger(infos, context):
    other = FragmentInfo((FragmentOrigin("block_9"),), call_counter=0, mesh_name=infos[0].mesh_name)
    return [FragmentScheduleRule([infos[0], other])], []


def out_and_back(a, b, _):
    """Forward and backward on the first mesh, though the second mesh works in between."""
    return a.mesh_name == "m0" and a.call_counter == b.call_counter == 0


def renamed(infos, context):
    target = replace(pipeline.minimal_create_target_info(infos[:2]), origins=(FragmentOrigin("other"),))
    return [], [FragmentMergeRule(set(infos[:2]), target)]


@pytest.mark.parametrize(
    ("builder", "error", "message"),
    [
        (stranger, ValueError, r'rule is about "block_9" of microbatch 0 on mesh .m0., which the program lacks. Its'),
        (merged(out_and_back), ScheduleError, r'circle.*wanted: .*"block_0".* of microbatch 0 as one program'),
        (ordered(lambda a, b, _: True), ScheduleError, "cannot run by its fragment rules: .* in a circle"),
        (renamed, ValueError, "gives its target origins=.*'other'.*Make the target by `minimal_create_target_info"),
        (lambda infos, context: [], TypeError, r"rule builder .* must return two sequences, .* got \[\]"),
    ],
    ids=["unknown fragment", "data in between", "circle", "target", "no rules"],
)
def test_what_the_program_cannot_follow_is_refused(builder, error, message):
    with pytest.raises(error, match=message):
        lower(builder)


def test_options_that_contradict_the_schedule():
    with pytest.raises(ValueError, match="split_bwd_fragments: the pipeline schedule requires True, user specified F"):
        lower(options={"mpmd_split_bwd_fragments": False}, mpmd_split_bwd_fragments=True)
    with pytest.raises(ScheduleError, match="ONE_FWD_ONE_BWD does not split backward computations, but its fragment"):
        lower(ordered(all_forwards_first), mpmd_split_bwd_fragments=True, mpmd_pipeline_schedule="1F1B")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda a, b, c: FragmentScheduleRule([a]), "FragmentScheduleRule takes at least 2 fragments, got 1"),
        (lambda a, b, c: FragmentScheduleRule([a, c]), "takes fragments of one mesh, got fragments of m0, m1"),
        (lambda a, b, c: FragmentMergeRule({a, b}, FragmentInfo(())), "target of a FragmentMergeRule needs the origin"),
        (lambda a, b, c: FragmentScheduleRule([a, FragmentInfo(())]), "has no origins. Leave out"),
        (lambda a, b, c: pipeline.minimal_create_target_info([]), "needs at least one source fragment"),
        (lambda a, b, c: pipeline.minimal_create_target_info([a, c]), "Inconsistent mesh_name values: m0 vs m1"),
    ],
)
def test_rules_are_checked_where_they_are_made(rule, message):
    infos = [FragmentInfo((FragmentOrigin("block_0"),), call_counter=i, mesh_name=f"m{i // 2}") for i in range(3)]
    with pytest.raises(ValueError, match=message):
        rule(*infos)
