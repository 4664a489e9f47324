"""The work that may share a fragment."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_flax.mpmd.partitioning.nodes import Node
from jaxpp_flax.mpmd.partitioning.stages import Stages
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["Halves", "Key", "key_of"]


@dataclass(frozen=True, slots=True)
class Key:
    """The work that may share a fragment: one microbatch's work of one stage in one direction."""

    rank: int
    stage: int | None = None
    kind: TaskKind | None = None
    call: int | None = None

    @property
    def task(self) -> Task | None:
        """The schedule's task for this work, if there is one."""
        if self.kind is None or self.stage is None or self.call is None:
            return None
        return Task(self.kind, self.stage, self.call)


@dataclass(frozen=True)
class Halves:
    """The stages whose backward work is split, and the nodes that hold only weight gradients."""

    stages: frozenset[int] = frozenset()
    weights: frozenset[Node] = frozenset()


def key_of(node: Node, rank: int, stages: Stages, halves: Halves) -> Key:
    """Return the key of a node on a rank."""
    if node.computation is None:
        return Key(rank, call=node.call)
    stage = stages.of_name.get(node.computation)
    return Key(rank, stage, _kind(node, stage, halves), node.call)


def _kind(node: Node, stage: int | None, halves: Halves) -> TaskKind:
    if not node.backward:
        return TaskKind.FORWARD
    if stage not in halves.stages:
        return TaskKind.BACKWARD
    return TaskKind.BACKWARD_WEIGHT if node in halves.weights else TaskKind.BACKWARD_INPUT
