"""Executables for a program's tasks, and the shardings of what they read and write.

Shardings inside a submesh are found task by task: a task is compiled with the shardings of its inputs, and XLA chooses
the shardings of its outputs, which the next task reads. Where a rank has one device, or all shardings are part of the
types, nothing is chosen: no task waits for another one, and threads compile them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, TypeAlias

from jax.experimental.layout import Layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import RankMeshes, canonical, carried_over
from jaxpp_flax.engine.program.program import Program, ProgramTask, Run, Transfer
from jaxpp_flax.engine.program.specs import shard_bytes, specs_wanted, uses_host_memory, with_own_results
from jaxpp_flax.engine.runtime.layouts import MaybeLayout, TaskLayouts, left_to_compilers
from jaxpp_flax.engine.runtime.startup import SharedSpecs, compare_programs
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram
from jaxpp_flax.engine.tracing.memory import typed_sharding

__all__ = ["Executables", "compile_program"]


@dataclass(frozen=True, eq=False)
class Held:
    """What is known of a value; one object stands for the values of all microbatches.

    `spec_source` is the spec, or a function that returns it: another process may still compile the task that makes the
    value. `rank` is that task's rank, None for an argument of the step. `chosen` waits for the layout that the task's
    compiler chooses; None if the value has JAX's default layout.
    """

    spec_source: PartitionSpec | Callable[[], PartitionSpec]
    aval: Any = None
    rank: int | None = None
    chosen: Callable[[], MaybeLayout] | None = None

    @cached_property
    def spec(self) -> PartitionSpec:
        return self.spec_source if isinstance(self.spec_source, PartitionSpec) else self.spec_source()

    @cached_property
    def partition(self) -> PartitionSpec:
        """The spec in one standard way, for comparing."""
        return canonical(self.spec)

    @cached_property
    def layout(self) -> MaybeLayout:
        return None if self.chosen is None else self.chosen()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)

    def local_bytes(self, mesh: RankMeshes) -> int:
        """Return the bytes of each device's part; 0 for an argument that is passed on."""
        if self.rank is None:
            return 0
        return shard_bytes(self.aval, NamedSharding(mesh.unstack[self.rank], self.spec))


AllHeld: TypeAlias = "tuple[Held, ...]"


@dataclass(frozen=True)
class Executables:
    """A program ready to run: an executable for each task, and the sharding of each value that is made.

    `program` is the given program, with tasks added at its end for results that need another partition. `held` has the
    spec and the type of each value, and `nbytes` the bytes of each device's part; 0 for an argument, wherever it goes.
    `in_specs` and `in_avals` stand for the program's arguments, `out_specs` for its results.
    `variants` maps an instruction to its executable, for runs whose inputs have another partition than in the task's
    first run. `distributed` is None if all ranks of `mesh` are of this process.
    """

    program: Program
    mesh: RankMeshes
    distributed: DistributedProgram | None
    tasks: tuple[Any, ...]
    in_specs: tuple[PartitionSpec, ...]
    in_avals: tuple[Any, ...]
    out_specs: tuple[PartitionSpec | None, ...]
    held: dict[int, Held]
    nbytes: dict[int, int]
    variants: dict[int, Any] = field(default_factory=dict[int, Any])


def compile_program(
    program: Program,
    compiler: TaskCompiler[Any],
    argument_specs: Sequence[PartitionSpec],
    result_specs: Sequence[PartitionSpec | None],
    argument_avals: Sequence[Any],
    *,
    alone: bool = False,
) -> Executables:
    """Compile the tasks of this process's ranks in program order, finding shardings on the way.

    With several processes, all of them call this at the same point; they compare their programs first.

    Args:
      program: with donations and frees.
      compiler: shared by all programs of one step function, so that identical tasks compile once.
      argument_specs, argument_avals: for each argument of the program.
      result_specs: for each result; `None` keeps the spec that XLA chose.
      alone: take no part of the other processes; this one compiles every task.

    Raises:
      ProgramMismatchError: if the processes have other programs or settings, and the errors of `compare_programs`.
    """
    distributed = None if alone else compare_programs(compiler.mesh, program, argument_specs, result_specs)
    if distributed is not None:
        program.check_waits(compiler.mesh.rank_processes)
    with context_mesh(None):  # no mesh around the call may change what is compiled
        walk = _Walk(program, compiler, argument_specs, result_specs, argument_avals, distributed)
        for number, instruction in enumerate(program.instructions):
            if isinstance(instruction, Run):
                walk.run(number, instruction)
            elif isinstance(instruction, Transfer):
                walk.transfer(instruction)
        walk.finish()
        return walk.executables()


@dataclass(eq=False)
class _Walk:
    """Goes through a program in order and notes what is known of each value."""

    program: Program
    compiler: TaskCompiler[Any]
    argument_specs: Sequence[PartitionSpec]
    result_specs: Sequence[PartitionSpec | None]
    argument_avals: Sequence[Any]
    distributed: DistributedProgram | None
    outputs_of: dict[int, AllHeld] = field(
        default_factory=dict
    )  # the outputs of each task, as its first run makes them
    compiled: dict[int, Callable[[], Any] | None] = field(default_factory=dict)  # for each task's first run
    executable_of: dict[Hashable, Callable[[], Any] | None] = field(
        default_factory=dict
    )  # by task and its inputs' partitions
    variants: dict[int, Callable[[], Any] | None] = field(default_factory=dict[int, Any])

    def __post_init__(self) -> None:
        program = self.program
        self.mesh: RankMeshes = self.compiler.mesh
        # How the tasks of other processes partition their results.
        self.shared = None if self.distributed is None else SharedSpecs(self.distributed, self.mesh)
        self.mesh_shapes = [dict(mesh.shape) for mesh in self.mesh.unstack]
        self.wanted = specs_wanted(program, self.result_specs, self._alike)
        self.left = left_to_compilers(program) if self.compiler.chooses_layouts else {}
        self.held: dict[int, Held] = dict.fromkeys(program.indices.values(), Held(PartitionSpec()))
        for ranks, spec, aval in zip(program.arguments, self.argument_specs, self.argument_avals, strict=True):
            self.held.update(dict.fromkeys(ranks.values(), Held(spec, aval)))

    def run(self, number: int, run: Run) -> None:
        """Compile a run's task for the partition of its inputs; all runs partition their results as the first does.

        So the result's partition is one fact of a task, which other processes can be told.
        """
        task, shared = run.task, self.shared
        elsewhere = None if self.program.tasks[task].rank in self.mesh.local_ranks else shared
        # Within a loop all runs of a task are alike; other programs may read values that were made elsewhere.
        key = task, None if elsewhere is not None else tuple([self.held[value].partition for value in run.inputs])
        if key not in self.executable_of:
            if elsewhere is not None:
                self.executable_of[key], self.outputs_of[task] = None, self._made_elsewhere(task, elsewhere)
            elif task in self.outputs_of:
                self.executable_of[key], _ = self._compile(run, self.outputs_of[task])
            else:
                self.executable_of[key], self.outputs_of[task] = self._compile(run)
                if shared is not None and not self.program.tasks[task].out_specs:
                    shared.publish(self.program, task, [held.spec for held in self.outputs_of[task]])
        if self.executable_of[key] is not self.compiled.setdefault(task, self.executable_of[key]):
            self.variants[number] = self.executable_of[key]
        self.held.update(zip(run.outputs, self.outputs_of[task], strict=True))

    def _made_elsewhere(self, number: int, shared: SharedSpecs) -> AllHeld:
        """Return what a task on another process's rank makes; that process tells it when it has compiled."""
        task, of_other = self.program.tasks[number], partial(_spec_of_other, shared, self.program, number)
        return _held_after(task, task.out_specs or [partial(of_other, i) for i in range(len(task.graph.outputs))])

    def _compile(self, run: Run, fixed: AllHeld = ()) -> tuple[Callable[[], Any], AllHeld]:
        """Compile a run's task for what it reads; `fixed` is what its results must be, as another run makes them."""
        task = self.program.tasks[run.task]
        in_specs = [self.held[value].spec for value in run.inputs]
        out_specs = list(task.out_specs or [held.spec for held in fixed]) or list(map(self.wanted.get, run.outputs))
        if not fixed:
            for output, source in task.pins:
                out_specs[output] = in_specs[source]
        mesh = self.mesh.unstack[task.rank]
        # On one device nothing is partitioned; without inputs, only the outputs' shardings tell XLA the mesh.
        in_type = _spec_in_type if mesh.size == 1 or not task.graph.inputs else partial(_explicit_spec, mesh=mesh)
        out_specs = [
            in_type(atom.aval) if spec is None else spec  # P() is false
            for spec, atom in zip(out_specs, task.graph.outputs, strict=True)
        ]
        layouts = self._layouts(run, fixed)
        if Layout.AUTO in layouts.outputs:
            return self._compile_chosen(task, in_specs, out_specs, layouts)
        waiting = self.compiler.start(task, in_specs, out_specs, layouts)
        if None in out_specs:
            shardings = waiting().output_shardings
            out_specs = [
                _spec_of(sharding) if spec is None else spec
                for spec, sharding in zip(out_specs, shardings, strict=True)
            ]
            # No PartitionSpec may say XLA's choice; a task with values in host memory donates if all specs are known.
            if None in out_specs or (task.donate and uses_host_memory(task)):
                out_specs = [PartitionSpec() if spec is None else spec for spec in out_specs]
                waiting = self.compiler.start(task, in_specs, out_specs, layouts)
        return waiting, _held_after(task, [canonical(spec) for spec in out_specs if spec is not None])

    def _compile_chosen(
        self,
        task: ProgramTask,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec | None],
        layouts: TaskLayouts,
    ) -> tuple[Callable[[], Any], AllHeld]:
        """Compile a task for the layouts that its compiler chooses; this begins when the first of them is asked for."""
        formats = self.compiler.choose(task, in_specs, out_specs, layouts)
        if None in out_specs:
            out_specs = [
                _spec_of(form.sharding) or PartitionSpec() if spec is None else spec
                for spec, form in zip(out_specs, formats(), strict=True)
            ]

        @cache
        def started() -> tuple[TaskLayouts, Callable[[], Any]]:
            chosen = layouts.chosen_from(formats())
            return chosen, self.compiler.start(task, in_specs, out_specs, chosen)

        outputs = _held_after(task, [canonical(spec) for spec in out_specs if spec is not None])
        return lambda: started()[1](), tuple(
            replace(held, chosen=partial(_layout_of, started, output)) if wish is Layout.AUTO else held
            for output, (held, wish) in enumerate(zip(outputs, layouts.outputs, strict=True))
        )

    def _layouts(self, run: Run, fixed: AllHeld) -> TaskLayouts:
        """Return the layouts of what a run reads and makes, as far as its compiler is told."""
        left = self.left.get(run.task, frozenset())
        inputs = tuple([self.held[value].layout for value in run.inputs])
        chosen = [held.layout for held in fixed] or [Layout.AUTO] * len(run.outputs)
        return TaskLayouts.of(inputs, [layout if output in left else None for output, layout in enumerate(chosen)])

    def transfer(self, transfer: Transfer) -> None:
        for value, received in zip(transfer.sent, transfer.received, strict=True):
            held = self.held[value]
            if not self._alike(transfer):
                # Found only when it is read: another process may still compile the task that makes the value.
                carried = partial(_carried_over, held, self.mesh.unstack[transfer.target])
                held = replace(held, spec_source=carried, rank=None if held.rank is None else transfer.target)
            if wanted := self.wanted.get(received):  # P() is no wish: the sender may keep it partitioned
                held = replace(held, spec_source=wanted)
            self.held[received] = held

    def _alike(self, transfer: Transfer) -> bool:
        """Return whether both ends of a transfer have meshes of one shape; then a spec means the same on both."""
        return self.mesh_shapes[transfer.source] == self.mesh_shapes[transfer.target]

    def finish(self) -> None:
        """Add tasks for the results that need another partition."""
        results, end = self.program.results, len(self.program.instructions)
        wanted = [
            (position, rank)
            for position, (result, spec) in enumerate(zip(results, self.result_specs, strict=True))
            for rank, value in (result.items() if isinstance(result, dict) else ())
            if not self._is_partitioned(rank, self.held[value], spec)
        ]
        avals = {results[position][rank]: self.held[results[position][rank]].aval for position, rank in wanted}
        self.program = with_own_results(self.program, avals, wanted)
        for number, run in enumerate(self.program.instructions[end:], end):
            if isinstance(run, Run):
                specs = [self.result_specs[position] for position, rank in wanted if rank == run.rank]
                self.wanted.update((v, spec) for v, spec in zip(run.outputs, specs, strict=True) if spec is not None)
                self.run(number, run)

    def _is_partitioned(self, rank: int, held: Held, spec: PartitionSpec | None) -> bool:
        if spec is None:
            return True
        mesh = self.mesh.unstack[rank]
        return NamedSharding(mesh, held.spec).is_equivalent_to(NamedSharding(mesh, spec), len(held.shape))

    def executables(self) -> Executables:
        """Collect the results."""
        sizes = {held: held.local_bytes(self.mesh) for held in dict.fromkeys(self.held.values())}
        results = zip(self.program.results, self.result_specs, strict=True)
        return Executables(
            program=self.program,
            mesh=self.mesh,
            distributed=self.distributed,
            tasks=tuple(compiled and compiled() for compiled in map(self.compiled.get, range(len(self.program.tasks)))),
            in_specs=tuple(self.argument_specs),
            in_avals=tuple(self.argument_avals),
            out_specs=tuple(
                self.held[next(iter(result.values()))].spec if isinstance(result, dict) else spec
                for result, spec in results
            ),
            held=self.held,
            nbytes={value: sizes[held] for value, held in self.held.items()},
            variants={number: compiled and compiled() for number, compiled in self.variants.items()},
        )


def _carried_over(held: Held, mesh: Mesh) -> PartitionSpec:
    return carried_over(held.spec, mesh, held.shape)


def _spec_of_other(shared: SharedSpecs, program: Program, task: int, output: int) -> PartitionSpec:
    return shared.of(program, task)[output]


def _held_after(task: ProgramTask, specs: Sequence[PartitionSpec | Callable[[], PartitionSpec]]) -> AllHeld:
    """Return what is known of a task's outputs."""
    return tuple(Held(spec, atom.aval, task.rank) for spec, atom in zip(specs, task.graph.outputs, strict=True))


def _layout_of(started: Callable[[], tuple[TaskLayouts, Any]], output: int) -> MaybeLayout:
    return started()[0].outputs[output]


def _spec_in_type(aval: Any) -> PartitionSpec:
    """Return the spec in a type on an Explicit mesh; on an Auto mesh, the spec of a whole array."""
    typed = typed_sharding(aval)
    return PartitionSpec() if typed is None else canonical(typed.spec)


def _explicit_spec(aval: Any, mesh: Mesh) -> PartitionSpec | None:
    """Return the spec in a type, on a mesh with Explicit axes only; None if XLA chooses.

    It must be asked for: without, XLA may choose another one for the results of a `shard_map`.
    """
    typed = typed_sharding(aval)
    if typed is None or set(mesh.axis_types) != {AxisType.Explicit} or typed.spec.unreduced or typed.spec.reduced:
        return None
    return canonical(typed.spec)


def _spec_of(sharding: Any) -> PartitionSpec | None:
    """Return the spec of a sharding that XLA chose; None if no spec can say it."""
    return canonical(sharding.spec) if isinstance(sharding, NamedSharding) else None
