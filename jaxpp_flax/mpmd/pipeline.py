"""Fragment rules: a pipeline schedule that the user writes as "this fragment before that one" and "these are one".

A `PipelineSchedule` holds functions (builders). Each builder gets the fragments of one mesh and returns rules. The
partitioner makes the rules part of the program's order; a rule that the program cannot follow is refused.

After the module of the same name in Shardy:MPMD (openxla/shardy, `integrations/python/jax/mpmd/pipeline.py`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "FragmentInfo",
    "FragmentMergeRule",
    "FragmentMergeRules",
    "FragmentOrigin",
    "FragmentScheduleRule",
    "FragmentScheduleRules",
    "PipelineContext",
    "PipelineSchedule",
    "SplitFragmentType",
    "build_merge_rules_from_predicate",
    "build_rules_from_pipeline",
    "build_schedule_rules_from_predicate",
    "fragment_origins_contain",
    "get_scheduling_unit_info",
    "maybe_unique_transpose_count",
    "minimal_create_target_info",
    "union_fragment_origins",
]


@dataclass(frozen=True)
class FragmentOrigin:
    """A named computation in a fragment, and the number of its transpositions: 0 forward, 1 backward.

    Example:
      >>> FragmentOrigin("block_0", 1)
      FragmentOrigin(computation_name='block_0', transpose_count=1)
    """

    computation_name: str
    transpose_count: int = 0


@enum.unique
class SplitFragmentType(enum.Enum):
    """The half of a split backward computation.

    `KEEP_TRANSFERRED` makes the gradient that goes to the previous stage; `DROP_TRANSFERRED` makes weight gradients.

    Example:
      >>> SplitFragmentType.DROP_TRANSFERRED.name
      'DROP_TRANSFERRED'
    """

    KEEP_TRANSFERRED = enum.auto()
    DROP_TRANSFERRED = enum.auto()


@dataclass(frozen=True)
class FragmentInfo:
    """A fragment as rules see it: its named computations, stage, microbatch, half of a split backward, and mesh.

    Example:
      >>> FragmentInfo((FragmentOrigin("block_0"),), stage_id=0, call_counter=2, mesh_name="m0").call_counter
      2
    """

    origins: tuple[FragmentOrigin, ...]
    stage_id: int | None = None
    call_counter: int | None = None
    split_type: SplitFragmentType | None = None
    mesh_name: str = ""


def _check_fragments(what: str, fragments: Collection[FragmentInfo]) -> None:
    """Refuse fewer than two fragments, fragments without a name, and fragments of several meshes."""
    if len(fragments) < 2:
        raise ValueError(f"a {what} takes at least 2 fragments, got {len(fragments)}: {list(fragments)}.")
    for fragment in fragments:
        if not fragment.origins:
            raise ValueError(
                f"a {what} takes fragments that hold a named computation, but {fragment} has no origins. Leave out "
                "fragments without origins: their work goes with the fragments around it."
            )
    meshes = sorted({fragment.mesh_name for fragment in fragments})
    if len(meshes) > 1:
        raise ValueError(
            f"a {what} takes fragments of one mesh, got fragments of {', '.join(meshes)}. Write one rule for each mesh."
        )


@dataclass(frozen=True)
class FragmentMergeRule:
    """These fragments run as one program.

    Attributes:
      sources: two or more fragments of one mesh.
      target: the merged fragment; see `minimal_create_target_info`.

    Raises:
      ValueError: for fewer than two sources, sources of several meshes, or a fragment without origins.

    Example:
      >>> a, b = (FragmentInfo((FragmentOrigin("block_0"),), call_counter=i, mesh_name="m0") for i in range(2))
      >>> FragmentMergeRule({a, b}, minimal_create_target_info([a, b])).target.mesh_name
      'm0'
    """

    sources: AbstractSet[FragmentInfo]
    target: FragmentInfo

    def __post_init__(self) -> None:
        _check_fragments("FragmentMergeRule", self.sources)
        if not self.target.origins:
            raise ValueError(
                f"the target of a FragmentMergeRule needs the origins of its sources, but {self.target} has none. "
                "Make it by `minimal_create_target_info(sources)`."
            )


@dataclass(frozen=True)
class FragmentScheduleRule:
    """These fragments of one mesh run in this order.

    Attributes:
      ordered_fragments: two or more fragments of one mesh.

    Raises:
      ValueError: for fewer than two fragments, fragments of several meshes, or a fragment without origins.

    Example:
      >>> a, b = (FragmentInfo((FragmentOrigin("block_0"),), call_counter=i, mesh_name="m0") for i in range(2))
      >>> [fragment.call_counter for fragment in FragmentScheduleRule([b, a]).ordered_fragments]
      [1, 0]
    """

    ordered_fragments: Sequence[FragmentInfo]

    def __post_init__(self) -> None:
        _check_fragments("FragmentScheduleRule", self.ordered_fragments)


FragmentMergeRules: TypeAlias = Sequence[FragmentMergeRule]
FragmentScheduleRules: TypeAlias = Sequence[FragmentScheduleRule]


@dataclass(frozen=True)
class PipelineContext:
    """What builders and predicates know beside the fragments.

    Example:
      >>> PipelineContext(num_meshes=4).num_meshes
      4
    """

    num_meshes: int


TargetInfoBuilder: TypeAlias = Callable[[Sequence[FragmentInfo]], FragmentInfo]
ScheduleMergeRuleBuilder: TypeAlias = Callable[
    [Sequence[FragmentInfo], PipelineContext], tuple[FragmentScheduleRules, FragmentMergeRules]
]
RuleGeneratorPredicate: TypeAlias = Callable[[FragmentInfo, FragmentInfo, PipelineContext], bool]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule made of rules, for `make_config(pipeline_schedule=)`.

    Attributes:
      schedule_merge_rule_builders: functions of the fragments of one mesh and a `PipelineContext`, which return
        schedule rules and merge rules. None means no rules.
      required_mpmd_options: partitioning options that the schedule needs. `mpmd_pipeline_schedule` names a schedule to
        which the rules are added; `mpmd_split_bwd_fragments` splits backward computations into two fragments.

    Example:
      >>> import functools
      >>> in_order = functools.partial(
      ...     build_schedule_rules_from_predicate, before_pred=lambda a, b, _: a.call_counter < b.call_counter)
      >>> schedule = PipelineSchedule([in_order])
    """

    schedule_merge_rule_builders: Sequence[ScheduleMergeRuleBuilder] | None = None
    required_mpmd_options: Mapping[str, bool | str] | None = None


def fragment_origins_contain(fragment: FragmentInfo, substring: str) -> bool:
    """Return whether the name of a computation in the fragment contains a text.

    Example:
      >>> fragment_origins_contain(FragmentInfo((FragmentOrigin("block_0"),)), "block")
      True
    """
    return any(substring in origin.computation_name for origin in fragment.origins)


def build_schedule_rules_from_predicate(
    fragment_infos: Sequence[FragmentInfo], context: PipelineContext, *, before_pred: RuleGeneratorPredicate
) -> tuple[list[FragmentScheduleRule], list[FragmentMergeRule]]:
    """Return a schedule rule for each pair of fragments of one mesh for which `before_pred(first, second, context)`.

    Example:
      >>> infos = [FragmentInfo((FragmentOrigin("block_0"),), call_counter=i, mesh_name="m0") for i in range(3)]
      >>> rules, _ = build_schedule_rules_from_predicate(
      ...     infos, PipelineContext(1), before_pred=lambda a, b, _: a.call_counter < b.call_counter)
      >>> len(rules)
      3
    """
    pairs = [(a, b) for a, b in itertools.permutations(fragment_infos, 2) if a.mesh_name == b.mesh_name]
    return [FragmentScheduleRule([a, b]) for a, b in pairs if before_pred(a, b, context)], []


def union_fragment_origins(source_fragments: Sequence[FragmentInfo]) -> tuple[FragmentOrigin, ...]:
    """Return the origins of all fragments, each once, in order.

    Example:
      >>> len(union_fragment_origins([FragmentInfo((FragmentOrigin("block_0"),))] * 2))
      1
    """
    return tuple(dict.fromkeys(origin for fragment in source_fragments for origin in fragment.origins))


def minimal_create_target_info(source_fragments: Sequence[FragmentInfo]) -> FragmentInfo:
    """Return the target of a merge rule: all origins of the sources, and their mesh.

    Raises:
      ValueError: if there is no source, or the sources are on several meshes.

    Example:
      >>> infos = [FragmentInfo((FragmentOrigin("block_0", i),), mesh_name="m0") for i in range(2)]
      >>> [origin.transpose_count for origin in minimal_create_target_info(infos).origins]
      [0, 1]
    """
    if not source_fragments:
        raise ValueError("a merged fragment needs at least one source fragment, got none.")
    first = source_fragments[0].mesh_name
    for fragment in source_fragments:
        if fragment.mesh_name != first:
            raise ValueError(
                f"Inconsistent mesh_name values: {first} vs {fragment.mesh_name}. Fragments of one mesh can be merged."
            )
    return FragmentInfo(union_fragment_origins(source_fragments), mesh_name=first)


_minimal_create_target_info = minimal_create_target_info  # programs written for Shardy call it by this name


def build_merge_rules_from_predicate(
    fragment_infos: Sequence[FragmentInfo],
    context: PipelineContext,
    target_info_builder: TargetInfoBuilder = minimal_create_target_info,
    *,
    pred: RuleGeneratorPredicate,
) -> tuple[list[FragmentScheduleRule], list[FragmentMergeRule]]:
    """Return a merge rule for each pair of fragments of one mesh for which `pred(one, other, context)`.

    Example:
      >>> infos = [FragmentInfo((FragmentOrigin("block_0"),), call_counter=i, mesh_name="m0") for i in range(2)]
      >>> _, rules = build_merge_rules_from_predicate(infos, PipelineContext(1), pred=lambda a, b, _: True)
      >>> len(rules)
      1
    """
    pairs = [(a, b) for a, b in itertools.combinations(fragment_infos, 2) if a.mesh_name == b.mesh_name]
    return [], [FragmentMergeRule({a, b}, target_info_builder([a, b])) for a, b in pairs if pred(a, b, context)]


def build_rules_from_pipeline(
    fragment_infos: Sequence[FragmentInfo], pipeline: PipelineSchedule, context: PipelineContext
) -> tuple[list[FragmentScheduleRule], list[FragmentMergeRule]]:
    """Return the rules of all builders for all meshes.

    Raises:
      TypeError: if a builder does not return two sequences of rules.

    Example:
      >>> build_rules_from_pipeline([], PipelineSchedule(), PipelineContext(1))
      ([], [])
    """
    of_mesh: dict[str, list[FragmentInfo]] = {}
    for fragment in fragment_infos:
        of_mesh.setdefault(fragment.mesh_name, []).append(fragment)
    scheduled: list[FragmentScheduleRule] = []
    merged: list[FragmentMergeRule] = []
    for builder in pipeline.schedule_merge_rule_builders or ():
        for fragments in of_mesh.values():
            made = builder(fragments, context)
            if not isinstance(made, tuple) or len(made) != 2:
                raise TypeError(
                    f"the rule builder {builder!r} must return two sequences, of FragmentScheduleRules and of "
                    f"FragmentMergeRules, got {made!r}."
                )
            scheduled += made[0]
            merged += made[1]
    return scheduled, merged


def maybe_unique_transpose_count(fragment: FragmentInfo) -> int | None:
    """Return the transpose count of the fragment's origins; None if they differ, or there are none.

    Example:
      >>> maybe_unique_transpose_count(FragmentInfo((FragmentOrigin("block_0", 1),)))
      1
    """
    counts = {origin.transpose_count for origin in fragment.origins}
    return counts.pop() if len(counts) == 1 else None


def get_scheduling_unit_info(fragment: FragmentInfo) -> tuple[int, int] | None:
    """Return microbatch and transpose count of a fragment that a schedule orders; None for other fragments.

    Example:
      >>> get_scheduling_unit_info(FragmentInfo((FragmentOrigin("block_0"),), call_counter=3))
      (3, 0)
    """
    count = maybe_unique_transpose_count(fragment)
    return (fragment.call_counter, count) if fragment.call_counter is not None and count in (0, 1) else None
