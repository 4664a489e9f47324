"""Run one training step both ways, on the same state, batch and keys, and say where they part."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import jax
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.processes import exchange_values, process_group
from jaxpp_flax.trainers import PipelineTrainer
from jaxpp_flax.trainers.step.unused_parameters import parameter_paths
from jaxpp_flax.verify.comparison import Side, compare, count_choices
from jaxpp_flax.verify.errors import VerifyError
from jaxpp_flax.verify.report import Choice, Report, Row, joined
from jaxpp_flax.verify.rounding import apart, is_float, moved
from jaxpp_flax.verify.runs.holders import holder_of, to_host
from jaxpp_flax.verify.runs.pieces import Piece, cut, points_after
from jaxpp_flax.verify.runs.piped_step import WatchedStep
from jaxpp_flax.verify.runs.points import Kind, Point

__all__ = ["verify"]

# Of one phase, first what is stacked by microbatch: it says more of a difference than a sum.
_ORDER: tuple[Kind, ...] = get_args(Kind)


def verify(trainer: PipelineTrainer, batch: Any) -> Report:
    """Run one training step as a pipeline and under plain `jax.jit`, and compare both; the trainer does not change.

    The plain step has the same loss, state, microbatches and random keys. It runs block by block: each block reads what
    the pipeline recorded at the mark in front of it, and what it makes is compared. So all blocks agree if and only if
    the steps do. What is compared, in order of computation: what crosses each mark forward and backward, in every
    microbatch; the sums of the gradients; metrics; and the new state. Tolerances are measured: each block runs in
    another order of its microbatches, and with inputs moved by one unit of rounding; see
    `jaxpp_flax.verify.rounding.FACTOR`.

    It costs four plain steps that recompute their forward passes, two steps of the pipeline, and two compilations: of
    the plain step, and of a pipeline that returns what crosses its marks. A block runs on the first device of its rank,
    which holds, beside a second state of its stage and what crosses the stage's marks, one block at a time. What blocks
    read and make is on the host. With several processes, all of them call this with the same whole batch; each runs the
    blocks of its ranks, and all return the same report.

    Args:
      trainer: a trainer before its first step or after any.
      batch: as for `train_step`.

    Raises:
      BatchError: if the batch cannot be cut into microbatches.
      VerifyError: if the state is not finite, or two plain runs of a block are not equal.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage
      >>> model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i))) for i in range(2)])
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=2,
      ...                           num_microbatches=2, logging=False)
      >>> report = verify(trainer, jnp.ones((4, 4)))
      >>> report.agrees
      True
    """
    core = trainer._core  # pyright: ignore[reportPrivateUsage]
    microbatches = core.rows.split(batch)
    compiled = trainer.compile(batch)  # and places the state
    unused = set(core.builders.for_training(core.held.memory, microbatches).unused)
    state = trainer.state
    _check_finite(state, is_across=core.held.is_across)
    used = [path for path in parameter_paths(state.params) if path not in unused]
    step = trainer.step_function(batch)
    watched = WatchedStep(step, used)
    recorded = watched.at_points(
        core.executables.like_training(watched, microbatches)(_copy(state), microbatches)[1][1]
    )
    found = recorded | points_after(compiled(_copy(state), microbatches))
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, microbatches))
    comparison = _Comparison(
        leaves=jax.tree.leaves((state, microbatches)),
        numbers={path: i for i, path in enumerate(flatten(state)[0])},
        found=found,
        homes={name: stage.devices[0] for stage in getattr(compiled, "stages", ()) for name in stage.blocks},
        num_microbatches=trainer.num_microbatches,
        num_shards=core.rows.batch_shards,
        is_across=core.held.is_across,
    )
    for piece in cut(step, types, used, recorded):
        comparison.add(piece)
    facts = {
        "step": trainer.step,
        "stages": trainer.num_stages,
        "microbatches": trainer.num_microbatches,
        "schedule": repr(trainer.schedule),
        "processes": jax.process_count() if core.held.is_across else 1,
        "jax": jax.__version__,
    }
    choices = (*joined(comparison.choices), *map(Choice, sorted(watched.hidden)))
    return Report(rows=comparison.rows, facts=facts, choices=choices)


def _copy(state: Any) -> Any:
    return jax.tree.map(copy.deepcopy, state)


@dataclass(kw_only=True)
class _Comparison:
    """What the pieces of a step have shown so far, in every process.

    Args:
      leaves: those of the step's arguments.
      numbers: the number of each leaf of the state, by its path.
      found: the arrays of the pipeline, recorded or returned.
      homes: the first device of the rank that runs each block, the last block last.
      num_microbatches, num_shards: for the class of a difference.
      is_across: the ranks belong to several processes.
    """

    leaves: list[Any]
    numbers: Mapping[str, int]
    found: Mapping[Point, Any]
    homes: Mapping[str, Any]
    num_microbatches: int
    num_shards: int
    is_across: bool
    choices: list[Choice] = field(default_factory=list)
    found_rows: dict[Point, Row] = field(default_factory=dict)
    spreads: dict[Point, float] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows, in order of computation."""
        points = sorted(self.found_rows, key=lambda point: (point.loop, point.phase, _ORDER.index(point.kind)))
        return tuple(self.found_rows[point] for point in points)

    def add(self, piece: Piece) -> None:
        """Run a piece where its block is, compare it there, and tell all processes."""
        first = piece.points[0]
        device = holder_of(self.found[first])
        if first.block and self.homes:  # what stands behind the last mark is on the rank of the last block
            device = self.homes.get(first.block, [*self.homes.values()][-1])
        values = {
            name: to_host(self.found[name] if isinstance(name, Point) else self.leaves[name], device)
            for name in piece.reads
        }
        actual = {point: to_host(self.found[point], device) for point in piece.points}
        told: dict[str, Any] = {}
        if device.process_index == jax.process_index():
            try:
                with jax.default_device(device):
                    told = self._compared(piece, values, actual, device.process_index)
            except VerifyError as error:
                told = {"error": str(error)}
        if self.is_across:
            answers = exchange_values(process_group(), "what a block of the plain step has shown", told, timeout_s=None)
            told = answers[device.process_index]
        if "error" in told:
            raise VerifyError(told["error"])
        self.choices += [Choice(**choice) for choice in told["choices"]]
        for i, row, spread in told["rows"]:
            self.found_rows[piece.points[i]] = Row(**{**row, "index": tuple(row["index"])})
            self.spreads[piece.points[i]] = spread

    def _compared(self, piece: Piece, values: Any, actual: Any, process: int) -> dict[str, Any]:
        """Run a piece four times, and return what JSON can hold of it."""
        order = range(self.num_microbatches)
        plain = Side(*piece(values, order))
        _check_equal(plain.arrays, piece(values, order)[0])
        spreads = {name: self.spreads.get(name, 0.0) for name in values}

        def nearby(seed: int) -> Side:
            return Side(*piece(moved(values, piece.rounding, seed, spreads), order))

        others = [nearby(1) if piece.has_order else Side(*piece(values, order[::-1])), nearby(0)]
        before = {
            p: values[self.numbers[p.leaf]] for p in actual if p.kind == "state" if self.numbers[p.leaf] in values
        }
        found = compare(
            plain, others, actual,
            num_microbatches=self.num_microbatches, num_shards=self.num_shards, before=before, process=process,
        )  # fmt: skip
        rows = [[i, asdict(found[p][0]), found[p][1]] for i, p in enumerate(piece.points) if p in found]
        return {"rows": rows, "choices": [asdict(choice) for choice in count_choices(plain.arrays, actual)]}


def _check_finite(state: Any, *, is_across: bool) -> None:
    wrong = None
    for path, leaf in flatten(state)[0].items():
        device = holder_of(leaf)
        array = None if is_key(leaf) or not is_float(leaf) else to_host(leaf, device)
        if array is not None and not np.isfinite(array.astype(np.complex128)).all():
            wrong = wrong or f"{path} has {np.count_nonzero(~np.isfinite(array))} such numbers of {array.size}"
    all_wrong = exchange_values(process_group(), "whether the state is finite", wrong) if is_across else [wrong]
    for words in filter(None, all_wrong):
        raise VerifyError(
            f"the state is not finite already: {words}. Any two steps from it agree; restore an earlier state, and "
            "verify there."
        )


def _check_equal(first: Mapping[Point, Any], again: Mapping[Point, Any]) -> None:
    for point, array in first.items():
        if apart(array, again[point]).any():
            raise VerifyError(
                f"two plain steps from the same state, batch and keys differ, first in {point}: the loss is not "
                "deterministic, so nothing can be compared. Take host callbacks, clocks and random numbers of NumPy "
                "out of it; `rngs` gives the random numbers of a step and microbatch."
            )
