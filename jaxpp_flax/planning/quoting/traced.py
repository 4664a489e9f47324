"""A model's step, traced on one device with microbatches of a few sizes: its blocks for any size and any axes.

If each number of a block is linear in the size of a microbatch, as a third size tells, two traces give all of them. If
not, every size that is asked for is traced. With `depth`, a model of three blocks is traced, and the middle one stands
for all that the whole model has more.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from jaxpp_flax.engine.tracing.graph_text import Fingerprinter
from jaxpp_flax.messages import known_names
from jaxpp_flax.planning.predicted.blocks import Holding
from jaxpp_flax.planning.quoting.facts import TaskFacts
from jaxpp_flax.planning.quoting.tracing.lines import Pair, are_alike, between, is_on_line, mixed_work
from jaxpp_flax.planning.quoting.tracing.one_size import Axes, Trace, examples_of, trace_step
from jaxpp_flax.planning.stages.policies import AssignmentError

__all__ = ["Axes", "TracedModel", "trace_model"]

_TRACED = 3  # blocks of a model that is traced with `depth`: the first, one that is repeated, and the last
_PER_DEVICE = ("parameters", "masters", "gradients", "optimizer", "gathered")  # of FSDP


@dataclass(frozen=True, eq=False)
class TracedModel:
    """The blocks of a whole model, for any microbatch and any axes.

    Args:
      traces: the step with microbatches of two sizes.
      trace: traces the step with microbatches of any size.
      is_linear: whether the two traces give all other sizes.
      names: of all blocks, and of the work after the last mark.
      global_batch: the examples of a step.
      tokens: of an example; 1 if it has none.
    """

    traces: tuple[Trace, Trace]
    trace: Callable[[int], Trace]
    is_linear: bool
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
        one, two = (trace.work(axes.of_work) for trace in self.traces) if self.is_linear else ([], [])
        if self.is_linear and are_alike(one, two):
            found = mixed_work(one, two, self.share(microbatch))
        else:
            found = self.trace(microbatch * axes.data).work(axes.of_work)
        return self._repeated(found)

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
        if not self.is_linear:
            return self.trace(microbatch * axes.data).holdings(axes)
        one, two = (trace.holdings(axes) for trace in self.traces)
        share = self.share(microbatch)
        fixed = ("data",)  # all microbatches together
        return Counter({
            key: one[key] if key[0] in fixed else between(one[key], two[key], share) for key in one | two
        })  # fmt: skip

    def updates(self, axes: Axes) -> list[tuple[tuple[int, ...], TaskFacts]]:
        """Return the products in the optimizer's update of each parameter, with the blocks that hold the parameter."""
        return [(of, facts) for where, facts in self.traces[0].updates(axes) for of in self._everywhere(where)]

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

    def sent(self, microbatch: int, data: int = 1) -> list[float]:
        """Return the bytes that cross a cut before each block (0 before the first), on each of the `data` devices."""
        return self._each(lambda trace: trace.sent(data), microbatch, data)

    def passing(self, microbatch: int, data: int = 1) -> list[float]:
        """Return the bytes of them that the block before the cut does not keep."""
        return self._each(lambda trace: trace.passing(data), microbatch, data)

    def _each(self, of: Callable[[Trace], Sequence[float]], microbatch: int, data: int) -> list[float]:
        if not self.is_linear:
            return self._repeated(of(self.trace(microbatch * data)))
        pairs = zip(*map(of, self.traces), strict=True)
        return self._repeated([between(a, b, self.share(microbatch)) for a, b in pairs])

    def _repeated(self, traced: Sequence[Any]) -> list[Any]:
        """Return what belongs to each block of the whole model."""
        every = list(traced)
        return [*every[:1], *every[1:2] * (1 + self._more), *every[2:]] if self._more else every

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
    batch = examples_of(make, more)
    sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    if len(sizes) < 2:
        raise ValueError("the batch has 1 example, which no layout divides. Give the batch of a whole step.")
    chosen = sizes[1:3] if len(sizes) > 2 else sizes  # an example alone may be traced without its dimension
    first = chosen[0]

    @cache
    def trace(size: int) -> Trace:
        with warnings.catch_warnings():
            if size != first:  # the first size has warned of the model
                warnings.simplefilter("ignore")
            return trace_step(make, more, batch, size)

    if "expert" in trace(first).annotated and len(sizes) > 3:
        chosen = sizes[-3:-1]  # the axis may cut examples: only sizes that it divides show this
    one, two = map(trace, chosen)
    names = one.names if count is None else _repeated(one, count)
    ends = [size for size in (sizes[-1], sizes[1]) if size not in chosen] or [sizes[0]]
    return TracedModel(
        traces=(one, two), trace=trace, is_linear=all(_is_linear(one, two, trace(size)) for size in ends), names=names,
        global_batch=batch, tokens=one.step.units // batch,
    )  # fmt: skip


def _is_linear(one: Trace, two: Trace, three: Trace) -> bool:
    """Return whether the numbers of the third size lie on the lines through those of the other two."""
    share = (three.microbatch - one.microbatch) / (two.microbatch - one.microbatch)
    every = one, two, three
    return is_on_line([trace.work(Axes()) for trace in every], [trace.nbytes for trace in every], share)


def _depth_of(make: Callable[..., Any], depth: str) -> int:
    parameters = inspect.signature(make).parameters
    if depth not in parameters:
        known = [name for name, of in parameters.items() if of.kind not in (of.VAR_POSITIONAL, of.VAR_KEYWORD)]
        raise ValueError(
            f"depth={depth!r}: the factory has no parameter of this name.{known_names(depth, known)} Name the one "
            "whose default is the number of blocks of the whole model."
        )
    default = parameters[depth].default
    if not isinstance(default, int) or default < _TRACED:
        found = "it has no default" if default is inspect.Parameter.empty else f"it is {default!r}"
        raise ValueError(
            f"depth={depth!r}: the default of this parameter must be the number of blocks of the whole model, at least "
            f"{_TRACED}; {found}."
        )
    return default


def _repeated(trace: Trace, count: int) -> tuple[str, ...]:
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
