"""Find gradients that are sums over the examples of a batch: linear in contractions over the batch dimension.

`linearity` lists the linear operations and their dtypes. The search also looks into scans over layers: the body
decides whether the gradients that a scan stacks or adds up qualify. The search looks into shard_maps too: a gradient
qualifies if the last operation of the body sums it over the data axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, inside_scan
from jaxpp_flax.engine.analyses.data_flow import ancestors, use_counts
from jaxpp_flax.engine.analyses.inner_bodies import Scan, open_scan, summed_in_shard_map
from jaxpp_flax.engine.analyses.linearity import accumulates, kept_after, summed_in
from jaxpp_flax.engine.tracing.inline import body_of
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, producers, values
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.engine.tracing.primitives import Batch, Operands, facts_of

__all__ = ["Chain", "ChainFinder"]


@dataclass(frozen=True)
class Chain:
    """The equations that lead from the contractions over the batch to one gradient, in order.

    `scanned` holds the results of scans and shard_maps that are partial sums themselves.
    """

    value: Value
    equations: tuple[Equation, ...]
    axes: Any
    split: frozenset[Value]
    scanned: frozenset[Value]


@dataclass
class _Found:
    """The results of a search for a chain, so far."""

    equations: set[Equation] = field(default_factory=set)
    axes: set[Any] = field(default_factory=set)
    split: set[Value] = field(default_factory=set)
    scanned: set[Value] = field(default_factory=set)


@dataclass
class _OpenScan:
    """A scan, opened; `chains` gives, by position, the chains that make up each result."""

    scan: Scan
    finder: ChainFinder
    chains: dict[int, tuple[Chain, ...] | None] = field(default_factory=dict)


class ChainFinder:
    """Finds chains in a graph with plain calls inlined, and in its scans and shard_maps.

    `dims` gives the batch dimensions of its values; `size` returns the number of shards over given mesh axes.
    """

    def __init__(self, body: Graph, dims: Mapping[Value, BatchDim], size: Callable[[Any], int]) -> None:
        self.body, self.dims, self.size = body, dims, size
        self.scans: dict[Equation, _OpenScan] = {}
        self.mapped: dict[Equation, Graph] = {}  # bodies of shard_maps
        self.producer = producers(body.equations)
        self.unmarked = producers(e for e in body.equations if e.primitive is not marker_p)
        self.order = {e: i for i, e in enumerate(body.equations)}
        self.users = use_counts(body.equations, body.outputs)

    def chain(self, value: Value) -> Chain | None:
        """Return the chain from contractions over the batch to a value; None if the value is not linear in them."""
        found = _Found()
        if self._visit(value, found) is None or len(found.axes) != 1:
            return None
        ordered = sorted(found.equations, key=self.order.__getitem__)
        return Chain(value, tuple(ordered), found.axes.pop(), frozenset(found.split), frozenset(found.scanned))

    def _maker(self, atom: Atom) -> Equation | None:
        return self.producer.get(atom) if isinstance(atom, Value) else None

    def _tagged(self, equation: Equation) -> list[Value]:
        """Return the operands that have a batch dimension."""
        return [v for v in values(equation.inputs) if v in self.dims]

    def _visit(self, value: Atom, found: _Found) -> Any:
        """Return the dtype that holds the shards' parts of a sum over the batch; None if `value` is no such sum.

        Collect the equations between the contractions over the batch and the value.
        """
        equation = self._maker(value)
        if not isinstance(value, Value) or equation is None or self.users.get(value, 0) != 1 or value in self.dims:
            return None
        batch = facts_of(equation.primitive).batch
        if batch is Batch.SHARD_MAP:
            axes = self.summed_by_shard_map(equation, equation.outputs.index(value))
            found.axes.add(axes)
            found.scanned.add(value)
            return value.aval.dtype if axes is not None and accumulates(value.aval.dtype) else None
        if batch is Batch.SCAN:
            chains = self.scan_chains(equation, equation.outputs.index(value))
            found.axes.update(chain.axes for chain in chains or ())
            found.scanned.add(value)
            return value.aval.dtype if chains is not None else None
        tagged = self._tagged(equation)
        if tagged:
            kept = summed_in(equation) if self._contracts_batch(equation, tagged) else None
            found.split.update(tagged)
            found.axes.update(self.dims[v][1] for v in tagged)
        else:
            kept = self._passed_on(equation, found)
        found.equations.add(equation)
        return kept

    def _passed_on(self, equation: Equation, found: _Found) -> Any:
        """Return the dtype that holds the parts after a linear operation on sums over the batch."""
        rule = facts_of(equation.primitive).linear
        if rule is None:
            return None
        summands, others = equation.inputs[:1], equation.inputs[1:]
        if rule.operands is Operands.EVERY:
            summands, others = equation.inputs, ()
        elif rule.operands is Operands.EITHER and self._depends(others[0]):
            summands, others = others, summands
        if any(self._depends(a) for a in others):
            return None
        if rule.operands is Operands.PADDED and not all(self._is_zero(a) for a in others):
            return None
        kept = [self._visit(a, found) for a in summands]
        if any(dtype is None for dtype in kept):
            return None
        return kept_after(equation, rule.parts, kept[0])

    def scan_chains(self, equation: Equation, position: int) -> tuple[Chain, ...] | None:
        """Return the chains of a scan's result that is stacked, or added up from zero in the carry; else None."""
        if equation.effects:
            return None
        opened = self.scans.get(equation)
        if opened is None:
            scan = open_scan(equation)
            at = {i: self.dims[a] for i, a in enumerate(equation.inputs) if isinstance(a, Value) and a in self.dims}
            finder = ChainFinder(scan.body, inside_scan(scan, at, self.size), self.size)
            opened = self.scans[equation] = _OpenScan(scan, finder)
        if position not in opened.chains:
            summands: list[Atom] = [opened.scan.body.outputs[position]]
            if position < opened.scan.num_carry:
                start = equation.inputs[opened.scan.num_consts + position]
                summands = opened.finder.added_to(opened.scan.carry_in[position], summands[0])
                summands = summands if self._is_zero(start) and accumulates(start.aval.dtype) else []
            chains = [opened.finder.chain(s) if isinstance(s, Value) else None for s in summands]
            found = tuple(chain for chain in chains if chain is not None)
            opened.chains[position] = found if found and len(found) == len(chains) else None
        return opened.chains[position]

    def summed_by_shard_map(self, equation: Equation, position: int) -> Any:
        """Return the batch axes over which a shard_map itself sums one of its results, or None."""
        axes = {self.dims[v][1] for v in self._tagged(equation)}
        if equation.effects or len(axes) != 1:
            return None
        if equation not in self.mapped:
            self.mapped[equation] = body_of(equation)
        (over,) = axes
        return over if summed_in_shard_map(equation, self.mapped[equation], position, over) else None

    def added_to(self, before: Value, after: Atom) -> list[Atom]:
        """Return the summands that the body adds to a carry in each step; none if it uses the carry in another way."""
        summands: list[Atom] = []
        while after is not before:
            made = self._maker(after)
            if made is None or not facts_of(made.primitive).adds or self.users.get(made.outputs[0]) != 1:
                return []
            first, second = made.inputs
            if not self._descends(first, before):
                first, second = second, first
            summands.append(second)
            after = first
        return summands if self.users.get(before) == 1 else []

    def _descends(self, atom: Atom, from_value: Value) -> bool:
        """Return whether a sum has `from_value` among its summands."""
        while atom is not from_value:
            made = self._maker(atom)
            if made is None or not facts_of(made.primitive).adds:
                return False
            if self._descends(made.inputs[1], from_value):
                return True
            atom = made.inputs[0]
        return True

    def _depends(self, atom: Atom) -> bool:
        """Return whether an operand comes, through untagged values, from a contraction over the batch."""
        return any(value in self.dims for value in ancestors([atom], self.unmarked))

    def _contracts_batch(self, equation: Equation, tagged: Sequence[Value]) -> bool:
        facts = facts_of(equation.primitive)
        if not facts.summed:
            return False
        if facts.batch is Batch.DOT:
            (lc, rc), _ = equation.params["dimension_numbers"]
            left, right = equation.inputs
            if left not in self.dims or right not in self.dims:
                return False
            a, b = self.dims[left][0], self.dims[right][0]  # type: ignore[index]
            return a in lc and b in rc and tuple(lc).index(a) == tuple(rc).index(b)
        if facts.batch is Batch.REDUCED:
            return self.dims[tagged[0]][0] in equation.params["axes"]
        if facts.batch is Batch.SCATTER:
            operand, indices, updates = equation.inputs
            numbers = equation.params["dimension_numbers"]
            if operand in self.dims or indices not in self.dims or updates not in self.dims:
                return False
            if numbers.operand_batching_dims or numbers.scatter_indices_batching_dims or not self._is_zero(operand):
                return False
            at = self.dims[indices][0]  # type: ignore[index]
            free = [d for d in range(updates.aval.ndim) if d not in numbers.update_window_dims]
            return at < len(free) and free[at] == self.dims[updates][0]  # type: ignore[index]
        return False

    def _is_zero(self, atom: Atom) -> bool:
        """Return whether an operand is a broadcast literal zero: adding copies of it changes no result."""
        if isinstance(atom, Constant):
            return not np.any(np.asarray(atom.value))
        equation = self.producer.get(atom)
        return (
            equation is not None
            and facts_of(equation.primitive).batch is Batch.BROADCAST
            and self._is_zero(equation.inputs[0])
        )
