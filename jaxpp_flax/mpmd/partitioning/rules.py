"""Fragment rules on the program: which fragments run before others on their mesh, and which are one program."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from jaxpp_flax.messages import listed
from jaxpp_flax.mpmd.config import MpmdConfig
from jaxpp_flax.mpmd.partitioning.keys import Key
from jaxpp_flax.mpmd.partitioning.nodes import Node
from jaxpp_flax.mpmd.pipeline import (
    FragmentInfo,
    FragmentMergeRule,
    FragmentOrigin,
    PipelineContext,
    SplitFragmentType,
    build_rules_from_pipeline,
    union_fragment_origins,
)
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Rules", "infos_of", "rules_of"]

_SPLIT = {
    TaskKind.BACKWARD_INPUT: SplitFragmentType.KEEP_TRANSFERRED,
    TaskKind.BACKWARD_WEIGHT: SplitFragmentType.DROP_TRANSFERRED,
}


@dataclass(frozen=True)
class Rules:
    """Rules about fragments by their keys: `before` are pairs in order, `merged` are groups that run as one program."""

    before: tuple[tuple[Key, Key], ...] = ()
    merged: tuple[frozenset[Key], ...] = ()
    labels: Mapping[Key, str] = field(default_factory=dict[Key, str])

    @cached_property
    def group_of(self) -> dict[Key, int]:
        """The number of the group of each merged fragment."""
        return {key: number for number, keys in enumerate(self.merged) for key in keys}

    def key_of(self, number: int) -> Key:
        """Return the key of a merged group: what its fragments share."""
        keys = self.merged[number]
        first = next(iter(keys))
        stage = first.stage if len({key.stage for key in keys}) == 1 else None
        call = first.call if len({key.call for key in keys}) == 1 else None
        return Key(first.rank, stage, None, call)

    def describe(self, number: int) -> str:
        """Describe a merged group, for messages."""
        return f"{' and '.join(sorted(self.labels[key] for key in self.merged[number]))} as one program"


def infos_of(keys: Mapping[Key, Sequence[Node]], config: MpmdConfig) -> dict[Key, FragmentInfo]:
    """Return the fragments as rules see them; `keys` holds the named nodes of each, in program order.

    The stage is the number in `name_to_stage_assignment`, else the one that was found.
    """
    infos: dict[Key, FragmentInfo] = {}
    for key, nodes in keys.items():
        # Recomputed forward work counts as the backward work that it serves.
        origins = [FragmentOrigin(n.origin.name, max(n.origin.transpose_count, n.backward)) for n in nodes if n.origin]
        given = [config.name_to_stage_assignment.get(origin.computation_name) for origin in origins]
        stage = next((number for number in given if number is not None), key.stage)
        split = None if key.kind is None else _SPLIT.get(key.kind)
        mesh = config.meshes.names[key.rank]
        infos[key] = FragmentInfo(tuple(dict.fromkeys(origins)), stage, key.call, split, mesh)
    return infos


def rules_of(infos: Mapping[Key, FragmentInfo], config: MpmdConfig) -> Rules:
    """Build the rules of the config's `PipelineSchedule`.

    Raises:
      ValueError: if a rule is about a fragment that the program lacks, or gives a merged fragment other properties than
        its sources have.
    """
    if config.rules is None:
        return Rules()
    context = PipelineContext(num_meshes=len(config.topology))
    scheduled, merged = build_rules_from_pipeline(list(infos.values()), config.rules, context)
    by_info = {info: key for key, info in infos.items()}
    before: dict[tuple[Key, Key], None] = {}
    for rule in scheduled:
        keys = [_known(info, by_info) for info in rule.ordered_fragments]
        before.update(dict.fromkeys(itertools.pairwise(keys)))
    groups: list[set[Key]] = []
    for rule in merged:
        _check_target(rule)
        together = {_known(info, by_info) for info in rule.sources}
        apart = [group for group in groups if group.isdisjoint(together)]
        groups = [*apart, together.union(*(group for group in groups if not group.isdisjoint(together)))]
    labels = {key: _label(info) for key, info in infos.items()}
    return Rules(tuple(before), tuple(map(frozenset, groups)), labels)


def _known(info: FragmentInfo, known: Mapping[FragmentInfo, Key]) -> Key:
    if info not in known:
        there = [other for other in known if other.mesh_name == info.mesh_name] or list(known)
        raise ValueError(
            f"a fragment rule is about {_label(info)} on mesh {info.mesh_name!r}, which the program lacks. Its "
            f"fragments there are {listed([_label(other) for other in there], 6, str)}. Make rules of the fragments "
            "that the builder gets, unchanged."
        )
    return known[info]


def _check_target(rule: FragmentMergeRule) -> None:
    """Refuse a merge rule whose target is not what merging its sources makes."""
    sources = sorted(rule.sources, key=str)
    wanted = replace(rule.target, origins=tuple(sorted(rule.target.origins, key=str)))
    possible: dict[str, Iterable[object]] = {
        "origins": [tuple(sorted(union_fragment_origins(sources), key=str))],
        "mesh_name": [sources[0].mesh_name],
        **{name: [None, *_shared(sources, name)] for name in ("stage_id", "call_counter", "split_type")},
    }
    for name, values in possible.items():
        if getattr(wanted, name) not in values:
            raise ValueError(
                f"a FragmentMergeRule gives its target {name}={getattr(rule.target, name)!r}, but merging "
                f"{' and '.join(map(_label, sources))} makes {next(iter(values))!r}. Make the target by "
                "`minimal_create_target_info(sources)`."
            )


def _shared(sources: Sequence[FragmentInfo], name: str) -> list[object]:
    values = {getattr(source, name) for source in sources}
    return list(values) if len(values) == 1 else []


def _label(info: FragmentInfo) -> str:
    names = ", ".join(
        f'"{o.computation_name}"' + f"({o.transpose_count})" * bool(o.transpose_count) for o in info.origins
    )
    call = "" if info.call_counter is None else f" of microbatch {info.call_counter}"
    split = "" if info.split_type is None else f" ({info.split_type.name})"
    return f"{names}{split}{call}"
