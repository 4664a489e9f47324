"""A traced loss: what it uses, and how it and the states that it writes grow with the number of examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.trainers.loss.example_counts import divided_by
from jaxpp_flax.trainers.loss.growth import EXAMPLES, Growth, is_same, literal_growth, read
from jaxpp_flax.trainers.loss.growth_walk import compare_growth
from jaxpp_flax.trainers.loss.joined_examples import Followed, follow_examples
from jaxpp_flax.trainers.loss.microbatch_state import INDEX, moved_by_microbatches, read_states

__all__ = ["PARAMETERS", "LossGraph", "LossGrowth", "used_inputs"]

PARAMETERS = "parameters"
"""The name of the inputs that are trained."""
_CONSTANT = "constant"


@dataclass(frozen=True, kw_only=True)
class LossGraph:
    """A loss function that was traced for microbatches of one size.

    The graph has the inputs `(state, parameters, step, index of the microbatch, batch)` after its constants, and the
    outputs `(state, loss, weights, parameters)`, with state and parameters after the call. The weights are that of the
    loss, if it is a pair, and then those of the metrics that are pairs. An evaluation changes nothing: in the place of
    the parameters it has the metrics.
    """

    graph: Graph
    constants: Sequence[Any]
    num_states: int
    num_parameters: int
    is_pair: bool
    weighed: tuple[str, ...]  # the metrics that are pairs
    metrics: tuple[str, ...]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The inputs after the constants."""
        return self.graph.inputs[len(self.constants) :]

    @property
    def batch(self) -> tuple[Value, ...]:
        return self.inputs[self.num_states + self.num_parameters + 2 :]

    @property
    def weights(self) -> slice:
        """The positions of the outputs that are weights."""
        first = self.num_states + 1
        return slice(first, first + self.is_pair + len(self.weighed))

    @cached_property
    def is_separable(self) -> bool:
        """Whether loss and metrics of an evaluation are surely means, or sums with their weights, of single examples.

        Then each example may be repeated, and the batch be cut, if each microbatch counts by its share of the batch.
        """
        found, size, first = self.followed, self.num_examples, self.num_states

        def is_mean(i: int) -> bool:
            count = found.counts[i]
            return found.apart[i] and (count is None or (count.averaged and count.examples < 1.5))

        def is_sum(i: int) -> bool:
            count, number = found.counts[i], found.numbers[i]
            if count is None:
                return number is not None and number % size == 0  # made of the size of the batch
            return found.apart[i] and not found.shifted[i] and not count.averaged and round(count.examples) == size

        weights = dict(zip((None,) * self.is_pair + self.weighed, range(first + 1, self.weights.stop), strict=True))
        values = {None: first, **dict(zip(self.metrics, range(self.weights.stop, len(found.apart)), strict=True))}
        return size > 1 and all(
            is_sum(i) and is_sum(weights[name]) if name in weights else is_mean(i) for name, i in values.items()
        )

    @property
    def num_examples(self) -> int:
        return next(leaf.aval.shape[0] for leaf in self.batch if leaf.aval.shape)

    @cached_property
    def followed(self) -> Followed:
        """What becomes of the examples of the microbatch."""
        examples = [leaf for leaf in self.batch if leaf.aval.shape]
        constants = dict(zip(self.graph.inputs, self.constants, strict=False))
        return follow_examples(self.graph, examples, self.num_examples, constants)

    def used_by(self, output: int) -> list[bool]:
        """Return which inputs after the constants an output depends on."""
        return used_inputs(self.graph, [i == output for i in range(len(self.graph.outputs))])[len(self.constants) :]

    @property
    def is_numbered(self) -> bool:
        """Whether an output depends on the number of the microbatch."""
        outputs = [True] * len(self.graph.outputs)
        return used_inputs(self.graph, outputs)[len(self.constants) + self.num_states + self.num_parameters + 1]

    def used_parameters(self, output: int) -> list[bool]:
        """Return which parameters an output depends on."""
        return self.used_by(output)[self.num_states :][: self.num_parameters]


@dataclass(frozen=True, kw_only=True)
class LossGrowth:
    """How a loss and the states that it writes grow with the number of examples."""

    weights: list[Growth]  # as in `LossGraph`
    fixed: list[bool]  # whether a weight is no number of examples: it does not grow with them, or is a mean over them
    unfit: bool  # the weight of the loss is a mean of data that the loss does not multiply its terms with
    divided: str | None  # the place where the loss divides by a sum over the examples; None for a pair
    mixed: str | None  # the place of another operation that joins examples, such as a product of two of them
    text: str | None  # a sentence if the loss does not grow as a mean does, or not as its weight
    moved: list[int]  # states whose value after all microbatches is not that of one call
    of_examples: list[int]  # states with a row for each example, which the loss reads

    @classmethod
    def of(cls, small: LossGraph, large: LossGraph | None, tagged: set[int]) -> LossGrowth:
        """Return the growth of a loss that was traced for some examples and, if it can be, for twice as many.

        `tagged` are the states that microbatches pass on and change.
        """
        if large is not None and len(small.constants) != len(large.constants):
            large = None
        inputs = _growths_of_inputs(small, large, tagged)
        compared = compare_growth(small.graph, None if large is None else large.graph, inputs)
        found, followed, position = compared.outputs, small.followed, small.num_states
        total, weights = read(found[position]), [read(one) for one in found[small.weights]]
        states = {i: found[i] for i in tagged}
        is_read = read_states(states, [total, *weights[: small.is_pair]])
        has_rows = {
            i for i in tagged if followed.dims[i] is not None or (large is not None and _differ(small, large, i))
        }
        mixed = followed.joins[position].mixed
        divided = followed.joins[position].divided or (None if mixed else total.divided)
        text = _text_of(total, weights[0] if small.is_pair else None) if compared.is_known else None
        told = compared.is_known and not compared.selects and None not in [g.factor for g in (total, *weights)]
        is_fixed = [compared.is_known and not compared.selects and is_same(g.factor, 1) for g in weights]
        averaged = [bool(count and count.averaged and count.examples < 1.5) for count in followed.counts[small.weights]]
        return cls(
            weights=weights,
            fixed=[any(pair) for pair in zip(is_fixed, averaged, strict=True)],
            unfit=small.is_pair and averaged[0] and not _weighs(small, inputs, total, weights[0]),
            divided=None if small.is_pair else divided,  # a weight may make up for a quotient in the sum
            mixed=mixed,
            text=text if text or told else _text_of_counts(small),
            moved=moved_by_microbatches(states, followed.joins, is_read, compared=compared.is_known),
            of_examples=sorted(has_rows & is_read),
        )


def _growths_of_inputs(small: LossGraph, large: LossGraph | None, tagged: set[int]) -> list[Growth]:
    """Return the growths of the inputs: each has the name of what it is."""

    def named(name: str) -> Growth:
        return Growth(reads=frozenset([name]))

    pairs = zip(small.constants, (small if large is None else large).constants, strict=True)
    captured = [literal_growth(*pair) for pair in pairs]
    states = [Growth(factor=0.0, onto=(i, "add")) if i in tagged else named(_CONSTANT) for i in range(small.num_states)]
    batch = [named(EXAMPLES if leaf.aval.shape else _CONSTANT) for leaf in small.batch]
    return [*captured, *states, *[named(PARAMETERS)] * small.num_parameters, named(_CONSTANT), named(INDEX), *batch]


def _weighs(loss: LossGraph, inputs: Sequence[Growth], total: Growth, weight: Growth) -> bool:
    """Return whether the terms of a loss are multiplied by what its weight is the mean of, as by a mask."""
    if weight.chosen and total.chosen:
        return True
    used = [False] * len(loss.constants) + loss.used_by(loss.num_states + 1)
    batch = {*loss.batch}
    known = zip(loss.graph.inputs, inputs, used, strict=True)
    without = [replace(g, factor=0.0) if is_used and value in batch else g for value, g, is_used in known]
    return compare_growth(loss.graph, None, without).outputs[loss.num_states].is_zero


def _differ(small: LossGraph, large: LossGraph, output: int) -> bool:
    return small.graph.outputs[output].aval.shape != large.graph.outputs[output].aval.shape


def _text_of(total: Growth, weight: Growth | None) -> str | None:
    """Say how a loss grows with the number of examples; None if it is a mean, or nothing is known."""
    for name, growth in (("It", total), ("Its weight", weight)):
        if growth is not None and growth.uneven:
            return (
                f"{name} adds terms that grow differently with the number of examples, such as a mean and a sum: "
                f"{growth.place}. Make each of them a mean."
            )
    expected = 1.0 if weight is None else weight.factor
    if not total.factor or not expected or is_same(total.factor, expected):
        return None
    where = f" ({total.place})" if total.place else ""
    if weight is None and total.factor < 1:
        return (
            f"With twice as many examples it is {total.factor:.3g} times as large{where}: it is divided by the number "
            "of examples once too often. Take the `.mean()` alone."
        )
    if weight is None:
        return (
            f"With twice as many examples it is {total.factor:.3g} times as large{where}, as a sum is; a mean is not. "
            "Take the `.mean()`, divide by the number of examples in the microbatch (its shape), or return "
            "(loss_sum, weight)."
        )
    return (
        f"With twice as many examples its loss_sum is {total.factor:.3g} times as large{where}, its weight "
        f"{expected:.3g} times. Return as weight the number of examples or tokens of the microbatch that loss_sum adds."
    )


def _text_of_counts(loss: LossGraph) -> str | None:
    """Say, from a trace for one size, that a loss adds up the examples; None if it does not, or nothing is known."""
    position, size = loss.num_states, loss.num_examples
    total = loss.followed.counts[position]
    if total is None or size < 2:
        return None
    expected = 1.0
    if loss.is_pair:
        weight, number = loss.followed.counts[position + 1], loss.followed.numbers[position + 1]
        if weight is not None and (weight.averaged or weight.examples > 1.5):
            expected = weight.examples
        elif weight is not None or number is None:
            return None  # nothing is known of the weight
        elif number == size and total.averaged:
            expected = float(size)
        elif number:
            total = divided_by(total, abs(number), size)
    where = f" ({total.place})" if total.place else ""
    if total.examples > 1.5 * expected:
        return (
            f"It adds up the values of the examples{where}, and no mean is made of this sum. Take the `.mean()`, "
            "divide by the number of examples in the microbatch (its shape), or return (loss_sum, weight)."
        )
    if total.averaged and total.examples < 1.5 < expected:
        return (
            "Its loss_sum is a mean over the examples, and its weight counts them. Return as loss_sum what the weight "
            "counts, added up, or the mean alone."
        )
    return None


def used_inputs(graph: Graph, wanted: Sequence[bool]) -> list[bool]:
    """Mark the inputs that the wanted outputs depend on. Calls are entered; loops and conditions use all inputs."""
    needed = {atom for atom, want in zip(graph.outputs, wanted, strict=True) if want and isinstance(atom, Value)}
    for equation in reversed(graph.equations):
        results = [value in needed for value in equation.outputs]
        if not any(results):
            continue
        used = [True] * len(equation.inputs)
        if (called := facts_of(equation.primitive).body_in(equation.params)) is not None:
            body, consts = from_jaxpr(called)
            used = used_inputs(body, results)[len(consts) :]
        needed.update(a for a, is_used in zip(equation.inputs, used, strict=True) if is_used and isinstance(a, Value))
    return [value in needed for value in graph.inputs]
