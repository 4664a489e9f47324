"""Compare a whole step of the trainer with the same step by Flax and Optax alone, which shares nothing with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.tracing.ir import everywhere
from jaxpp_flax.trainers import TrainState
from jaxpp_flax.verify.classes import Case, classify
from jaxpp_flax.verify.comparison import row_of
from jaxpp_flax.verify.reference.plain_step import LossFacts, PlainPartFailed, PlainStep
from jaxpp_flax.verify.report import Row
from jaxpp_flax.verify.rounding import FACTOR, is_float, moved, on_host, spread, unit_of, wide
from jaxpp_flax.verify.runs.pieces import rounding_of
from jaxpp_flax.verify.runs.points import Kind, Point

__all__ = ["StepResults", "WholeStep", "compare_whole"]

# Choices (arg-max, levels of int8) need a larger move than one unit of rounding until some of them change in a model
# of a few numbers. A fault of a step's own functions is larger than what this hides.
_MOVE_OF_CHOICES = 2.0**-12
# Beside the state: moved parameters, gradients, the new state, and half as much again for what is computed.
_STATES_IN_MEMORY = 4


@dataclass(frozen=True)
class WholeStep:
    """What a comparison shows.

    Args:
      rows: a row for each array.
      notes: what a reader must know beside, in sentences.
      form: how the plain step saw the batch; empty if it could not run.
      uncompared: why nothing was compared; empty if something was.
    """

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    form: str = ""
    uncompared: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> WholeStep:
        """Make one of what JSON makes of its fields."""
        rows = [Row(**{**row, "index": tuple(row["index"])}) for row in fields["rows"]]
        return cls(rows, fields["notes"], fields["form"], fields["uncompared"])


@dataclass(frozen=True, kw_only=True)
class StepResults:
    """What the trainer's step made, on the host: sums of gradients, metrics and the new state, by their paths."""

    gradients: Mapping[str, Any]
    metrics: Mapping[str, Any]
    state: Mapping[str, Any]

    def points(self) -> dict[Point, Any]:
        """Return all arrays by their points."""
        return _points(self.gradients, self.metrics, self.state)


def _points(gradients: Mapping[str, Any], metrics: Mapping[str, Any], state: Mapping[str, Any]) -> dict[Point, Any]:
    kinds: tuple[tuple[Kind, Mapping[str, Any]], ...] = ("gradient", gradients), ("metric", metrics), ("state", state)
    return {Point(kind, name): array for kind, of in kinds for name, array in of.items()}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A plain step on a state and a batch, in one of its forms."""

    step: PlainStep
    state: TrainState
    batch: Any
    facts: LossFacts
    devices: Sequence[Any]
    num_microbatches: int
    num_shards: int
    process: int

    def made(self, parts: int, *, move: float = 0.0, seed: int = 0) -> dict[Point, Any]:
        """Return what the step makes of the batch in so many parts; `move` moves what the loss reads, relatively."""
        seen = (self.state.params, self.state.model_state), self.batch
        leaves, tree = jax.tree.flatten(seen)
        if move:
            leaves = moved(dict(enumerate(leaves)), move, seed).values()
        model, batch = jax.tree.unflatten(tree, leaves)
        of_parts = [_placed(part, self.devices) for part in cut_batch(batch, parts)]
        state, seen = _placed((self.state, model), self.devices)
        found = self.step(state, seen, of_parts, self.num_microbatches, self._anew if parts > 1 else ())
        gradients, state = (
            {path: on_host(leaf) for path, leaf in flatten(tree)[0].items()} for tree in (found.gradients, found.state)
        )
        return _points(gradients, {name: on_host(of) for name, of in found.metrics.items()}, state)

    @cached_property
    def _anew(self) -> tuple[int, ...]:
        """The untrained leaves that begin in each microbatch with their values before the step."""
        if not self.facts.writes:
            return ()
        parts = [_placed(part, self.devices) for part in cut_batch(self.batch, self.num_microbatches)]
        return self.step.begins_anew(_placed(self.state, self.devices), parts)

    def rows(self, parts: int, actual: Mapping[Point, Any], *, has_choices: bool) -> list[Row]:
        """Return a row for each array that both have."""
        # A float8 stands beside a scale, as a level does: a move by its rounding, 1/4, would explain any difference.
        equations = list(everywhere(self.facts.graph))
        unit = rounding_of(equations, bytes_of_levels=1)
        has_choices |= rounding_of(equations) != unit
        plain = self.made(parts)
        others = [self.made(parts, move=unit, seed=seed) for seed in range(2)]
        found = list(self._compared(plain, actual, others))
        if has_choices and not all(row.agrees for row in found):
            others += [self.made(parts, move=max(unit, _MOVE_OF_CHOICES), seed=seed) for seed in range(2, 5)]
            found = list(self._compared(plain, actual, others))
        return found

    def _compared(
        self, plain: Mapping[Point, Any], actual: Mapping[Point, Any], others: Sequence[Mapping[Point, Any]]
    ) -> Iterator[Row]:
        before = flatten(self.state)[0]
        for point in (point for point in plain if point in actual):
            expected, found = plain[point], actual[point]
            unit = unit_of(expected)
            allowed = FACTOR * max(spread(expected, [other[point] for other in others]), unit)
            row = replace(row_of(point, expected, found, unit, allowed, self.process), is_whole=True)
            if not row.agrees:
                case = Case(
                    expected=wide(expected),
                    actual=wide(found),
                    allowed=allowed,
                    num_microbatches=self.num_microbatches,
                    num_shards=self.num_shards,
                    before=wide(before[point.leaf]) if point.kind == "state" else None,
                    dtype=str(expected.dtype),
                    is_exact=not is_float(expected),
                )
                row = replace(row, likely=classify(case))
            yield row


def compare_whole(
    step: PlainStep,
    state: TrainState,
    batch: Any,
    actual: StepResults,
    *,
    num_microbatches: int,
    num_shards: int,
    devices: Sequence[Any],
    has_choices: bool,
    is_told: bool,
    is_told_of_states: bool,
) -> WholeStep:
    """Compare what the trainer's step made with what a plain step makes of the whole batch.

    The plain step takes the whole batch at once. If its loss draws random numbers, has a loss scale, or writes
    variables of which the trainer has warned, it takes one microbatch after another, with their keys, and adds up the
    gradients.

    Args:
      step: the plain step.
      state, batch: before the step, on the host.
      actual: what the trainer's step made.
      num_microbatches, num_shards: for the parts of the batch, and for the class of a difference.
      devices: this process's devices; the step runs on the first one, or divided over all if one is too small.
      has_choices: rounding may change a choice in the loss.
      is_told: the trainer has told its user that the loss is no mean over equally weighted examples.
      is_told_of_states: it has told its user that the loss leaves other variables than a call with the whole batch.
    """
    batch = jax.tree.map(_of_jax, batch)
    part = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), cut_batch(batch, num_microbatches)[0]
    )
    with context_mesh(None):
        devices = _with_memory_for(state, devices)
        if not devices:
            return WholeStep(uncompared="this process lacks the memory for the whole state")
        with jax.default_device(devices[0]):
            try:
                facts = step.facts(state, part)
            except Exception as error:  # the user's code runs here in another way than in the trainer
                return WholeStep(uncompared=_reason(error))
            run = _Run(
                step=step, state=state, batch=batch, facts=facts, devices=devices, num_microbatches=num_microbatches,
                num_shards=num_shards, process=devices[0].process_index,
            )  # fmt: skip
            takes_parts = _takes_parts(step, state, facts) or (facts.writes and is_told_of_states)
            return _best_form(run, actual.points(), takes_parts, has_choices, is_told)


def _takes_parts(step: PlainStep, state: TrainState, facts: LossFacts) -> bool:
    """Return True if the microbatches, one after another, make something else than the whole batch, by intention."""
    summed = step.update.precision.summed
    narrows = summed is not None and any(of.dtype.itemsize > summed.itemsize for of in jax.tree.leaves(state.params))
    return facts.is_random or narrows or step.update.scale(state) is not None


def _best_form(
    run: _Run, actual: Mapping[Point, Any], takes_parts: bool, has_choices: bool, is_told: bool
) -> WholeStep:
    """Compare with the whole batch at once; if they differ, or cannot be compared, with one part after another."""
    count, notes, whole = run.num_microbatches, list[str](), list[Row]()
    if not takes_parts or count == 1:
        try:
            whole = run.rows(1, actual, has_choices=has_choices)
        except Exception as error:  # a model may have the size of a microbatch written into it
            notes.append(f"The plain step does not take the whole batch at once: {_reason(error)}.")
        if whole and (count == 1 or all(row.agrees for row in whole)):
            return WholeStep(whole, notes, _AT_ONCE)
    try:
        rows = run.rows(count, actual, has_choices=has_choices)
    except Exception as error:  # as above
        return WholeStep(whole, notes, _AT_ONCE) if whole else WholeStep(uncompared=_reason(error))
    # Metrics are documented as means over the microbatches.
    wrong = [row for row in whole if not row.agrees and (row.kind != "metric" or row.leaf == "loss")]
    written = [row for row in wrong if row.kind == "state" and row.leaf.startswith("model_state/")]
    if not wrong or not all(row.agrees for row in rows):
        return WholeStep(rows, notes, _ONE_BY_ONE)
    if len(written) == len(wrong):
        return WholeStep(rows, [*notes, _OTHER_STATE], _ONE_BY_ONE)
    if is_told:
        return WholeStep(rows, [*notes, _NO_MEAN], _ONE_BY_ONE)
    return WholeStep([replace(row, likely=_OTHER_LOSS) if row in wrong else row for row in whole], notes, _AT_ONCE)


_AT_ONCE = "the whole batch at once"
_ONE_BY_ONE = "one microbatch after another"
_NO_MEAN = (
    "The gradients are those of gradient accumulation, and not those of the whole batch at once: the loss is no mean "
    "over equally weighted examples, as the trainer has warned."
)
_OTHER_STATE = (
    "The variables that the loss writes hold what its microbatches wrote, one after another: a call with the whole "
    "batch writes other values."
)
_OTHER_LOSS = (
    "the loss of the whole batch is not the mean over its microbatches, as a mean loss is; return (loss_sum, weight)"
)


def _reason(error: Exception) -> str:
    """Return the part of the plain step that failed, if known, and the first line of its error."""
    part = f"{error.part} of the plain step failed with " if isinstance(error, PlainPartFailed) else ""
    error = error.error if isinstance(error, PlainPartFailed) else error
    lines = str(error).strip().splitlines() or [""]
    return f"{part}{type(error).__name__}: {lines[0][:200].rstrip('.')}"


def cut_batch(batch: Any, parts: int) -> list[Any]:
    """Return equal parts of a batch, one after another; a scalar is the same in each.

    Example:
      >>> [part["x"].tolist() for part in cut_batch({"x": np.arange(4), "rate": np.float32(2)}, 2)]
      [[0, 1], [2, 3]]
    """

    def part(leaf: Any, number: int) -> Any:
        if not leaf.shape:
            return leaf
        size = leaf.shape[0] // parts
        return leaf[number * size : (number + 1) * size]

    return [jax.tree.map(lambda leaf, number=number: part(leaf, number), batch) for number in range(parts)]


def _of_jax(leaf: Any) -> Any:
    """Return an array of the host in the type that JAX gives it: float32 for float64, unless x64 is enabled."""
    return leaf if is_key(leaf) else np.asarray(leaf, jnp.result_type(leaf))


def _with_memory_for(state: TrainState, devices: Sequence[Any]) -> Sequence[Any]:
    """Return the first device, if its memory is large enough for the plain step; or all devices; or none."""
    needed = _STATES_IN_MEMORY * sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    choices = (devices[:1], devices)
    fits = (of for of in choices if shortage(dict.fromkeys(of, needed // len(of))) is None)
    return next(fits, [])


def _placed(tree: Any, devices: Sequence[Any]) -> Any:
    """Put a tree on one device; on several, each leaf is divided along its first axis that they divide evenly."""
    if len(devices) == 1:
        return jax.device_put(tree, devices[0])
    mesh = Mesh(np.array(devices), ("devices",))

    def place(leaf: Any) -> NamedSharding:
        axis = next((i for i, size in enumerate(np.shape(leaf)) if size and size % len(devices) == 0), None)
        return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "devices"))

    return jax.device_put(tree, jax.tree.map(place, tree))
