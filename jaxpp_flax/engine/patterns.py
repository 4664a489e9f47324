"""A step that is placed once for all patterns of the shapes of its microbatches.

A step that takes `StackedMicrobatches` is traced and cut for the shapes of their microbatches. For another list of
microbatches of these shapes, only the program is written again: no equation is traced, and no task is compiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax

from jaxpp_flax.engine.passes.loop.join_shapes import over_microbatches
from jaxpp_flax.engine.passes.loop.loop import LoweredLoop
from jaxpp_flax.engine.passes.place import StepOnRanks
from jaxpp_flax.engine.passes.runner import Choices
from jaxpp_flax.engine.passes.unroll import Rounds
from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches, shape_numbers
from jaxpp_flax.engine.tracing.ir import Value, values
from jaxpp_flax.engine.tracing.reductions import AddOp, LastOp, MaxOp

__all__ = ["PlacedShapes", "StackedCall", "keep_newest"]

# Programs that are kept for one step: each takes memory, and texts make any number of patterns.
MOST_PATTERNS = 128

P = TypeVar("P")


@dataclass(frozen=True, eq=False)
class StackedCall:
    """A call with one `StackedMicrobatches` among its arguments.

    Attributes:
      tree: the tree of `(args, kwargs)`.
      facts: what is known of each leaf: its type, and its place.
      entries: the positions of the leaves of each microbatch, and of each further shape.
      length: the number of microbatches.
      around: the structure of the call around its microbatches, and that of a microbatch.
    """

    tree: Any
    facts: tuple[Hashable, ...]
    entries: tuple[tuple[int, ...], ...]
    length: int
    around: tuple[Hashable, Hashable]

    @classmethod
    def of(cls, tree: Any, facts: Sequence[Hashable]) -> StackedCall | None:
        """Read a call; return None if it has none of them, or several."""
        call = jax.tree_util.tree_unflatten(tree, range(len(facts)))
        nodes = [node for node in jax.tree.leaves(call, is_leaf=_is_stacked) if _is_stacked(node)]
        if len(nodes) != 1:
            return None
        items = nodes[0].items
        entries = [tuple(jax.tree.leaves(entry)) for entry in (*items, *nodes[0].further)]
        around = jax.tree.structure(call, is_leaf=_is_stacked), jax.tree.structure(items[0])
        return cls(tree, tuple(facts), tuple(entries), len(items), around)

    @property
    def kinds(self) -> list[Hashable]:
        """What is known of the leaves of each entry."""
        return [tuple(self.facts[position] for position in entry) for entry in self.entries]

    @property
    def others(self) -> list[int]:
        """The positions of all other leaves."""
        inside = {position for entry in self.entries for position in entry}
        return [position for position in range(len(self.facts)) if position not in inside]

    @property
    def rest(self) -> Hashable:
        """What does not depend on the microbatches."""
        return self.around, tuple(self.facts[position] for position in self.others)

    def prepared_for(self, kinds: Sequence[Any]) -> StackedCall:
        """Return the call with an entry more for each of these kinds that it lacks."""
        own, facts = set(self.kinds), [*self.facts]
        further: list[list[int]] = []
        for kind in kinds:
            if kind not in own:
                further.append([*range(len(facts), len(facts) + len(kind))])
                facts += kind
        call = jax.tree_util.tree_unflatten(self.tree, range(len(self.facts)))

        def extended(node: Any) -> Any:
            if not _is_stacked(node):
                return node
            tree = jax.tree.structure(node.items[0])
            return StackedMicrobatches(node.items, tuple(jax.tree.unflatten(tree, entry) for entry in further))

        order, tree = jax.tree.flatten(jax.tree.map(extended, call, is_leaf=_is_stacked))
        prepared = StackedCall.of(tree, [facts[position] for position in order])
        return self if prepared is None else prepared


def _is_stacked(node: Any) -> bool:
    return isinstance(node, StackedMicrobatches)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacedShapes:
    """A step on ranks for the shapes of a call."""

    step: StepOnRanks
    settings: Choices
    call: StackedCall

    @cached_property
    def rounds(self) -> Rounds:
        """What runs around the loop, and when: the same for all patterns."""
        return Rounds(self.step)

    def serves(self, call: StackedCall) -> bool:
        """Return whether the step can be written for another call that differs in its microbatches alone."""
        loops = self.step.loops
        if not set(call.kinds) <= set(self.call.kinds) or len(loops) != 1 or not loops[0].pattern:
            return False
        (loop,) = loops
        leaves = set(loop.constants[loop.first_leaf :])
        read = {v for e in self.step.equations if not isinstance(e, LoweredLoop) for v in values(e.inputs)}
        # What is stacked, or reduced by an operation of the user's, may depend on the number of microbatches.
        free = all(type(operation) in (AddOp, MaxOp, LastOp) for operation in loop.body.operations)
        return (free or call.length == self.call.length) and leaves <= {*self.step.inputs} - read - {*self.step.outputs}

    def written_for(self, call: StackedCall) -> tuple[StepOnRanks, Choices]:
        """Return the step and its settings for such a call.

        Raises:
          ValueError: if the schedule is for other numbers of microbatches.
        """
        step, settings, own = self.step, self.settings, self.call
        (loop,) = step.loops
        loop.schedule.check(call.length)
        captured = len(step.inputs) - len(own.facts)
        first = dict(reversed([*zip(own.kinds, own.entries, strict=True)]))
        source = dict(zip(call.others, own.others, strict=True))  # the own leaf that is as each leaf of the call
        for kind, entry in zip(call.kinds, call.entries, strict=True):
            source.update(zip(entry, first[kind], strict=True))
        places = [*range(captured), *(captured + source[position] for position in range(len(call.facts)))]
        shared = {*call.others}
        inputs = [
            step.inputs[place] if number < captured or number - captured in shared else Value(step.inputs[place].aval)
            for number, place in enumerate(places)
        ]
        leaves = [inputs[captured + position] for entry in call.entries for position in entry]
        numbers = dict(zip(own.kinds, shape_numbers(own.kinds), strict=True))
        written = over_microbatches(loop, leaves, [numbers[kind] for kind in call.kinds])
        moved = {place: number for number, place in reversed([*enumerate(places)])}
        written = replace(written, like=tuple(None if place is None else moved[place] for place in loop.like))
        equations = tuple(written if equation is loop else equation for equation in step.equations)
        need = {**step.need, **{v: step.need[step.inputs[p]] for v, p in zip(inputs, places, strict=True)}}
        chosen = replace(
            settings,
            donated=tuple(settings.donated[place] for place in places),
            specs=tuple(settings.specs[place] for place in places),
            residuals=settings.residual_plan,
            rounds=self.rounds,
        )
        return replace(step, inputs=tuple(inputs), equations=equations, need=need), chosen


def keep_newest(programs: dict[Any, P], patterns: deque[P], newest: P) -> P:
    """Return the program for a new pattern; the oldest one is forgotten if there are too many.

    Args:
      programs: by key, those of patterns and others.
      patterns: the programs of patterns in the order in which they came.
    """
    patterns.append(newest)
    if len(patterns) > MOST_PATTERNS:
        oldest = patterns.popleft()
        for key in [key for key, program in programs.items() if program is oldest]:
            del programs[key]
    return newest
