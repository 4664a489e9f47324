"""The layouts in memory of values that tasks of one rank hand to one another.

A result of a compiled program has JAX's default layout, unless it is asked for in another one. The matrix units of a
TPU make the values of attention in other layouts, so XLA would bring them into the default one at the end of a forward
task, and back in its backward. So the compiler of the task that makes such a value chooses, and the tasks that read it
are compiled for that choice.

XLA chooses the layouts of all results if it may choose that of one, and what leaves the rank needs the default. So a
task that makes such values compiles twice: for the choice, and for the chosen layouts of these values alone.

Only for values with more than three dimensions. The features of positions have three: what the forward saves with a
layout of its own for them, the backward loses, and tasks without other values compile once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding

from jaxpp_flax.engine.program.program import Program, Run
from jaxpp_flax.engine.tracing.ir import Graph, memory_kind_of

__all__ = ["DEFAULTS", "MaybeLayout", "TaskLayouts", "layouts_pay", "left_to_compilers"]

_PLATFORMS = frozenset({"tpu"})  # XLA for CPU and GPU mostly keeps to the default, and a reader would wait for nothing
_FEATURES_OF_POSITIONS = 3

MaybeLayout: TypeAlias = Any
"""A `Layout`; `Layout.AUTO`, which the compiler chooses; or None, JAX's default."""


@dataclass(frozen=True)
class TaskLayouts:
    """The layouts of a task's inputs and outputs; an empty tuple stands for defaults alone."""

    inputs: tuple[MaybeLayout, ...] = ()
    outputs: tuple[MaybeLayout, ...] = ()

    @classmethod
    def of(cls, inputs: Sequence[MaybeLayout], outputs: Sequence[MaybeLayout]) -> TaskLayouts:
        """Return the layouts in the one way in which equal ones compare equal."""
        return cls(*(tuple(side) if any(layout is not None for layout in side) else () for side in (inputs, outputs)))

    def refused_donations(self, graph: Graph) -> set[int]:
        """Return the inputs that JAX lets no task donate: they are like a result whose layout the compiler chooses."""
        free = {
            (atom.aval.shape, atom.aval.dtype)
            for atom, wish in zip(graph.outputs, self.outputs, strict=True)
            if wish is Layout.AUTO
        }
        return {position for position, v in enumerate(graph.inputs) if (v.aval.shape, v.aval.dtype) in free}

    def chosen_from(self, formats: Sequence[Format]) -> TaskLayouts:
        """Return these layouts, with those of `formats` for the outputs that were left to the compiler."""
        pairs = zip(self.outputs, formats, strict=True)
        return TaskLayouts(self.inputs, tuple(form.layout if wish is Layout.AUTO else wish for wish, form in pairs))

    def of_inputs(self, shardings: Iterable[NamedSharding]) -> tuple[NamedSharding | Format, ...]:
        """Return how `jax.jit` is told the shardings and layouts of inputs."""
        return _with_layouts(tuple(shardings), self.inputs)

    def of_outputs(self, shardings: Iterable[NamedSharding | None]) -> tuple[NamedSharding | Format | None, ...]:
        """Return how `jax.jit` is told the shardings and layouts of outputs."""
        return _with_layouts(tuple(shardings), self.outputs)


DEFAULTS = TaskLayouts()


def layouts_pay(device: Any) -> bool:
    """Return whether compilers for such a device choose layouts.

    Example:
      >>> layouts_pay(jax.devices("cpu")[0])
      False
    """
    return device.platform in _PLATFORMS


def left_to_compilers(program: Program) -> dict[int, frozenset[int]]:
    """Return by task the outputs whose layout the task's compiler chooses.

    Tasks of the same rank alone read them, as often as they are made, and at inputs that read nothing else: so one
    executable of each reader is enough.
    """
    instructions = program.instructions
    sources = defaultdict[tuple[int, int], set[tuple[int, int] | None]](set)
    leaving = set[tuple[int, int] | None]({None})
    for run in instructions:
        if not isinstance(run, Run):
            continue
        for position, value in enumerate(run.inputs):
            maker, output = program.maker(value)
            if isinstance(maker, Run) and (maker.microbatch < 0) == (run.microbatch < 0):
                sources[run.task, position].add((maker.task, output))
            else:
                sources[run.task, position].add(None)
        for output, value in enumerate(run.outputs):
            readers = (instructions[number] for number in program.readers.get(value, ()))
            if value in program.returned or not all(isinstance(reader, Run) for reader in readers):
                leaving.add((run.task, output))
    shared = {source for together in sources.values() if len(together) > 1 for source in together}
    left = defaultdict[int, set[int]](set)
    for source in {source for together in sources.values() for source in together} - shared - leaving:
        if source is not None and _may_choose(program.tasks[source[0]].graph.outputs[source[1]].aval):
            left[source[0]].add(source[1])
    return {task: frozenset(outputs) for task, outputs in left.items()}


def _may_choose(aval: Any) -> bool:
    return (
        len(aval.shape) > _FEATURES_OF_POSITIONS
        and memory_kind_of(aval) is None
        and not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    )


def _with_layouts(shardings: tuple[Any, ...], layouts: tuple[MaybeLayout, ...]) -> tuple[Any, ...]:
    return tuple(
        sharding if layout is None else Format(layout, sharding)
        for sharding, layout in itertools.zip_longest(shardings, layouts)
    )
