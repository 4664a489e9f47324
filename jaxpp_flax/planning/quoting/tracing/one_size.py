"""A step, traced on one device with microbatches of one size: the work and the bytes of its blocks for any axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.traced import Marks
from jaxpp_flax.engine.tracing.graph_text import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.messages import error_location, known_names
from jaxpp_flax.planning.block_loads import of_optimizer
from jaxpp_flax.planning.planner import PlanningStep, TracedUpdate, check_made
from jaxpp_flax.planning.predicted.blocks import Blocks, Holding
from jaxpp_flax.planning.quoting.facts import TaskFacts, facts_of_task
from jaxpp_flax.planning.quoting.tracing.lines import Pair
from jaxpp_flax.planning.quoting.tracing.update import facts_of_update
from jaxpp_flax.planning.stages.policies import AssignmentError, segment_names
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Axes", "Trace", "examples_of", "trace_step"]

_AXES = ("data", "fsdp", "expert", "tensor")  # of a layout, inside a rank


@dataclass(frozen=True)
class Axes:
    """The sizes of the axes inside a rank that divide parameters, and how often those of `fsdp` are gathered.

    `data` is the number of devices that divide the examples of a microbatch; 1 where all that matters is how many each
    of them has.
    """

    tensor: int = 1
    fsdp: int = 1
    gather: Fsdp = "microbatch"
    expert: int = 1
    data: int = 1

    @property
    def of_work(self) -> Axes:
        """The axes that divide the work of an example, and those that divide the examples."""
        return Axes(self.tensor, expert=self.expert, data=self.data)


@dataclass(frozen=True, eq=False)
class Trace:
    """A step on one device, with microbatches of one size."""

    microbatch: int
    blocks: Blocks
    step: PlanningStep
    names: tuple[str, ...]

    def sizes(self, axes: Axes) -> dict[str, int]:
        return {
            **dict.fromkeys(self.blocks.shards_of.axes, 1),
            "data": axes.data,
            "tensor": axes.tensor,
            "expert": axes.expert,
            "fsdp": axes.fsdp,
        }

    @lru_cache(maxsize=32)  # noqa: B019
    def work(self, axes: Axes) -> list[Pair]:
        """Return the forward and the backward of each block."""
        found = [[TaskFacts(), TaskFacts()] for _ in self.names]
        sizes, blocks = self.sizes(axes), self.blocks
        known = Fingerprinter()
        results: dict[Any, tuple[TaskFacts, Sequence[PartitionSpec]]] = {}
        specs: dict[Value, PartitionSpec] = {}
        tasks = blocks.partition.tasks
        passed = {v for task in tasks if task.kind is TaskKind.FORWARD for v in task.graph.inputs}
        for task in tasks:
            read = [specs.get(v) or blocks.spec_of(v) for v in task.graph.inputs]
            ahead = task.kind is TaskKind.FORWARD
            saved = tuple(i for i, v in enumerate(task.graph.outputs) if ahead and v not in passed)
            key = known.graph(task.graph), tuple(read), saved
            if key not in results:
                results[key] = facts_of_task(task.graph, read, sizes, saved)
            facts, outputs = results[key]
            if not ahead:  # sums of gradients over the examples' devices wait for the end of the loop
                facts = replace(facts, collectives=tuple(of for of in facts.collectives if of.axis != "data"))
            specs.update((v, s) for v, s in zip(task.graph.outputs, outputs, strict=True) if isinstance(v, Value))
            found[task.stage][not ahead] = _added(found[task.stage][not ahead], facts)
        return [(ahead, back) for ahead, back in found]

    @lru_cache(maxsize=64)  # noqa: B019
    def holdings(self, axes: Axes) -> Counter[tuple[str, tuple[int, ...]]]:
        """Return the bytes on each device by kind and blocks; parameters sharded by FSDP are gathered as well."""
        sizes, found = self.sizes(axes), Counter[tuple[str, tuple[int, ...]]]()
        blocks = replace(self.blocks, shards_of=ShardCounts(sizes))
        specs = dict(self.blocks.arguments.values())
        for item in blocks.holdings:
            for kind, nbytes in self._all_bytes(item, specs, axes):
                found[kind, item.blocks] += nbytes  # type: ignore[assignment]
        return found

    @lru_cache(maxsize=64)  # noqa: B019
    def updates(self, axes: Axes) -> list[tuple[tuple[int, ...], TaskFacts]]:
        """Return the products in the optimizer's update of each parameter, with the blocks that hold the parameter."""
        count = len(self.step.argument_bytes)  # blocks number the arguments from the end
        specs = {place % count: spec for place, spec in self.blocks.arguments.values() if self._is_argument(place)}
        held = {
            of.argument % count: of.blocks
            for of in self.blocks.holdings
            if of.kind == "parameters" and of.argument is not None and self._is_argument(of.argument)
        }
        facts = facts_of_update(self._update, specs, self.sizes(axes))
        return [(held[place], of) for place, of in facts.items() if place in held]

    @cached_property
    def _update(self) -> TracedUpdate:
        return self.step.update()

    def _all_bytes(self, item: Holding, specs: Mapping[int, PartitionSpec], axes: Axes) -> list[tuple[str, float]]:
        """Return a holding by kind, and with it what a step keeps of a parameter: its optimizer and wider copies."""
        if item.kind != "parameters" or item.argument is None or not self._is_argument(item.argument):
            return [(item.kind, item.nbytes)]
        own, whole = self.step.argument_bytes[item.argument], item.nbytes * item.shards
        found = [(item.kind, item.nbytes)]
        found += [(of.kind, of.nbytes / item.shards) for of in of_optimizer(item, self.step.kept)]
        if own != whole:
            found.append(("masters", own / item.shards))
        if axes.fsdp > 1 and "fsdp" in axes_in(tuple(specs[item.argument])):
            found.append(("gathered", item.nbytes * axes.fsdp))
        return found

    def _is_argument(self, place: int) -> bool:
        """Return whether an argument is at this place from the end; arrays that the step closes over stand in front."""
        return -place <= len(self.step.argument_bytes)

    def sent(self, data: int = 1) -> list[float]:
        """Return the bytes that cross a cut before each block, on each of the devices that divide the examples."""
        return [0.0, *(nbytes / data for nbytes in self.blocks.sent)]

    def passing(self, data: int = 1) -> list[float]:
        """Return the bytes of them that the block before the cut does not keep."""
        blocks = replace(self.blocks, shards_of=ShardCounts(self.sizes(Axes(data=data))))
        return [0.0, *blocks.passing][: len(self.names)]

    @property
    def nbytes(self) -> dict[Any, float]:
        """All that the blocks hold and send, by name."""
        sent = {("sent", i): nbytes for i, nbytes in enumerate(self.sent())}
        passing = {("passing", i): nbytes for i, nbytes in enumerate(self.passing())}
        return {**{key: n for key, n in self.holdings(Axes()).items() if key[0] != "data"}, **sent, **passing}

    @cached_property
    def annotated(self) -> dict[str, list[int]]:
        """The sizes of the parameters' dimensions that each axis divides."""
        found: dict[str, list[int]] = {}
        data = self.blocks.partition.data
        for value, (_, spec) in self.blocks.arguments.items():
            if value in data:
                continue
            for size, entry in zip(value.aval.shape, spec, strict=False):
                for name in axes_in((entry,)):
                    found.setdefault(name, []).append(size)
        return found


def _added(one: TaskFacts, other: TaskFacts) -> TaskFacts:
    return TaskFacts(
        one.products + other.products,
        one.moved + other.moved,
        one.saved + other.saved,
        one.kernels + other.kernels,
        one.collectives + other.collectives,
    )


def made_with(make: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
    """Return the trainer and the batch of a factory, for these options of a trainer.

    Raises:
      ValueError: if it does not take them, or returns something else.
    """
    try:
        made = make(**options)
    except TypeError as error:
        raise ValueError(
            f"the factory does not take the options of a trainer alone: {error}. Write it as `def make(**options)`, "
            "give other parameters defaults, and pass the options on: `PipelineTrainer(model, tx, loss_fn, **options)`."
        ) from error
    return check_made(made, "the factory")


def _made(make: Callable[..., Any], options: Mapping[str, Any], num_microbatches: int) -> tuple[Any, Any]:
    mesh = dict.fromkeys(_AXES, 1)
    return made_with(make, **options, num_stages=1, num_microbatches=num_microbatches, mesh=mesh)


def examples_of(make: Callable[..., Any], options: Mapping[str, Any]) -> int:
    """Return the examples of a batch."""
    _, batch = _made(make, options, 1)
    leaves = [leaf for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)]
    if not leaves:
        raise ValueError(f"the batch is {batch!r}, without examples. Return arrays or shapes of (batch, ...).")
    return int(leaves[0].shape[0])


def trace_step(make: Callable[..., Any], options: Mapping[str, Any], batch: int, microbatch: int) -> Trace:
    trainer, shapes = _made(make, options, batch // microbatch)
    try:
        step: PlanningStep = trainer.planning_step(shapes)
    except jax.errors.JAXTypeError as error:
        raise ValueError(
            f"the model or the loss reads the value of an array at {error_location(error)}, but a quote traces shapes "
            f"({str(error).splitlines()[0].rstrip('.')}). Stay in `jax.numpy` (`jnp.where` in place of `if`), or "
            "compute such numbers before, with NumPy."
        ) from error
    if step.ignored:
        name, leaf = next(iter(step.ignored.items()))
        raise ValueError(
            f"the parameter {leaf} is annotated with {name!r}, which is no axis of a layout and has no rule."
            f"{known_names(name, _AXES)} Annotate it with one of them, or call quote under "
            f"`nn.logical_axis_rules([({name!r}, None)])`: then this dimension stays whole."
        )
    found = list[Marks]()

    def remember(marks: Any, num_stages: int) -> Sequence[int]:
        if isinstance(marks, Marks) and marks.loop.body.has_sums:
            found.append(marks)
        return ()

    step.place(step.schedule, remember, None)
    if not found:
        raise AssignmentError("the step has no loop that accumulates gradients, so there is nothing to quote.")
    if not len(found[0]):
        raise AssignmentError("the model has no marks, so no pipeline cuts it. Put its blocks into `PipelineStage`s.")
    return Trace(microbatch, Blocks.of(found[0]), step, tuple(segment_names(found[0])))
