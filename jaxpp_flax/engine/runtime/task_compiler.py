"""One compilation for each distinct task, one executable for each device set.

A task is traced and lowered under the submesh's abstract mesh, so that identical stages on different ranks share the
lowering. XLA compiles it for one rank's devices, in a thread, and the executable is copied for the other ranks'. A task
is lowered and compiled for each rank if it has a callback to the host, or another operation that JAX lowers only for
known devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat import needs_devices, trace_context
from jaxpp_flax._compat_executables import Original, compile_original, compile_settings
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import RankMeshes
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.program.specs import usable_donations, uses_host_memory
from jaxpp_flax.engine.tracing.fingerprint import Fingerprinter
from jaxpp_flax.engine.tracing.ir import Atom, Graph, everywhere, memory_kind_of, struct_of

__all__ = ["TaskCompiler", "Waiting"]

MeshT = TypeVar("MeshT", bound=RankMeshes)


@dataclass(frozen=True, eq=False)
class Waiting:
    """Something that a thread makes: a call waits for it, and returns it.

    Args:
      future: gives it, or None: then the caller must make it.
      here: makes it in the caller's thread.
    """

    future: Future[Any]
    here: Callable[[], Any]

    @cached_property
    def _made(self) -> Any:
        made = self.future.result()
        return self.here() if made is None else made

    def __call__(self) -> Any:
        return self._made


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
    lowerings: int = 0
    compilations: int = 0
    executables: int = 0
    _keys: Fingerprinter = field(default_factory=Fingerprinter)  # tells equal tasks
    _lowered: dict[Hashable, Any] = field(default_factory=dict)
    _originals: dict[Hashable, Waiting] = field(default_factory=dict[Hashable, Waiting])  # by lowering
    _started: dict[Hashable, Waiting] = field(default_factory=dict[Hashable, Waiting])  # by lowering and devices
    _for_devices: dict[Hashable, bool] = field(default_factory=dict[Hashable, bool])

    def compile(
        self, task: ProgramTask, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None]
    ) -> Any:
        """Return the executable of a task on its rank's devices; `None` in `out_specs` leaves the choice to XLA."""
        return self.start(task, in_specs, out_specs)()

    def start(
        self, task: ProgramTask, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec | None]
    ) -> Waiting:
        """Let threads compile a task; a call of the result waits for its executable."""
        graph = self._keys.graph(task.graph)
        mesh = self._lowering_mesh(task, graph)
        # JAX's settings at that time change how some primitives (random bits, say) are lowered.
        key = (mesh, graph, tuple(in_specs), tuple(out_specs), task.donate, trace_context())
        options = self.rank_options.get(task.rank)
        optioned = key, None if options is None else tuple(sorted(options.items()))
        devices = self.mesh.rank_devices(task.rank)
        started = self._started.get((optioned, devices))
        if started is None:
            self.executables += 1
            lowered = self._lowered.get(key)
            if lowered is None:
                lowered = self._lowered[key] = self._lower(task, mesh, in_specs, out_specs)
                self.lowerings += 1
            started = self._started[optioned, devices] = self._start(optioned, lowered, task.rank)
        return started

    def _start(self, key: Hashable, lowered: Any, rank: int) -> Waiting:
        """Compile for the first rank; copy the executable for others, which takes a twentieth of the time."""
        original = self._originals.get(key)
        if original is None:
            original = self._originals[key] = self._compile_for(lowered, rank)
        mesh = self.mesh.unstack[rank]

        def copied() -> Any:
            found = original.future.result()
            return found and found.copy_for(mesh)

        def here() -> Any:
            copy = original().copy_for(mesh)
            return self._compile_for(lowered, rank)().compiled if copy is None else copy

        return Waiting(self._copying.submit(copied), here)

    def _compile_for(self, lowered: Any, rank: int) -> Waiting:
        """Let a thread compile a lowered task for a rank: an `Original`."""
        self.compilations += 1
        devices, options = self.mesh.rank_devices(rank), self.rank_options.get(rank, self.options)

        def here() -> Original:
            with context_mesh(None):
                return compile_original(lowered, devices, options)

        # Settings that hold in this thread alone are not those of the thread that would compile.
        settings = compile_settings()
        return Waiting(self._compiling.submit(lambda: here() if compile_settings() == settings else None), here)

    @cached_property
    def _compiling(self) -> ThreadPoolExecutor:
        # From Python 3.13 on, the cores of this process alone.
        return ThreadPoolExecutor(getattr(os, "process_cpu_count", os.cpu_count)(), "compiling")

    @cached_property
    def _copying(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(thread_name_prefix="copying")  # of its own: most of these threads wait

    def _lowering_mesh(self, task: ProgramTask, graph: Hashable) -> Mesh | AbstractMesh:
        """Return a mesh without devices, so that ranks of one shape share a lowering; else the rank's own mesh."""
        mesh = self.mesh.unstack[task.rank]
        if graph not in self._for_devices:
            self._for_devices[graph] = any(needs_devices(e.primitive) for e in everywhere(task.graph))
        return mesh if self._for_devices[graph] else mesh.abstract_mesh

    def _lower(
        self,
        task: ProgramTask,
        mesh: Mesh | AbstractMesh,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec | None],
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

        with context_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh):
            jitted = jax.jit(
                _named(task.graph, task.name),
                in_shardings=tuple(map(sharding, task.graph.inputs, in_specs)),
                out_shardings=tuple(
                    None if spec is None else sharding(atom, spec)
                    for atom, spec in zip(task.graph.outputs, out_specs, strict=True)
                ),
                donate_argnums=usable_donations(task, self.mesh.unstack[task.rank], in_specs, out_specs),
                keep_unused=True,
            )
            traced = jitted.trace(*avals)
            platform = self.mesh.rank_devices(task.rank)[0].platform
            return traced.lower(lowering_platforms=(platform,))


def _named(graph: Graph, name: str) -> Callable[..., tuple[Any, ...]]:
    def run(*operands: Any) -> tuple[Any, ...]:
        return tuple(graph.run(*operands))

    run.__name__ = run.__qualname__ = name  # the name in a profiler
    return run
