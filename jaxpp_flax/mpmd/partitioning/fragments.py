"""Join placed nodes to fragments, in an order that the schedule allows. One mesh runs a fragment as one program."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.mpmd.partitioning.infer import Placement
from jaxpp_flax.mpmd.partitioning.keys import Halves, Key, key_of
from jaxpp_flax.mpmd.partitioning.nodes import Node, Origin, Step
from jaxpp_flax.mpmd.partitioning.stages import Order, Stages
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["Fragment", "fragments_of"]

_F, _I, _W = TaskKind.FORWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT
_START = -1.0  # work that waits for nothing
_Barrier: TypeAlias = "tuple[list[int], list[int], str]"  # pieces that run before others, and why


@dataclass(eq=False, slots=True)
class Fragment:
    """Nodes that one mesh runs as one program."""

    key: Key
    nodes: list[Node] = field(default_factory=list)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The named computations in the fragment."""
        return tuple(dict.fromkeys(n.origin for n in self.nodes if n.origin is not None and n.computation is not None))

    @property
    def label(self) -> str:
        """The fragment's name in profiles and listings."""
        key = self.key
        if key.stage is None or key.kind is None:
            return "inferred"
        directions = dict.fromkeys("bwd" if node.backward else "fwd" for node in self.nodes)
        kinds = {_I: "bwd_i", _W: "bwd_w"}
        return f"{kinds.get(key.kind) or '_'.join(directions)}_{key.stage}"


@dataclass(eq=False, slots=True)
class _Piece:
    """A node on one of its ranks."""

    node: Node
    rank: int
    index: int
    key: Key
    position: float
    before: list[int] = field(default_factory=list)


def fragments_of(
    step: Step, placement: Placement, stages: Stages, order: Order | None, halves: Halves
) -> list[Fragment]:
    """Return the fragments in an order in which they can run: the schedule's, or program order if `order` is None.

    Raises:
      ScheduleError: if the program's data cannot follow the schedule.
    """
    pieces = _pieces(step, placement, stages, order, halves)
    if order is None:
        return _join(_sort(pieces, (), ""), frozenset())
    return _join(_sort(pieces, _scheduled_edges(pieces, order), order.name), order.fused)


def _pieces(step: Step, placement: Placement, stages: Stages, order: Order | None, halves: Halves) -> list[_Piece]:
    pieces: list[_Piece] = []
    native: dict[Value, dict[int, int]] = {}
    readers: list[list[int]] = []
    for node in step.nodes:
        for rank in placement.nodes[node]:
            index = len(pieces)
            before: list[int] = []
            for value in node.inputs:
                made = native.get(value)
                if made:
                    before.append(made[rank] if rank in made else made[min(made)])
            key = key_of(node, rank, stages, halves)
            pieces.append(_Piece(node, rank, index, key, _START, list(dict.fromkeys(before))))
            readers.append([])
            for p in pieces[-1].before:
                readers[p].append(index)
            for value in node.outputs:
                native.setdefault(value, {})[rank] = index
    _set_positions(pieces, readers, order)
    return pieces


def _set_positions(pieces: Sequence[_Piece], readers: Sequence[Sequence[int]], order: Order | None) -> None:
    """Set the time at which each piece should run; a microbatch's unnamed work goes with the named work around it."""

    placed: set[int] = set()
    for piece in pieces:
        if piece.key.kind is not None and (order is None or piece.key.call is not None):
            task = piece.key.task
            if order is None:
                piece.position = float(piece.index)
            elif task is not None:
                piece.position = float(order.position.get(task, _START))
            placed.add(piece.index)

    def adopt(piece: _Piece, others: Sequence[int], choose: Callable[..., _Piece]) -> None:
        if piece.key.kind is not None or piece.node.call is None:
            return
        around = (pieces[other] for other in others if other in placed)
        alike = [
            other
            for other in around
            if (other.rank, other.key.call) == (piece.rank, piece.node.call)
            and (other.key.kind is not _F) == piece.node.backward
        ]
        if alike:
            chosen = choose(alike, key=lambda other: (other.position, other.index))
            piece.key, piece.position = chosen.key, chosen.position
            placed.add(piece.index)

    for piece in pieces:
        adopt(piece, piece.before, max)
    for piece in reversed(pieces):
        adopt(piece, readers[piece.index], min)
    for piece in pieces:
        if piece.index in placed:
            continue
        if order is None:
            piece.position = float(piece.index) if piece.before else _START
        else:
            piece.position = max((pieces[p].position for p in piece.before), default=_START)
    for piece in reversed(pieces):
        # A constant is made just before its first reader, but only once if microbatches read it (zeros, indices).
        following = [pieces[r] for r in readers[piece.index]]
        if following and not piece.node.inputs and all(r.node.call is None for r in following):
            piece.position = min(r.position for r in following)


def _scheduled_edges(pieces: Sequence[_Piece], order: Order) -> list[_Barrier]:
    """Return the pieces that must run before others, by the schedule: each mesh runs its tasks one after another."""
    of_task: dict[Task, list[int]] = {}
    for piece in pieces:
        if piece.node.computation is not None and piece.key.task is not None:
            of_task.setdefault(piece.key.task, []).append(piece.index)
    edges: list[_Barrier] = []
    for tasks in order.tasks.values():
        present = [task for task in tasks if task in of_task]
        edges += [(of_task[a], of_task[b], f"{a!r} before {b!r}") for a, b in itertools.pairwise(present)]
    return edges


def _sort(pieces: Sequence[_Piece], barriers: Sequence[_Barrier], schedule: str) -> list[_Piece]:
    """Sort the pieces into one order that agrees with data and schedule; of those that are ready, the earliest goes."""
    count = len(pieces)
    after: list[list[int]] = [[] for _ in range(count + len(barriers))]
    waiting = [0] * (count + len(barriers))
    for piece in pieces:
        for p in piece.before:
            after[p].append(piece.index)
            waiting[piece.index] += 1
    for number, (first, second, _) in enumerate(barriers, count):
        for p in first:
            after[p].append(number)
        for s in second:
            after[number].append(s)
            waiting[s] += 1
        waiting[number] = len(first)
    ready = [(piece.position, piece.index) for piece in pieces if not waiting[piece.index]]
    heapq.heapify(ready)
    sorted_pieces: list[_Piece] = []
    while ready:
        _, index = heapq.heappop(ready)
        if index < count:
            sorted_pieces.append(pieces[index])
        for reader in after[index]:
            waiting[reader] -= 1
            if not waiting[reader]:
                # A barrier opens before anything else runs.
                heapq.heappush(ready, (pieces[reader].position if reader < count else -math.inf, reader))
    if len(sorted_pieces) < count:
        done = {p.index for p in sorted_pieces}
        raise _stuck(pieces, done, barriers, schedule)
    return sorted_pieces


def _stuck(pieces: Sequence[_Piece], done: set[int], barriers: Sequence[_Barrier], schedule: str) -> ScheduleError:
    blocked = [what for first, second, what in barriers if not done.issuperset(first) and not done.issuperset(second)]
    names = [str(p.node.origin) for p in pieces if p.index not in done and p.node.origin is not None]
    return ScheduleError(
        f"the program cannot run by {schedule}: its computations wait for each other in a circle. Waiting: "
        f"{', '.join(dict.fromkeys(names[:8]))}; wanted: {'; '.join(blocked[:4])}. "
        "If a computation of an earlier stage reads what a later stage makes, assign both to one stage; else change "
        "the schedule."
    )


def _join(order: Sequence[_Piece], fused: frozenset[Task]) -> list[Fragment]:
    """Join pieces that follow each other on a mesh, as long as no data goes out and comes back in between."""
    fragments: list[Fragment] = []
    ancestors: list[int] = []  # of each fragment, as bits
    open_: dict[int, int] = {}
    home: dict[int, int] = {}
    for piece in order:
        before = {home[p] for p in piece.before}
        current = open_.get(piece.rank)
        joins = current is not None and _compatible(fragments[current].key, piece.key, fused)
        if current is not None and joins:
            joins = not any(f != current and ancestors[f] >> current & 1 for f in before)
        if current is None or not joins:
            fragments.append(Fragment(piece.key))
            ancestors.append(0 if current is None else ancestors[current] | 1 << current)
            current = open_[piece.rank] = len(fragments) - 1
        elif fragments[current].key.stage is None:
            fragments[current].key = piece.key
        fragments[current].nodes.append(piece.node)
        home[piece.index] = current
        _add_ancestors(ancestors, current, before)
    return _sorted(fragments, ancestors)


def _compatible(key: Key, other: Key, fused: frozenset[Task]) -> bool:
    if key == other:
        return True
    if key.call is not None and (key.stage, key.call) == (other.stage, other.call):
        return key.task in fused and other.task in fused
    # Outside microbatches, all consecutive work of one mesh is one program.
    return key.call is None and other.call is None


def _add_ancestors(ancestors: list[int], fragment: int, before: set[int]) -> None:
    more = 0
    for f in before:
        if f != fragment:
            more |= ancestors[f] | 1 << f
    if more | ancestors[fragment] == ancestors[fragment]:
        return
    ancestors[fragment] |= more
    for other in range(len(ancestors)):
        if ancestors[other] >> fragment & 1:
            ancestors[other] |= ancestors[fragment]


def _sorted(fragments: Sequence[Fragment], ancestors: Sequence[int]) -> list[Fragment]:
    """Sort the fragments: each after all of its ancestors, else in the order in which they were begun."""
    done = 0
    found: list[Fragment] = []
    waiting = list(range(len(fragments)))
    while waiting:
        ready = next((k for k, number in enumerate(waiting) if not ancestors[number] & ~done), None)
        if ready is None:
            raise ScheduleError("fragments wait for each other in a circle; please report this program.")
        number = waiting.pop(ready)
        done |= 1 << number
        found.append(fragments[number])
    return found
