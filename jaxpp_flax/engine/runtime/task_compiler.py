"""One compilation for each distinct task, one executable for each device set.

A task is traced and lowered under the submesh's abstract mesh, so that identical stages on different ranks share the
lowering. XLA compiles it for one rank's devices, in a thread, and the executable is copied for the other ranks'. A task
is lowered and compiled for each rank if it has a callback to the host, or another operation that JAX lowers only for
known devices.

A task whose values have other layouts than JAX's default is lowered for the devices of the first rank that has it: only
then JAX takes layouts. So it is for devices that are only described: JAX would compile an abstract mesh for the default
backend. Their other ranks share what XLA says of it, since nothing runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, Generic, TypeVar

import jax
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat import needs_devices, platform_of, trace_context
from jaxpp_flax._compat_executables import Original, compile_original, compile_settings
from jaxpp_flax._compat_texts.errors import lacks_backend
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import RankMeshes
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.program.specs import usable_donations, uses_host_memory
from jaxpp_flax.engine.runtime.layouts import DEFAULTS, TaskLayouts, layouts_pay
from jaxpp_flax.engine.runtime.refusals import refusals_named
from jaxpp_flax.engine.tracing.graph_text import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Atom, Graph, everywhere, memory_kind_of, struct_of

__all__ = ["TaskCompiler"]

MeshT = TypeVar("MeshT", bound=RankMeshes)


@dataclass(eq=False)
class _Distinct:
    """A distinct task: compiled by a thread for the first rank that has it, and copied for the others.

    A call of `original` and of the `executables`, which stand by devices, waits for the result.
    """

    original: Callable[[], Original]
    executables: dict[Any, Callable[[], Any]] = field(default_factory=dict)


@dataclass
class TaskCompiler(Generic[MeshT]):
    """Lowers and compiles each distinct task once.

    `options` are XLA's, as `jax.jit` takes them in `compiler_options`; `rank_options` replaces them for some ranks.
    `lowerings`, `compilations` (by XLA) and `executables` (compiled, or copied for other devices) are counters. They
    grow with the number of distinct tasks, never with the number of microbatches.
    """

    mesh: MeshT
    options: Mapping[str, Any] | None = None
    rank_options: Mapping[int, Mapping[str, Any]] = field(default_factory=dict[int, Mapping[str, Any]])
    compilations: int = 0
    _keys: Fingerprinter = field(default_factory=Fingerprinter)  # tells equal tasks
    _for_devices: dict[int, bool] = field(default_factory=dict[int, bool])  # by the key of a graph
    _distinct: dict[Hashable, _Distinct] = field(default_factory=dict[Hashable, _Distinct])
    _choices: dict[Hashable, Callable[[], Original] | tuple[Format, ...]] = field(default_factory=dict[Hashable, Any])

    @property
    def lowerings(self) -> int:
        return len(self._distinct)

    @property
    def executables(self) -> int:
        return sum(len(distinct.executables) for distinct in self._distinct.values())

    @cached_property
    def chooses_layouts(self) -> bool:
        """Whether `start` may be asked to let XLA choose layouts."""
        return layouts_pay(self.mesh.rank_devices(0)[0])

    def start(
        self,
        task: ProgramTask,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec | None],
        layouts: TaskLayouts = DEFAULTS,
    ) -> Callable[[], Any]:
        """Let a thread compile a task for its rank's devices; a call of the result waits for the executable.

        `None` in `out_specs` leaves the choice to XLA.
        """
        mesh, shared = self._lowering_mesh(task, layouts)
        key = self._key(shared, task, in_specs, out_specs, layouts)
        lower = partial(self._lower, task, mesh, in_specs, out_specs, layouts)
        distinct = self._distinct.get(key)
        if distinct is None:
            distinct = self._distinct[key] = _Distinct(self._compile_for(lower(), task, in_specs))
        devices = self.mesh.rank_devices(task.rank)
        if devices not in distinct.executables:
            distinct.executables[devices] = cache(partial(self._executable, distinct, task, in_specs, lower))
        return distinct.executables[devices]

    def choose(
        self,
        task: ProgramTask,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec | None],
        layouts: TaskLayouts,
    ) -> Callable[[], Sequence[Format]]:
        """Let a thread compile a task only to find the layouts that XLA chooses; a call of the result waits for them.

        XLA chooses the layouts of all results if it may choose that of one. So what comes out is no executable to run:
        `start` compiles the task again, for the layouts that are wanted of these.
        """
        task = replace(task, donate=task.donate - layouts.refused_donations(task.graph))
        mesh, shared = self._lowering_mesh(task, layouts)
        key = self._key(shared, task, in_specs, out_specs, layouts)
        if key not in self._choices:
            lowered = self._lower(task, mesh, in_specs, out_specs, layouts)
            self._choices[key] = self._compile_for(lowered, task, in_specs)

        def formats() -> Sequence[Format]:
            choice = self._choices[key]
            if callable(choice):  # keep no executable
                choice = self._choices[key] = tuple(choice().compiled.output_formats)
            return choice

        return formats

    def _key(
        self,
        shared: Mesh | AbstractMesh,
        task: ProgramTask,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec | None],
        layouts: TaskLayouts,
    ) -> Hashable:
        """Return what a compilation depends on; `shared` is the mesh whose ranks share it."""
        options = self.rank_options.get(task.rank, self.options)
        # JAX's settings at that time change how some primitives (random bits, say) are lowered.
        return (
            shared, self._keys.graph(task.graph), tuple(in_specs), tuple(out_specs), layouts, task.donate,
            trace_context(), tuple(sorted((options or {}).items())),
        )  # fmt: skip

    def original_of(self, executable: Any) -> Original | None:
        """Return what XLA compiled, of which an executable may be a copy; None for one that is not this compiler's."""
        for distinct in self._distinct.values():
            if any(executable_of() is executable for executable_of in distinct.executables.values()):
                return distinct.original()
        return None

    def _executable(
        self, distinct: _Distinct, task: ProgramTask, in_specs: Sequence[PartitionSpec], lower: Callable[[], Any]
    ) -> Any:
        """Return the copy for a rank, which takes a twentieth of the time; or compile what cannot be copied."""
        if self.mesh.is_described:
            return distinct.original().compiled
        copy = distinct.original().copy_for(self.mesh.unstack[task.rank])
        return self._compile_for(lower(), task, in_specs)().compiled if copy is None else copy

    def _compile_for(
        self, lowered: Any, task: ProgramTask, in_specs: Sequence[PartitionSpec]
    ) -> Callable[[], Original]:
        """Let a thread compile a lowered task for its rank; a call of the result waits for it."""
        self.compilations += 1
        devices, options = self.mesh.rank_devices(task.rank), self.rank_options.get(task.rank, self.options)

        def compile_now() -> Original:
            began = time.perf_counter()
            with context_mesh(None), refusals_named(task, self.mesh.unstack[task.rank], in_specs):
                original = compile_original(lowered, devices, options)
            return replace(original, seconds=time.perf_counter() - began)

        # Settings that hold in this thread alone are not those of the thread that would compile.
        settings = compile_settings()
        future = self._compiling.submit(lambda: compile_now() if compile_settings() == settings else None)
        return cache(lambda: future.result() or compile_now())

    @cached_property
    def _compiling(self) -> ThreadPoolExecutor:
        # From Python 3.13 on, the cores of this process alone.
        return ThreadPoolExecutor(getattr(os, "process_cpu_count", os.cpu_count)(), "compiling")

    def _lowering_mesh(
        self, task: ProgramTask, layouts: TaskLayouts
    ) -> tuple[Mesh | AbstractMesh, Mesh | AbstractMesh]:
        """Return the mesh for which a task is lowered, and the one whose ranks share what is compiled of it."""
        mesh = self.mesh.unstack[task.rank]
        if self.mesh.is_described:
            return mesh, mesh.abstract_mesh
        number = self._keys.graph(task.graph)
        if number not in self._for_devices:
            self._for_devices[number] = any(needs_devices(e.primitive) for e in everywhere(task.graph))
        if self._for_devices[number]:
            return mesh, mesh
        return mesh.abstract_mesh if layouts == DEFAULTS else mesh, mesh.abstract_mesh

    def _lower(
        self,
        task: ProgramTask,
        mesh: Mesh | AbstractMesh,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec | None],
        layouts: TaskLayouts,
    ) -> Any:
        # A counter that began as a Python number stays weakly typed: the other operand decides the dtype.
        avals = [struct_of(v.aval).update(weak_type=v.aval.weak_type) for v in task.graph.inputs]
        # With two kinds of memory, JAX needs the kind of every value: it pairs donated inputs with results by kind.
        mixed = uses_host_memory(task)
        if mixed and mesh.size == 1:
            out_specs = [spec or PartitionSpec() for spec in out_specs]

        def sharding(atom: Atom, spec: PartitionSpec) -> NamedSharding:
            kind = memory_kind_of(atom.aval) or "device" if mixed else None
            return NamedSharding(mesh, spec, memory_kind=kind)

        platform = platform_of(self.mesh.rank_devices(task.rank)[0])
        with context_mesh(mesh.abstract_mesh):
            jitted = jax.jit(
                _named(task.graph, task.name),
                in_shardings=layouts.of_inputs(map(sharding, task.graph.inputs, in_specs)),
                out_shardings=layouts.of_outputs(
                    None if spec is None else sharding(atom, spec)
                    for atom, spec in zip(task.graph.outputs, out_specs, strict=True)
                ),
                donate_argnums=usable_donations(task, self.mesh.unstack[task.rank], in_specs, out_specs),
                keep_unused=True,
            )
            traced = jitted.trace(*avals)
            try:
                return traced.lower(lowering_platforms=(platform,))
            except RuntimeError as error:
                if self.mesh.is_described and lacks_backend(error):
                    raise _needs_attached(task, platform) from error
                raise


def _needs_attached(task: ProgramTask, platform: str) -> NotImplementedError:
    """Return the error for a call of the host, which JAX lowers for attached GPUs alone."""
    calls = (e for e in everywhere(task.graph) if e.effects or needs_devices(e.primitive))
    names = dict.fromkeys(equation.primitive.name for equation in calls)
    return NotImplementedError(
        f"the task {task.name} on rank {task.rank} calls the host ({', '.join(names)}), which JAX compiles for "
        f"{platform} only where such a device is attached. Take this call out of the step for devices that are only "
        "described: `jax.debug.print`, a callback."
    )


def _named(graph: Graph, name: str) -> Callable[..., tuple[Any, ...]]:
    def run(*operands: Any) -> tuple[Any, ...]:
        return tuple(graph.run(*operands))

    run.__name__ = run.__qualname__ = name  # the name in a profiler
    return run
