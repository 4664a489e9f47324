"""No circular wait: whatever the processes come to in their orders, one of them can go on.

The limits are those of the strictest transport and platform, so a program that passes hangs on none of them:

- a process walks its instructions in one thread, which waits at a receive (NCCL; elsewhere it waits later);
- between two processes, values go in the order of the sender's calls and of the receiver's (`device_put`, NCCL);
- who sends one way waits for a sign that the receiver has come near (`credits.py`);
- a rank's devices run tasks in the order of their launch, and the thread waits to launch one too many;
- a rank of several processes may hold collectives in each task: it runs when all of them have come to it.

Every wait is for one known event, so the events are a graph: processes hang if and only if it has a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["AHEAD", "IN_FLIGHT", "SIGNED", "Action", "Precedence", "circular_wait", "walks_of", "without_twins"]

AHEAD, SIGNED = 4, 2
"""A process has at most four transfers in flight to one that sends nothing back, which signs each second one."""

IN_FLIGHT = 32
"""The computations that XLA's clients queue for each device; the thread that starts one more waits."""


@dataclass(frozen=True, slots=True)
class Action:
    """What waits need to know of an instruction.

    Attributes:
      source, target: the ranks of a transfer; both are the rank of any other instruction.
      reads: the numbers of the instructions that make what it reads.
      is_task: whether it runs a task.
      is_waited_for: whether the thread goes on only when it has ended.
    """

    source: int
    target: int
    reads: tuple[int, ...] = ()
    is_task: bool = False
    is_waited_for: bool = False


class Precedence(NamedTuple):
    """A process walks instruction `first` before `second`; no process: `second` reads what `first` makes."""

    process: int | None
    first: int
    second: int


def walks_of(actions: Sequence[Action], processes: Sequence[frozenset[int]]) -> dict[int, list[int]]:
    """Return the numbers of the instructions that each process walks; `processes` has those of each rank."""
    walks: dict[int, list[int]] = {process: [] for process in sorted(frozenset[int]().union(*processes))}
    for number, action in enumerate(actions):
        for process in processes[action.source] | processes[action.target]:
            walks[process].append(number)
    return walks


def without_twins(processes: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return the processes of each rank, one for all that have the same ranks: they walk alike.

    Example:
      >>> without_twins([frozenset({0, 1}), frozenset({0, 1}), frozenset({2})])
      [frozenset({0}), frozenset({0}), frozenset({2})]
    """
    ranks = {p: tuple(p in owners for owners in processes) for p in frozenset[int]().union(*processes)}
    first = {mine: min(p for p in ranks if ranks[p] == mine) for mine in set(ranks.values())}
    return [frozenset(first[ranks[p]] for p in owners) for owners in processes]


def circular_wait(
    actions: Sequence[Action], processes: Sequence[frozenset[int]], walks: Mapping[int, Sequence[int]]
) -> list[Precedence]:
    """Return a circle of instructions that wait for one another; nothing if processes cannot hang.

    Example:
      >>> sends = [Action(0, 1), Action(0, 1)]
      >>> apart = [frozenset({0}), frozenset({1})]
      >>> circular_wait(sends, apart, {0: [0, 1], 1: [0, 1]})
      []
      >>> circular_wait(sends, apart, {0: [1, 0], 1: [0, 1]})
      [Precedence(process=0, first=1, second=0), Precedence(process=1, first=0, second=1)]
    """
    events = _Events(actions, processes, walks)
    circle = _shortest_circle(events.needs)
    return _merged([Precedence(process, events.of[need], events.of[event]) for event, need, process in circle])


_Need = tuple[int, int | None]  # an event, and the process whose order asks for it; None for what is read


class _Events:
    """For each process and instruction: its thread comes to it; what it reads is there; what it makes is there.

    A task ends in all processes of its rank at once. `needs` has the needs of each event, `of` its instruction.
    """

    def __init__(
        self, actions: Sequence[Action], processes: Sequence[frozenset[int]], walks: Mapping[int, Sequence[int]]
    ) -> None:
        self.needs, self.of = list[list[_Need]](), list[int]()
        self._actions, self._processes = actions, processes
        self._begins, self._ends = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        tasks = dict[int, int]()
        for process, walk in walks.items():
            for number in walk:
                self._begins[process, number] = self._new(number)
                if actions[number].is_task:
                    tasks[number] = self._ends[process, number] = tasks.get(number) or self._new(number)
                elif process in processes[actions[number].target]:
                    self._ends[process, number] = self._new(number)
        for process, walk in walks.items():
            self._walk(process, walk)

    def _new(self, number: int) -> int:
        self.of.append(number)
        self.needs.append([])
        return len(self.needs) - 1

    def _walk(self, process: int, walk: Sequence[int]) -> None:
        """Note what the events of a process need."""
        queues = defaultdict[Hashable, list[int]](list)
        one_way = defaultdict[int, list[int]](list)  # by peers: the sends since the last receive from it
        thread = list[_Need]()
        for number in walk:
            action, begin, waits = self._actions[number], self._begins[process, number], False
            makers = [(self._begins[process, n], None) for n in action.reads if (process, n) in self._begins]
            self.needs[begin] += [*thread, *makers]
            senders, receivers = self._processes[action.source], self._processes[action.target]
            if action.source == action.target:  # each process of a rank does its part
                senders = receivers = frozenset({process})
            ready = begin
            if process in senders:
                ready = self._new(number)
                self.needs[ready] += [(begin, None), *[(self._ends[process, n], None) for n in action.reads]]
            if process in receivers:
                self.needs[self._ends[process, number]].append((ready, None))
            if action.is_task:
                queue = queues[action.source]
                if len(queue) >= IN_FLIGHT:
                    self.needs[begin].append((self._ends[process, queue[-IN_FLIGHT]], process))
                self._follow(process, process, number, queue)
            for receiver in receivers - {process} if process in senders else ():
                self.needs[self._ends[receiver, number]].append((ready, None))
                self._follow(process, receiver, number, queues[process, receiver])
                sends = [] if process in receivers and receiver in senders else one_way[receiver]
                ahead = len(sends) - AHEAD
                if ahead >= 0 and ahead % SIGNED == 0:  # as `Credits` does
                    self.needs[begin].append((self._ends[receiver, sends[ahead + SIGNED - 1]], process))
                sends.append(number)
            for sender in senders - {process} if process in receivers else ():
                self._follow(process, process, number, queues[sender, process])
                one_way[sender].clear()
                waits = True
            thread = [(self._ends[process, number] if waits or action.is_waited_for else begin, process)]

    def _follow(self, process: int, receiver: int, number: int, queue: list[int]) -> None:
        """Let an instruction end in the process `receiver` after those before it in a queue of a process."""
        if queue:
            self.needs[self._ends[receiver, number]].append((self._ends[receiver, queue[-1]], process))
        queue.append(number)


def _shortest_circle(needs: Sequence[Sequence[_Need]]) -> list[tuple[int, int, int | None]]:
    """Return the shortest circle of events, each with its need; nothing if the events have an order."""
    readers: list[list[int]] = [[] for _ in needs]
    missing = [len(each) for each in needs]
    for event, each in enumerate(needs):
        for need, _ in each:
            readers[need].append(event)
    free = [event for event, count in enumerate(missing) if not count]
    for event in free:
        for reader in readers[event]:
            missing[reader] -= 1
            if not missing[reader]:
                free.append(reader)
    stuck = {event: [need for need in needs[event] if missing[need[0]]] for event, count in enumerate(missing) if count}
    return min(filter(None, (_circle_through(event, stuck) for event in stuck)), key=len, default=[])


def _circle_through(start: int, needs: Mapping[int, Sequence[_Need]]) -> list[tuple[int, int, int | None]]:
    """Return a shortest circle through an event; nothing if it waits for a circle, but is not in one."""
    paths: dict[int, list[tuple[int, int, int | None]]] = {start: []}
    reached = [start]
    for event in reached:
        for need, process in needs[event]:
            path = [*paths[event], (event, need, process)]
            if need == start:
                return path
            if need not in paths:
                paths[need] = path
                reached.append(need)
    return []


def _merged(circle: Sequence[Precedence]) -> list[Precedence]:
    """Join what one process walks one after the other; begin with a pair that it walks against the program's order."""
    steps = [step for step in circle if step.first != step.second]
    start = next((i for i, step in enumerate(steps) if step.process != steps[i - 1].process), 0)
    merged: list[Precedence] = []
    for step in (*steps[start:], *steps[:start]):
        if merged and step.process is not None and step.process == merged[-1].process:
            merged[-1] = merged[-1]._replace(first=step.first)
        else:
            merged.append(step)
    start = next((i for i, step in enumerate(merged) if step.process is not None and step.first > step.second), 0)
    return [*merged[start:], *merged[:start]]
