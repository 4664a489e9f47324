"""Run one training step both ways, on the same state, batch and keys, and find the first difference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

import jax
from jax.sharding import SingleDeviceSharding

from jaxpp_flax._compat_texts.errors import names_mesh
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.reshard import mpmd_to_spmd_reshard
from jaxpp_flax.processes import exchange_values, process_group
from jaxpp_flax.trainers import PipelineTrainer
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.step.facts.unused_parameters import parameter_paths
from jaxpp_flax.trainers.step.nonfinite import nonfinite_leaf
from jaxpp_flax.trainers.steps import check_one_shape
from jaxpp_flax.verify.comparison import Comparison, compare, run_twice
from jaxpp_flax.verify.copies import differing_copies
from jaxpp_flax.verify.errors import VerifyError
from jaxpp_flax.verify.reference.plain_linen import PlainLinen
from jaxpp_flax.verify.reference.plain_nnx import PlainNnx
from jaxpp_flax.verify.reference.plain_step import PlainStep
from jaxpp_flax.verify.reference.plain_update import PlainUpdate
from jaxpp_flax.verify.report import Choice, Report, Row, joined
from jaxpp_flax.verify.rounding import on_host
from jaxpp_flax.verify.runs.pieces import cut, early_host_calls, points_after
from jaxpp_flax.verify.runs.piped_step import WatchedStep
from jaxpp_flax.verify.runs.points import Kind, Point
from jaxpp_flax.verify.runs.traced_step import TracedStep, trace_step
from jaxpp_flax.verify.whole_step import StepResults, WholeStep, compare_whole

__all__ = ["verify"]

# Of one phase, first what is stacked by microbatch: it says more of a difference than a sum.
_ORDER: tuple[Kind, ...] = get_args(Kind)


@without_ambient_mesh
def verify(trainer: PipelineTrainer, batch: Any) -> Report:
    """Run one training step as a pipeline and under plain `jax.jit`, and compare both; the trainer does not change.

    First the step is compared block by block, which finds the place of a difference: each block of the same loss, with
    the same state, microbatches and random keys, reads the values that the pipeline recorded at the mark before the
    block, and its results are compared with the pipeline's. These arrays are compared, in order of computation: the
    values that cross each mark forward and backward, in every microbatch; the sums of the gradients; the metrics; the
    new state. If all agree, the whole step is compared with one that shares nothing with the trainer's: the model, the
    loss function and the optimizer, by Flax and Optax alone. It has the gradient of the whole batch at once; if the
    loss draws random numbers, has a loss scale, or writes variables of which the trainer has warned, it takes the
    microbatches one after another, with their keys. `Report.facts["reference"]` says which. If it cannot run, the
    report does not agree, and says why. The copies of each array, on several devices or ranks, are compared with one
    another.

    Tolerances are measured: each side runs again with inputs that are changed by one unit of rounding, and each block
    with its microbatches in another order (`jaxpp_flax.verify.rounding`).

    This takes the time of four plain steps that recompute their forward passes, three plain steps of the whole batch,
    two steps of the pipeline, and three compilations. A block runs on the first device of its rank. That device also
    needs memory for a second state of the stage and for the values that cross the stage's marks. The whole step runs on
    the first device, or divided over the devices of this process if its memory is too small. With several processes,
    all of them call this with the same whole batch; each runs the blocks of its ranks, and all return the same report.

    Args:
      trainer: a `PipelineTrainer`, before or after any step.
      batch: a batch as for `train_step`.

    Raises:
      BatchError: if the batch cannot be cut into microbatches.
      VerifyError: if the state is not finite, the model needs a mesh, or two plain runs of a block that calls the host
        are not equal.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage
      >>> model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i))) for i in range(2)])
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=2,
      ...                           num_microbatches=2, logging=False)
      >>> report = verify(trainer, jnp.ones((4, 4)))
      >>> report.agrees, report.facts["reference"]
      (True, 'the whole batch at once')
    """
    check_one_shape("verify", batch)
    microbatches = trainer.steps.rows.split(batch)
    compiled = trainer.compile(batch)  # and places the state
    unused = set(trainer.steps.builders.for_training(trainer.held.memory, microbatches).unused)
    state, is_across = trainer.state, trainer.held.is_across
    _check_finite(state, is_across=is_across)
    copies = differing_copies(state, "before the step", is_across=is_across)
    used = [path for path in parameter_paths(state.params) if path not in unused]
    watched = WatchedStep(trainer.step_function(batch), used)
    # The plain side's own trace: that of the watched step is for the trainer's mesh.
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, microbatches))
    traced = _traced_without_mesh(watched.step, used, types)
    arguments = [*traced.constants, *jax.tree.leaves((state, microbatches))]
    _check_host_calls(traced, arguments, trainer.num_microbatches, is_across=is_across)
    _, (_, arrays) = trainer.steps.like_training(watched, microbatches)(_copy(state), microbatches)
    results = compiled(_copy(state), microbatches)
    found = dict(zip(watched.points, arrays, strict=True)) | points_after(results)
    copies += differing_copies(results[0], "after the step", is_across=is_across)
    rows, choices = _compare_blocks(trainer, traced, arguments, found, compiled)
    rows = [*copies, *rows]
    whole = WholeStep(notes=[_PLACE_IS_KNOWN])
    if all(row.agrees for row in rows):
        whole = _compare_whole(trainer, batch, found, results, has_choices=bool(choices))
    facts = {
        "step": trainer.step,
        "stages": trainer.num_stages,
        "microbatches": trainer.num_microbatches,
        "schedule": repr(trainer.schedule),
        "processes": jax.process_count() if is_across else 1,
        "jax": jax.__version__,
        "reference": whole.form,
    }
    return Report(
        rows=(*rows, *whole.rows), facts=facts, choices=tuple(joined(choices)), notes=tuple(whole.notes),
        uncompared=whole.uncompared,
    )  # fmt: skip


_PLACE_IS_KNOWN = "The whole step was not compared with one by Flax and Optax alone: its parts differ already."


def _check_host_calls(traced: TracedStep, arguments: Sequence[Any], num_microbatches: int, *, is_across: bool) -> None:
    """Run what calls the host twice, as far as it needs arguments alone: before the pipeline runs."""
    for piece in early_host_calls(traced):
        held = [arguments[name] for name in piece.reads if isinstance(name, int)]
        device = holder_of(next((array for array in held if isinstance(array, MpmdArray)), None))
        reads = dict(zip(piece.reads, [to_host(array, device) for array in held], strict=True))
        twice = partial(run_twice, piece, reads, range(num_microbatches))
        _run_on(device, twice, is_across=is_across)


def _compare_blocks(
    trainer: PipelineTrainer, traced: TracedStep, arguments: Sequence[Any], found: Mapping[Point, Any], compiled: Any
) -> tuple[list[Row], list[Choice]]:
    """Compare what each block of the plain step makes with what the pipeline made, in order of computation."""
    numbers = {path: i for i, path in enumerate(flatten(trainer.state)[0], start=len(traced.constants))}
    homes = {name: stage.devices[0] for stage in getattr(compiled, "stages", ()) for name in stage.blocks}
    rows: dict[Point, Row] = {}
    spreads: dict[Point, float] = {}
    choices: list[Choice] = []
    for piece in cut(traced):
        first = piece.points[0]
        # What stands behind the last mark is on the rank of the last block.
        device = homes.get(first.block, [*homes.values()][-1]) if first.block and homes else holder_of(found[first])
        reads = {
            name: to_host(found[name] if isinstance(name, Point) else arguments[name], device) for name in piece.reads
        }
        actual = {point: to_host(found[point], device) for point in piece.points}
        before = {p: reads[numbers[p.leaf]] for p in actual if p.kind == "state" if numbers[p.leaf] in reads}
        run = partial(
            compare,
            *(piece, reads, actual, before, spreads),
            num_microbatches=trainer.num_microbatches,
            num_shards=trainer.steps.rows.batch_shards,
            process=device.process_index,
        )
        shown = Comparison.from_json(_run_on(device, run, is_across=trainer.held.is_across))
        rows |= dict(zip(piece.compared, shown.rows, strict=True))
        spreads |= dict(zip(piece.compared, shown.spreads, strict=True))
        choices += shown.choices
    points = sorted(rows, key=lambda point: (point.loop, point.phase, _ORDER.index(point.kind)))
    return [rows[point] for point in points], choices


def _compare_whole(
    trainer: PipelineTrainer, batch: Any, found: Mapping[Point, Any], results: Any, *, has_choices: bool
) -> WholeStep:
    """Compare the whole step with one by Flax and Optax alone, which runs in one process."""
    builders = trainer.steps.builders
    device = holder_of(None) if trainer.mesh is None else trainer.mesh.rank_devices(0)[0]
    bring = partial(to_host, device=device)
    state, (new, metrics) = jax.tree.map(bring, (trainer.state, results))
    gradients = {point.leaf: bring(array) for point, array in found.items() if point.kind == "gradient"}

    def run() -> WholeStep:
        actual = StepResults(gradients=gradients, metrics=metrics, state=flatten(new)[0])
        every = jax.local_devices()[:1] if trainer.mesh is None else trainer.mesh.jax_mesh.devices.flat
        local = [of for of in every if of.process_index == device.process_index]
        return compare_whole(
            plain_step_of(trainer), state, jax.tree.map(on_host, batch), actual,
            num_microbatches=trainer.num_microbatches, num_shards=trainer.steps.rows.batch_shards,
            devices=sorted(local, key=lambda of: of != device), has_choices=has_choices,
            is_told=builders.has_warned_of_microbatches, is_told_of_states=builders.has_warned_of_states,
        )  # fmt: skip

    return WholeStep.from_json(_run_on(device, run, is_across=trainer.held.is_across))


def plain_step_of(trainer: PipelineTrainer) -> PlainStep:
    """Return the step of a trainer's model, loss function, optimizer and options, without the trainer."""
    adapter, builder = trainer.model.adapter, trainer.steps.builders.untraced
    if isinstance(adapter, LinenModel):
        model = PlainLinen(module=adapter.module, compute=adapter.compute)
    else:
        graphdef = adapter.graphdef  # pyright: ignore[reportAttributeAccessIssue]
        model = PlainNnx(graphdef=graphdef, seed=trainer.training.seed, compute=adapter.compute)
    update = PlainUpdate(tx=builder.update.tx, training=trainer.training, precision=trainer.precision)
    return PlainStep(model=model, loss_fn=builder.loss_fn, update=update)


def _traced_without_mesh(step: Any, used: list[str], types: Any) -> TracedStep:
    """Trace a step for one device; refuse a model that names axes of a mesh."""
    try:
        return trace_step(step, used, *types)
    except (RuntimeError, ValueError) as error:
        if not names_mesh(error):
            raise
        raise VerifyError(
            f"the model names axes of a mesh, and the plain step runs on one device, without a mesh: {error} The "
            "traceback of the error above shows the line. Run it only under this condition: "
            "`if not jax.sharding.get_abstract_mesh().empty:`."
        ) from error


def holder_of(array: Any) -> Any:
    """Return the first device of the first rank that holds an array; the default device for others than ranks'."""
    if not isinstance(array, MpmdArray):
        return jax.local_devices()[0]
    return array.sharding.mpmd_mesh.rank_devices(min(array.mpmd_idxs))[0]


def to_host(array: Any, device: Any) -> Any:
    """Return the whole array on the host of a device's process; None in others. All processes call this together."""
    is_here = device.process_index == jax.process_index()
    if isinstance(array, MpmdArray) and array.sharding.mpmd_mesh.is_multi_process:
        target = SingleDeviceSharding(device)
        array = mpmd_to_spmd_reshard(array.sharding.mpmd_mesh, array, target, donate=False)
    return on_host(array) if is_here else None


def _copy(state: Any) -> Any:
    return jax.tree.map(copy.deepcopy, state)


def _run_on(device: Any, run: Callable[[], Any], *, is_across: bool) -> dict[str, Any]:
    """Run a function on a device; return the comparison that it returns, if any, as JSON has it, in all processes."""
    found: dict[str, Any] = {}
    if device.process_index == jax.process_index():
        try:
            with jax.default_device(device):
                shown = run()
            found = asdict(shown) if isinstance(shown, (Comparison, WholeStep)) else found
        except VerifyError as error:
            found = {"error": str(error)}
    if is_across:
        what = "what a block of the plain step has shown"
        found = exchange_values(process_group(), what, found, timeout_s=None)[device.process_index]
    if "error" in found:
        raise VerifyError(found["error"])
    return found


def _check_finite(state: Any, *, is_across: bool) -> None:
    own = nonfinite_leaf(state)
    for path in exchange_values(process_group(), "whether the state is finite", own) if is_across else [own]:
        if path is not None:
            raise VerifyError(
                f"the state before the step is not finite: {path} has a NaN or an infinity, so a comparison would show "
                "nothing. Restore an earlier state, and verify from there."
            )
