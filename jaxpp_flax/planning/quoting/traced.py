"""A model's step, traced on one device with microbatches of two sizes: its blocks for any size and any axes.

Each number of a block is linear in the size of a microbatch, so two traces give all of them. With `depth`, a model of
three blocks is traced, and the middle one stands for all that the whole model has more.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.blocks import Blocks, Holding, Marks
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Value
from jaxpp_flax.messages import error_location, known_names
from jaxpp_flax.planning.block_loads import of_optimizer
from jaxpp_flax.planning.planner import PlanningStep, check_made
from jaxpp_flax.planning.quoting.facts import TaskFacts, facts_of_task, interpolated
from jaxpp_flax.planning.stages.policies import AssignmentError, segment_names
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.schedules.task import TaskKind

__all__ = ["Axes", "TracedModel", "trace_model"]

_AXES = ("data", "fsdp", "expert", "tensor")  # of a layout, inside a rank
_TRACED = 3  # blocks of a model that is traced with `depth`: the first, one that is repeated, and the last
_PER_DEVICE = ("parameters", "masters", "gradients", "optimizer", "gathered")  # of FSDP

Pair = tuple[TaskFacts, TaskFacts]  # forward and backward


@dataclass(frozen=True)
class Axes:
    """The sizes of the axes inside a rank that divide parameters, and how often those of `fsdp` are gathered."""

    tensor: int = 1
    fsdp: int = 1
    gather: Fsdp = "microbatch"
    expert: int = 1

    @property
    def of_work(self) -> Axes:
        """The axes that divide the work of an example."""
        return Axes(self.tensor, expert=self.expert)


@dataclass(frozen=True, eq=False)
class _Trace:
    """A step on one device, with microbatches of one size."""

    microbatch: int
    blocks: Blocks
    step: PlanningStep
    names: tuple[str, ...]

    def sizes(self, axes: Axes) -> dict[str, int]:
        return {
            **dict.fromkeys(self.blocks.shards_of.axes, 1),
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

    def _all_bytes(self, item: Holding, specs: Mapping[int, PartitionSpec], axes: Axes) -> list[tuple[str, float]]:
        """Return a holding by kind, and with it what a step keeps of a parameter: its optimizer and wider copies."""
        if item.kind != "parameters" or item.argument is None:
            return [(item.kind, item.nbytes)]
        own, whole = self.step.argument_bytes[item.argument], item.nbytes * item.shards
        found = [(item.kind, item.nbytes)]
        found += [(of.kind, of.nbytes / item.shards) for of in of_optimizer(item, self.step.kept)]
        if own != whole:
            found.append(("masters", own / item.shards))
        if axes.fsdp > 1 and "fsdp" in axes_in(tuple(specs[item.argument])):
            found.append(("gathered", item.nbytes * axes.fsdp))
        return found

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


@dataclass(frozen=True, eq=False)
class TracedModel:
    """The blocks of a whole model, for any microbatch and any axes.

    Args:
      traces: the step with microbatches of two sizes.
      names: of all blocks, and of the work after the last mark.
      global_batch: the examples of a step.
      tokens: of an example; 1 if it has none.
    """

    traces: tuple[_Trace, _Trace]
    names: tuple[str, ...]
    global_batch: int
    tokens: int

    @property
    def _more(self) -> int:
        return len(self.names) - len(self.traces[0].names)

    def share(self, microbatch: float) -> float:
        """Return where a size of a microbatch lies: 0 for that of the first trace, 1 for that of the second."""
        one, two = (trace.microbatch for trace in self.traces)
        return (microbatch - one) / (two - one)

    @lru_cache(maxsize=512)  # noqa: B019
    def work(self, microbatch: int, axes: Axes) -> list[Pair]:
        """Return the forward and the backward of each block; equal blocks are one object."""
        one, two = (trace.work(axes.of_work) for trace in self.traces)
        share = self.share(microbatch)
        mixed = [
            (interpolated(a[0], b[0], share), interpolated(a[1], b[1], share)) for a, b in zip(one, two, strict=True)
        ]
        return [*mixed[:1], *mixed[1:2] * (1 + self._more), *mixed[2:]] if self._more else mixed

    @lru_cache(maxsize=256)  # noqa: B019
    def holdings(self, microbatch: int, axes: Axes) -> tuple[Holding, ...]:
        """Return what the blocks hold, as `BlockLoads` takes it: one entry for each kind and set of blocks.

        Gradients of parameters that are gathered once a step are summed whole on each device.
        """
        half = self._bytes(microbatch, replace(axes.of_work, fsdp=2 if axes.fsdp > 1 else 1))
        whole = self._bytes(microbatch, axes.of_work) if axes.fsdp > 1 else half
        found = list[Holding]()
        for (kind, where), nbytes in half.items():
            is_whole = kind == "gradients" and axes.gather == "step"
            if kind in _PER_DEVICE[:-1] and not is_whole:  # of x bytes, a device has (1 - s) x + s x / fsdp
                cut = 2 * (whole[kind, where] - nbytes)
                nbytes = whole[kind, where] - cut + cut / axes.fsdp
            elif kind != "gathered":
                nbytes = whole[kind, where]
            found += [Holding(kind=kind, nbytes=nbytes, blocks=of) for of in self._everywhere(where)]
        return tuple(found)

    def _bytes(self, microbatch: int, axes: Axes) -> Counter[tuple[str, tuple[int, ...]]]:
        one, two = (trace.holdings(axes) for trace in self.traces)
        share = self.share(microbatch)
        fixed = ("data",)  # all microbatches together
        return Counter({
            key: one[key] if key[0] in fixed else one[key] + (two[key] - one[key]) * share for key in one | two
        })  # fmt: skip

    def _everywhere(self, blocks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the blocks of the whole model that some blocks of the traced one stand for."""
        more = self._more
        if not more:
            return [blocks]
        moved = [b + more if b > 1 else b for b in blocks]
        if 1 not in blocks:
            return [tuple(moved)]
        if 0 in blocks:  # from the first block to a later one, or to all
            return [(0, *range(1, 2 + more), *(b for b in moved if b > 1))] if max(blocks) > 1 else [(0, 1)]
        if blocks == (1,):
            return [(1 + i,) for i in range(1 + more)]
        return [(1 + i, 2 + i) for i in range(1 + more)]

    def sent(self, microbatch: int) -> list[float]:
        """Return the bytes that cross a cut before each block (0 before the first)."""
        return self._each([[0.0, *Marks(t.blocks).sent] for t in self.traces], microbatch)

    def passing(self, microbatch: int) -> list[float]:
        """Return the bytes of them that the block before the cut does not keep."""
        return self._each([[0.0, *t.blocks.passing][: len(t.names)] for t in self.traces], microbatch)

    def _each(self, traced: Sequence[Sequence[float]], microbatch: int) -> list[float]:
        share, (one, two) = self.share(microbatch), traced
        mixed = [a + (b - a) * share for a, b in zip(one, two, strict=True)]
        return [*mixed[:1], *mixed[1:2] * (1 + self._more), *mixed[2:]] if self._more else mixed

    @cached_property
    def with_effects(self) -> frozenset[int]:
        """The blocks that may not run twice."""
        return frozenset(
            b for of in self.traces[0].blocks.with_effects for each in self._everywhere((of,)) for b in each
        )

    @cached_property
    def flops(self) -> float:
        """The operations of the model for one example, forward and backward, without recomputation."""
        trace = self.traces[1]
        work = [of.total for of in trace.blocks.work()]
        return (sum(work) + self._more * (work[1] if self._more else 0.0)) / trace.microbatch

    def divides(self, axis: str, size: int) -> bool:
        """Return whether the model's annotations let so many devices share its parameters along an axis."""
        sizes = self.traces[0].annotated.get(axis, [])
        return size == 1 or (bool(sizes) and all(of % size == 0 for of in sizes))


def trace_model(make: Callable[..., Any], depth: str | None = None) -> TracedModel:
    """Trace the model of a factory on one device; no value is made, nothing is compiled.

    Args:
      make: takes options of `PipelineTrainer`, and returns the trainer with a batch (arrays or shapes).
      depth: the parameter of `make` that says how many equal blocks the model has; its default is the number that the
        whole model has. Then a model of three blocks is traced, which takes seconds for a model of any size.

    Raises:
      AssignmentError: for a model without marks, with blocks that are not equal, or whose names do not end in numbers.
      ValueError: for a factory or a batch that does not fit.
    """
    more, count = ({}, None) if depth is None else ({depth: _TRACED}, _depth_of(make, depth))
    batch = _examples_of(make, more)
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    if len(sizes) < 2:
        raise ValueError("the batch has 1 example, which no layout divides. Give the batch of a whole step.")
    chosen = sizes[1:3] if len(sizes) > 2 else sizes  # an example alone may be traced without its dimension
    one, two = (_trace(make, more, batch, size) for size in chosen)
    if "expert" in one.annotated and len(sizes) > 3:  # the axis may cut examples: only sizes that it divides show this
        one, two = (_trace(make, more, batch, size) for size in sizes[-3:-1])
    names = one.names if count is None else _repeated(one, count)
    return TracedModel(traces=(one, two), names=names, global_batch=batch, tokens=one.step.units // batch)


def _depth_of(make: Callable[..., Any], depth: str) -> int:
    parameters = inspect.signature(make).parameters
    default = parameters[depth].default if depth in parameters else None
    if not isinstance(default, int) or default < _TRACED:
        raise ValueError(
            f"depth={depth!r}: the factory must have a parameter of this name, whose default is the number of blocks "
            f"of the whole model, at least {_TRACED}; it has {default!r}."
        )
    return default


def _made(make: Callable[..., Any], options: Mapping[str, Any], num_microbatches: int) -> tuple[Any, Any]:
    try:
        made = make(**options, num_stages=1, num_microbatches=num_microbatches, mesh=dict.fromkeys(_AXES, 1))
    except TypeError as error:
        raise ValueError(
            f"the factory does not take the options of a trainer alone: {error}. Write it as `def make(**options)`, "
            "give other parameters defaults, and pass the options on: `PipelineTrainer(model, tx, loss_fn, **options)`."
        ) from error
    return check_made(made, "the factory")


def _examples_of(make: Callable[..., Any], options: Mapping[str, Any]) -> int:
    """Return the examples of a batch."""
    _, batch = _made(make, options, 1)
    leaves = [leaf for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)]
    if not leaves:
        raise ValueError(f"the batch is {batch!r}, without examples. Return arrays or shapes of (batch, ...).")
    return int(leaves[0].shape[0])


def _trace(make: Callable[..., Any], options: Mapping[str, Any], batch: int, microbatch: int) -> _Trace:
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
        if isinstance(marks, Marks) and marks.blocks.body.has_sums:
            found.append(marks)
        return ()

    step.place(step.schedule, remember, None)
    if not found:
        raise AssignmentError("the step has no loop that accumulates gradients, so there is nothing to quote.")
    if not len(found[0]):
        raise AssignmentError("the model has no marks, so no pipeline cuts it. Put its blocks into `PipelineStage`s.")
    return _Trace(microbatch, found[0].blocks, step, tuple(segment_names(found[0])))


def _repeated(trace: _Trace, count: int) -> tuple[str, ...]:
    """Return the names of all blocks, by the numbers at the end of the three that are traced."""
    names, numbers = trace.names, [re.fullmatch(r"(.*?)(\d+)(\D*)", name) for name in trace.names[:_TRACED]]
    if len(names) != _TRACED + 1:
        raise AssignmentError(
            f"depth= needs one mark for each block; a model of {_TRACED} blocks has {len(names) - 1}."
        )
    if any(found is None for found in numbers):
        raise AssignmentError(f"depth= needs blocks with numbers in their names, such as 'block_0'; these are {names}.")
    first, second, third = (found for found in numbers if found is not None)
    start = int(first[2])
    if (first[1], first[3]) != (second[1], second[3]) or [int(n[2]) - start for n in (second, third)] != [1, 2]:
        raise AssignmentError(f"depth= needs blocks that are numbered in order; these are {names}.")
    known, made = Fingerprinter(), {}
    for task in trace.blocks.partition.tasks:
        made.setdefault(task.stage, []).append(known.graph(task.graph))
    if sorted(made[1]) != sorted(made[2]):
        raise AssignmentError(
            f"the blocks {names[1]!r} and {names[2]!r} are not equal, so one cannot stand for the others. Leave depth= "
            "out: the whole model is traced."
        )
    every = [f"{first[1]}{start + i}{first[3]}" for i in range(count)]
    return (*every, names[-1].replace(names[_TRACED - 1], every[-1]))
