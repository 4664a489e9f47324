"""Run one training step both ways, on the same state, batch and keys, and say where they part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpp_flax.checkpoint.format.leaves import is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.trainers import PipelineTrainer
from jaxpp_flax.trainers.step.unused_parameters import parameter_paths
from jaxpp_flax.verify.comparison import Side, chosen_by, compare, count_choices
from jaxpp_flax.verify.errors import VerifyError
from jaxpp_flax.verify.report import Choice, Report
from jaxpp_flax.verify.rounding import apart, is_float, moved, on_host
from jaxpp_flax.verify.runs.piped_step import WatchedStep
from jaxpp_flax.verify.runs.plain_step import PlainStep, trace_step
from jaxpp_flax.verify.runs.points import Point

__all__ = ["verify"]


def verify(trainer: PipelineTrainer, batch: Any) -> Report:
    """Run one training step as a pipeline and under plain `jax.jit`, and compare both; the trainer does not change.

    The plain step has the same loss, state, microbatches and random keys. What is compared, in order of computation:
    what crosses each mark forward and backward, in every microbatch; the sums of the gradients; metrics; and the new
    state. Tolerances are measured: the plain step runs in another order of its microbatches, and with inputs moved by
    one unit of rounding; see `jaxpp_flax.verify.rounding.FACTOR`.

    It costs four plain steps, two steps of the pipeline, and two compilations: of the plain step, and of a pipeline
    that returns what crosses its marks. The plain step and the state must fit into one device. If rounding decided a
    choice otherwise (an arg-max, a top-k), the plain steps are compiled again, with the pipeline's choices.

    Args:
      trainer: a trainer in one process, before its first step or after any.
      batch: as for `train_step`.

    Raises:
      BatchError: if the batch cannot be cut into microbatches.
      VerifyError: if the state is not finite, two plain steps are not equal, or there are several processes.

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
    if core.held.is_across:
        raise VerifyError("verify compares in one process, and this trainer's ranks belong to several.")
    microbatches = core.rows.split(batch)
    step = trainer.step_function(batch)
    unused = set(core.builders.for_training(core.held.memory, microbatches).unused)
    state, inputs = jax.tree.map(on_host, (trainer.state, microbatches))
    _check_finite(state)
    used = [path for path in parameter_paths(state.params) if path not in unused]
    plain, others = _run_plain(step, state, inputs, used, trainer.num_microbatches)
    watched = WatchedStep(step, used)
    _, (_, arrays) = core.executables.like_training(watched, microbatches)(jax.tree.map(on_host, state), microbatches)
    found = _copied(watched.at_points(arrays))
    results = trainer.compile(batch)(jax.tree.map(on_host, state), microbatches)
    blocks = _blocks(plain.arrays)
    pipeline = Side({**found, **_after(jax.tree.map(on_host, results), blocks)})
    forced = chosen_by(pipeline, plain)
    if any(apart(array, side.arrays[point]).any() for point, array in forced.items() for side in (plain, *others)):
        plain, others = _run_plain(step, state, inputs, used, trainer.num_microbatches, forced)
    rows = compare(
        plain,
        others,
        pipeline,
        num_microbatches=trainer.num_microbatches,
        num_shards=core.rows.batch_shards,
        before={point: leaf for point, leaf in _after((state, {}), blocks).items() if point.kind == "state"},
    )
    facts = {
        "step": trainer.step,
        "stages": trainer.num_stages,
        "microbatches": trainer.num_microbatches,
        "schedule": repr(trainer.schedule),
        "jax": jax.__version__,
    }
    return Report(
        rows=rows, facts=facts, choices=(*count_choices(plain, pipeline), *map(Choice, sorted(watched.hidden)))
    )


def _run_plain(
    step: Any, state: Any, batch: Any, used: list[str], count: int, forced: Mapping[Point, Any] | None = None
) -> tuple[Side, list[Side]]:
    """Return the plain step's arrays, and those of two runs that differ from it by rounding alone."""
    traced = trace_step(step, state, batch)
    run = PlainStep(traced, used, forced or {})
    order = np.arange(count)

    def side(arguments: Any, order: Any) -> Side:
        results, inside, parts = run(arguments, order)
        return Side({**_copied(inside), **_after(jax.tree.map(on_host, results), _blocks(inside))}, _copied(parts))

    first = side((state, batch), order)
    _check_equal(first, side((state, batch), order))

    def nearby(seed: int) -> Side:
        changed = [moved(tree, traced.rounding, seed) for tree in (state.params, state.model_state, batch)]
        params, rest, inputs = changed
        return side((jax.tree.unflatten(jax.tree.structure(state), _with(state, params, rest)), inputs), order)

    # A value that goes from microbatch to microbatch gives them their order.
    reordered = nearby(1) if traced.has_carry else side((state, batch), order[::-1])
    return first, [reordered, nearby(0)]


def _copied(arrays: Mapping[Point, Any]) -> dict[Point, Any]:
    return {point: on_host(array) for point, array in arrays.items()}


def _with(state: Any, params: Any, model_state: Any) -> list[Any]:
    """Return the leaves of a state with other parameters and another state of the model."""
    leaves = flatten(state)[0]
    for name, tree in (("params", params), ("model_state", model_state)):
        leaves |= flatten({name: tree})[0]
    return list(leaves.values())


def _after(results: tuple[Any, Mapping[str, Any]], blocks: Mapping[str, tuple[int, str]]) -> dict[Point, Any]:
    """Return the metrics and the leaves of the new state by their points: behind all loops, in the gradients' order."""
    state, metrics = results
    found = {Point("metric", name, _BEHIND): value for name, value in metrics.items()}
    for path, leaf in flatten(state)[0].items():
        place, block = max((place for name, place in blocks.items() if path.endswith(name)), default=(0, ""))
        found[Point("state", path, _BEHIND, block=block, phase=1 + place)] = leaf
    return found


_BEHIND = 1_000_000  # the number of a loop behind all others


def _blocks(arrays: Mapping[Point, Any]) -> dict[str, tuple[int, str]]:
    """Return where each parameter's gradient is computed: the number of marks before it, and the block."""
    return {f"/{p.leaf}": (p.phase, p.block) for p in arrays if p.kind == "gradient"}


def _check_finite(state: Any) -> None:
    for path, leaf in flatten(state)[0].items():
        if not is_key(leaf) and is_float(leaf) and not np.isfinite(leaf.astype(np.complex128)).all():
            raise VerifyError(
                f"the state is not finite already: {path} has {np.count_nonzero(~np.isfinite(leaf))} such numbers of "
                f"{leaf.size}. Any two steps from it agree; restore an earlier state, and verify there."
            )


def _check_equal(first: Side, again: Side) -> None:
    for point, array in first.arrays.items():
        if apart(array, again.arrays[point]).any():
            raise VerifyError(
                f"two plain steps from the same state, batch and keys differ, first in {point}: the loss is not "
                "deterministic, so nothing can be compared. Take host callbacks, clocks and random numbers of NumPy "
                "out of it; `rngs` gives the random numbers of a step and microbatch."
            )
