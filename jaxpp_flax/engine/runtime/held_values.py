"""What is known of a program's values while it is compiled: their shardings, some of which XLA is still to choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import RankMeshes, canonical, spec_on
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.program.specs import uses_host_memory
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler, Waiting
from jaxpp_flax.engine.tracing.ir import struct_of

__all__ = ["AllHeld", "Compiling", "Held", "explicit_spec", "held_after", "seem_alike", "spec_in_type"]


@dataclass(frozen=True, eq=False)
class Held:
    """What is known of a value; compared by identity.

    One object stands for the values of all microbatches: runs of a task that read the same objects make the same
    objects. So each run only needs a lookup. `found` is the spec, or a function that returns it: the task that makes
    the value may still be compiled, by another process or by a thread of this one (then it is `maker`). `rank` is that
    task's rank, None for an argument of the step.
    """

    found: PartitionSpec | Callable[[], PartitionSpec]
    aval: Any = None
    rank: int | None = None
    maker: Compiling | None = None

    @property
    def is_known(self) -> bool:
        """True if `spec` does not wait for a thread."""
        return isinstance(self.found, PartitionSpec) or self.maker is None or self.maker.is_done

    @cached_property
    def spec(self) -> PartitionSpec:
        return self.found if isinstance(self.found, PartitionSpec) else self.found()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def local_bytes(self, mesh: RankMeshes) -> int:
        """Return the bytes of each device's part; 0 for an argument that is passed on."""
        if self.rank is None:
            return 0
        shape = NamedSharding(mesh.unstack[self.rank], self.spec).shard_shape(self.shape)
        return math.prod(shape) * int(getattr(self.aval.dtype, "itemsize", 0))


AllHeld: TypeAlias = "tuple[Held, ...]"


@dataclass(eq=False)
class Compiling:
    """A task on several devices: it is lowered once the specs of its inputs are known.

    `pins` pairs an output with the input whose spec it has; `wanted` holds the specs of other outputs that are known
    before, and XLA chooses the rest. A call waits for the executable. A task that donates and has values in host memory
    is compiled again with XLA's choice.
    """

    compiler: TaskCompiler[Any]
    task: ProgramTask
    inputs: AllHeld
    wanted: Sequence[PartitionSpec | None]
    pins: Mapping[int, int]
    started: Waiting | None = None

    @cached_property
    def _waits_for(self) -> tuple[Compiling, ...]:
        makers = (None if held.is_known else held.maker for held in self.inputs)
        return tuple(dict.fromkeys(maker for maker in makers if maker is not None))

    @property
    def can_start(self) -> bool:
        """True if `start` does not wait for a thread."""
        return all(maker.is_done for maker in self._waits_for)

    @property
    def is_done(self) -> bool:
        return self.started is not None and self.started.is_done()

    def start(self) -> Waiting:
        """Lower the task, and let a thread compile it; first wait for the specs of its inputs."""
        if self.started is None:
            out_specs = list(self.wanted)
            for output, source in self.pins.items():
                out_specs[output] = self.inputs[source].spec
            self.started = self._started(out_specs)
        return self.started

    def __call__(self) -> Any:
        _ = self.specs
        return self.start()()

    @cached_property
    def specs(self) -> list[PartitionSpec]:
        """The specs of the outputs; wait for the executable."""
        specs = _output_specs(self.start()(), self.task, self.compiler.mesh)
        if None in specs:  # no PartitionSpec can say XLA's choice: ask for P() instead
            self.started = self._started([s or PartitionSpec() for s in specs])
            specs = _output_specs(self.started(), self.task, self.compiler.mesh)
        elif self._donates_later:
            self.started = self._started(specs)
        return [s or PartitionSpec() for s in specs]

    @property
    def _donates_later(self) -> bool:
        """True if the task is compiled twice: it could donate nothing until all specs were known."""
        open_results = any(s is None and i not in self.pins for i, s in enumerate(self.wanted))
        return bool(self.task.donate) and open_results and uses_host_memory(self.task)

    def _started(self, out_specs: Sequence[PartitionSpec | None]) -> Waiting:
        return self.compiler.start(self.task, [held.spec for held in self.inputs], out_specs)

    def results(self) -> AllHeld:
        """Return what is known of the outputs, before the executable is there."""
        found: list[Held] = []
        for i, atom in enumerate(self.task.graph.outputs):
            pinned = self.inputs[self.pins[i]] if i in self.pins else None
            spec = pinned.found if pinned is not None else self.wanted[i]
            if isinstance(spec, PartitionSpec):
                found.append(Held(canonical(spec), atom.aval, self.task.rank))
            elif pinned is None:
                found.append(Held(partial(lambda i: self.specs[i], i), atom.aval, self.task.rank, self))
            elif pinned.rank == self.task.rank:
                found.append(pinned)  # the same object, so that the next run is seen to be like this one
            else:
                found.append(replace(pinned, aval=atom.aval, rank=self.task.rank))
        return tuple(found)


def held_after(task: ProgramTask, found: Sequence[PartitionSpec | Callable[[], PartitionSpec]]) -> AllHeld:
    """Return what is known of a task's outputs."""
    return tuple(Held(spec, atom.aval, task.rank) for spec, atom in zip(found, task.graph.outputs, strict=True))


def spec_in_type(aval: Any) -> PartitionSpec:
    """Return the spec in a type on an Explicit mesh; on an Auto mesh, the spec of a whole array."""
    typed = struct_of(aval).sharding
    return PartitionSpec() if typed is None else canonical(typed.spec)


def explicit_spec(aval: Any, mesh: Mesh) -> PartitionSpec | None:
    """Return the spec in a type, on a mesh with Explicit axes only; None if XLA chooses.

    It must be asked for: without, XLA may choose another one for the results of a `shard_map`.
    """
    typed = struct_of(aval).sharding
    if typed is None or set(mesh.axis_types) != {AxisType.Explicit} or typed.spec.unreduced or typed.spec.reduced:
        return None
    return canonical(typed.spec)


def seem_alike(one: Held, other: Held) -> bool:
    """Return whether two values are known to have one partition; wait for nothing."""
    return one is other or (one.is_known and other.is_known and canonical(one.spec) == canonical(other.spec))


def _output_specs(compiled: Any, task: ProgramTask, mesh: RankMeshes) -> list[PartitionSpec | None]:
    submesh = mesh.unstack[task.rank]
    shapes = [tuple(atom.aval.shape) for atom in task.graph.outputs]
    return [spec_on(submesh, s, shape) for s, shape in zip(compiled.output_shardings, shapes, strict=True)]
