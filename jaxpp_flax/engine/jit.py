"""`mpmd_jit_with_loop` and `mpmd_jit`: compile a function into one SPMD program for each stage."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh, trace_for_stages, trace_settings
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.engine.arrays.rank_shardings import (
    RankSharding,
    broadcast_prefix,
    broadcast_shardings,
    check_divides,
    rank_sharding_of,
    with_memories,
)
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.passes.loop.open_loops import OnePass
from jaxpp_flax.engine.passes.place import ResultRanks
from jaxpp_flax.engine.passes.runner import Settings, observers
from jaxpp_flax.engine.passes.submesh_constraints import on_submesh
from jaxpp_flax.engine.patterns import PlacedShapes, StackedCall, keep_newest
from jaxpp_flax.engine.pipeline import CompiledPipeline, PlacedPipeline
from jaxpp_flax.engine.placed import FunctionOnRanks, Types, structs_of, trace
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature, Statics, arguments_of, both_ways, paths_of, without_statics
from jaxpp_flax.engine.traced import CutPolicy, Traced, cut_at_every_mark, passes_context, prepare
from jaxpp_flax.engine.tracing.bodies.microbatches import repeated_over
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.memory import in_memory
from jaxpp_flax.engine.tracing.treduce import Last, treduce_i
from jaxpp_flax.schedules.gathers import Fsdp, check_fsdp
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["MpmdFunction", "check_mesh", "mpmd_jit", "mpmd_jit_with_loop", "one_pass"]


class MpmdFunction(FunctionOnRanks[PlacedPipeline]):
    """Compile a train step with a `treduce` loop into one SPMD program for each stage, and run them as a pipeline.

    Like a function under `jax.jit`, the step is traced and compiled once for each structure, shape and dtype of its
    arguments, each value and type of its static arguments, and each of JAX's settings that a trace depends on
    (`jax.enable_x64`, `jax.default_matmul_precision`, ...). `compile(*args)` compiles ahead of time.

    Args:
      fun: the step: any JAX function with at least one `treduce`, whose body has marks between its stages.
      mpmd_mesh: the mesh of all ranks (a rank is the group of devices of a stage).
      in_specs, out_specs: prefix trees of `PartitionSpec`s over the axes inside a rank. `None` keeps an argument's own
        sharding, and lets XLA choose a result's.
      in_shardings, out_shardings: the same as shardings (`MpmdSharding`, `NamedSharding`); their memory kind is used
        too: device memory, or `pinned_host`. A step without a loop runs where its arguments lie: on the ranks of the
        `MpmdSharding`s in `in_shardings`.
      donate_argnums, donate_argnames: arguments whose memory the step may reuse.
      static_argnums, static_argnames, compiler_options: as in `jax.jit`.
      cut_policy: a function that chooses the marks that cut; by default all marks cut.
      everywhere: with several processes, the results that every process gets: a prefix tree of bools. Scalars, and
        small results that are not the new value of an argument, always go to every process.
      residuals: what each stage does with the values that its forward pass keeps for its backward pass: keep them on
        the devices (the default), recompute them, or offload them to host memory
        (`jaxpp_flax.schedules.ResidualPlan`). Or a function that returns the plan; it is called after `cut_policy`.
      fsdp: for parameters that are sharded over an axis that also shards the examples of a microbatch. "microbatch":
        each task gathers the parameters that it reads, and reduces their gradients. "step": a stage gathers them once,
        before its first task, and their gradients are reduced and scattered once, after the loop.

    A call takes arrays, NumPy arrays and `MpmdArray`s, and returns `MpmdArray`s.

    Raises (when the step is compiled, before anything runs):
      ValueError: if there is no `treduce`, and `in_shardings` names no ranks; if the number of marks or the schedule
        does not fit, a mark cannot cut,
        `residuals` is for another number of stages or needs `pinned_host` memory that the devices do not have, or
        `fsdp` is unknown or gathers nothing.
      TypeError: if an argument is not an array.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jaxpp_flax import mark_stage_end
      >>> from jaxpp_flax import treduce
      >>> from jaxpp_flax.schedules import Std1F1B
      >>> def loss(w, x):
      ...     x = mark_stage_end(jnp.tanh(x @ w[0]))
      ...     return jnp.mean((x @ w[1]) ** 2)
      >>> mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> @functools.partial(mpmd_jit_with_loop, mpmd_mesh=mesh)
      ... def step(w, batch):
      ...     losses, grads = treduce(lambda x: jax.value_and_grad(loss)(w, x), batch, schedule=Std1F1B(2))
      ...     return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), losses
      >>> w, losses = step([jnp.ones((3, 3)), jnp.ones((3, 3))], jnp.ones((4, 2, 3)))
      >>> w[1].mpmd_idxs, losses.shape
      ((1,), (4,))

    After NVIDIA's JaxPP (Xhebraj, Lee, Chen and Grover, "Scaling Deep Learning Training with MPMD Pipeline
    Parallelism", 2024).
    """

    _idle_everywhere: ClassVar[bool] = False
    _placed_type: ClassVar[type[PlacedPipeline]] = PlacedPipeline
    _instead_of_arrays = "name the argument in `static_argnums`/`static_argnames`"

    def __init__(
        self,
        fun: Callable[..., Any],
        mpmd_mesh: MpmdMesh,
        in_specs: Any = None,
        out_specs: Any = None,
        *,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        cut_policy: CutPolicy = cut_at_every_mark,
        everywhere: Any = False,
        residuals: ResidualPlan | Callable[[], ResidualPlan | None] | None = None,
        fsdp: Fsdp = "microbatch",
    ) -> None:
        super().__init__(fun)
        check_mesh(mpmd_mesh)
        self._fsdp: Fsdp = check_fsdp(fsdp)
        self.mpmd_mesh: MpmdMesh = mpmd_mesh
        self._in_specs = _one_of(in_specs, in_shardings, "in")
        self._out_specs = _one_of(out_specs, out_shardings, "out")
        self._policy = cut_policy
        self._everywhere = everywhere
        self._residuals = residuals
        self._compiler = TaskCompiler(mpmd_mesh, compiler_options)
        self._statics = Statics(fun, *both_ways(fun, static_argnums, static_argnames))
        donated, named = both_ways(fun, donate_argnums, donate_argnames)
        self._jitted = jax.jit(
            with_memories(fun, self._out_specs),
            static_argnums=self._statics.positions,
            static_argnames=self._statics.names,
            donate_argnums=donated,
            donate_argnames=named,
        )
        self._latest: PlacedPipeline | None = None
        self._patterns = deque[PlacedPipeline]()  # the newest last
        # By all of a call but its microbatches: what is traced and placed for their shapes.
        self._of_shapes: dict[Hashable, tuple[Traced, PlacedShapes]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step, compiled first if the signature is new; return `MpmdArray` leaves."""
        leaves, tree = self._statics.flatten(args, kwargs)
        self._latest = placed = self._find(leaves, tree)
        return placed.compiled.run(leaves)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledPipeline:
        """Compile ahead of time for arguments like these: arrays, or `jax.ShapeDtypeStruct`s in their place.

        Raises:
          ValueError: if the step does not fit a pipeline; see `mpmd_jit_with_loop`.
          RuntimeError: under `jax.disable_jit`.
        """
        self._latest = placed = self.place(*args, **kwargs)
        return placed.compiled

    def place(self, *args: Any, **kwargs: Any) -> PlacedPipeline:
        """Trace a step for arguments like these and place it on ranks; nothing is compiled. See `compile`."""
        return self._find(*self._statics.flatten(args, kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Traced:
        """Trace a step for arguments like these, to place it with several policies, residuals and schedules."""
        leaves, tree = self._statics.flatten(args, kwargs)
        types = self._types(leaves, tree)
        with context_mesh(None):
            return self._trace(tree, types, self._argument_places(tree, leaves))

    @property
    def in_shardings(self) -> Any:
        """The `MpmdSharding` of each argument of the latest compilation: a tree like `(args, kwargs)`."""
        if self._latest is None:
            raise RuntimeError("nothing is compiled yet: call `.compile(*args)`, or the function itself, first.")
        return self._latest.in_shardings

    def _argument_places(self, tree: Any, leaves: Sequence[Any]) -> tuple[RankSharding, ...]:
        tree = without_statics(tree)
        paths = paths_of(tree)
        own = [
            rank_sharding_of(leaf, self.mpmd_mesh, f"argument{path}") for leaf, path in zip(leaves, paths, strict=True)
        ]
        if self._in_specs is None:
            return tuple(own)
        # If `in_specs` gives an argument's partition, the partition of the passed array makes no difference.
        args, _ = jax.tree_util.tree_unflatten(tree, leaves)
        wanted = broadcast_shardings(self._in_specs_of(args), args, "in_specs", self.mpmd_mesh)
        merged = [wish.over(place) for wish, place in zip(wanted, own[: len(wanted)], strict=True)]
        return (*merged, *own[len(wanted) :])

    def _in_specs_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the requests of `in_specs` for these arguments; one that is too many stays, to be refused."""
        given = self._in_specs if isinstance(self._in_specs, (tuple, list)) else (self._in_specs,) * len(args)
        return (*map(repeated_over, given, args), *given[len(args) :])

    def _place(self, tree: Any, types: Types, places: tuple[RankSharding, ...]) -> PlacedPipeline:
        call = StackedCall.of(tree, [*zip(types, places, strict=True)])
        if call is None:
            return self._trace(tree, types, places).place(self._policy, self._residuals)
        return keep_newest(self._placed, self._patterns, self._place_pattern(call))

    def _place_pattern(self, call: StackedCall) -> PlacedPipeline:
        """Write the program for a pattern of shapes; trace and place the step if it has a new shape."""
        key = call.rest, trace_settings()
        traced, shapes = self._of_shapes.get(key, (None, None))
        if traced is None or shapes is None or not shapes.serves(call):
            prepared = call if shapes is None else call.prepared_for(shapes.call.kinds)
            traced = self._trace(prepared.tree, *map(tuple, zip(*prepared.facts, strict=True)))
            settings, step = traced.on_ranks(self._policy, self._residuals)
            shapes = PlacedShapes(step=step, settings=settings, call=prepared)
            self._of_shapes[key] = traced, shapes
            if prepared is call:
                return traced.written(step, settings, traced.signature)
        step, settings = shapes.written_for(call)
        types, places = map(tuple, zip(*call.facts, strict=True))
        specs = [place.placement or PartitionSpec() for place in places]
        donated = tuple(settings.donated[len(settings.donated) - len(places) :])
        own, tree = traced.signature, without_statics(call.tree)
        signature = Signature.of(tree, structs_of(types), specs, own.out_tree, donated)
        return traced.written(step, settings, replace(signature, function=own.function))

    def _trace(self, tree: Any, types: Types, places: Sequence[RankSharding]) -> Traced:
        refuse_disabled_jit("a pipelined step")
        mesh, paths = self.mpmd_mesh, [f"argument{path}" for path in paths_of(without_statics(tree))]
        in_specs = [place.placement or PartitionSpec() for place in places]
        structs, sizes = structs_of(types), dict(mesh.unstack[0].shape)
        check_divides(paths, structs, in_specs, sizes)
        traced, donated = self._trace_for_stages(tree, structs, places)
        graph, constants = from_jaxpr(traced.jaxpr)
        graph = on_submesh(graph, mesh)
        everywhere = [bool(flag) for _, flag in broadcast_prefix(self._everywhere, traced.out_info, "everywhere")]
        names = dict(zip(graph.inputs, ["a captured array"] * len(constants) + paths, strict=True))
        settings = Settings(
            num_ranks=mesh.mpmd_dim,
            donated=(*[False] * len(constants), *donated),
            specs=(*[PartitionSpec()] * len(constants), *in_specs),
            shards=ShardCounts(sizes),
            submesh=mesh.abstract_submesh,
            result_ranks=ResultRanks.of(mesh, everywhere),
            idle_ranks=frozenset(range(mesh.mpmd_dim if self._idle_everywhere else 1)),
            fsdp=FsdpRule(mesh=mesh.abstract_submesh, names=names) if self._fsdp == "step" else None,
            argument_ranks=(*[frozenset[int]()] * len(constants), *self._argument_ranks(tree)),
        )
        observe = observers()
        with passes_context(mesh):
            step = prepare(graph, settings, observe)
        wanted = broadcast_shardings(self._out_specs, traced.out_info, "out_specs", mesh)
        out_specs = [place.placement for place in wanted]
        results = jax.tree_util.tree_leaves_with_path(traced.out_info)
        check_divides([f"result{keystr(path)}" for path, _ in results], [r for _, r in results], out_specs, sizes)
        return Traced(
            step=step,
            settings=settings,
            observe=observe,
            signature=Signature.of(traced.in_tree, structs, in_specs, jax.tree.structure(traced.out_info), donated),
            constants=tuple(constants),
            out_specs=out_specs,
            compiler=self._compiler,
            placed_type=self._placed_type,
        )

    def _argument_ranks(self, tree: Any) -> list[frozenset[int]]:
        """Return the ranks that `in_shardings` gives each argument; none for a spec, or without a request."""
        args, kwargs = jax.tree_util.tree_unflatten(tree := without_statics(tree), range(tree.num_leaves))
        nodes = [node for _, node in broadcast_prefix(self._in_specs_of(args), args, "in_shardings")] if args else []
        ranks = [frozenset(node.ranks if isinstance(node, MpmdSharding) else ()) for node in nodes]
        return ranks + [frozenset()] * len(jax.tree.leaves(kwargs))

    def _trace_for_stages(
        self, tree: Any, structs: Sequence[Any], places: Sequence[RankSharding]
    ) -> tuple[Any, tuple[bool, ...]]:
        mesh = self.mpmd_mesh

        def typed(struct: Any, place: RankSharding, abstract: AbstractMesh) -> Any:
            """Add an argument's memory to its type; on an Explicit mesh, add its partition too."""
            spec = PartitionSpec() if place.spec is None else place.spec  # a spec with `reduced` alone is false
            sharding = NamedSharding(abstract, spec) if mesh.is_explicit else None
            return struct.update(sharding=in_memory(sharding, place.memory_kind))

        def trace_on(abstract: AbstractMesh) -> tuple[Any, tuple[bool, ...]]:
            leaves = [typed(struct, place, abstract) for struct, place in zip(structs, places, strict=True)]
            return trace(self._jitted, *arguments_of(tree, leaves))

        return trace_for_stages(trace_on, mesh)


mpmd_jit_with_loop = MpmdFunction


def check_mesh(mesh: Any) -> None:
    """Refuse a mesh that does not say which axis counts the ranks."""
    if not isinstance(mesh, MpmdMesh):
        raise TypeError(
            f"mpmd_mesh must be an MpmdMesh, got {type(mesh).__name__}. Wrap the mesh: "
            '`MpmdMesh(jax_mesh, "stage")` with the name of the stage axis.'
        )


def _one_of(specs: Any, shardings: Any, which: str) -> Any:
    if specs is not None and shardings is not None:
        raise ValueError(f"both {which}_specs and {which}_shardings are given; pass one of them.")
    return specs if specs is not None else shardings


def one_pass(fun: Callable[..., Any], mpmd_mesh: MpmdMesh, num_stages: int | None = None) -> Callable[..., Any]:
    """Return a function whose loop runs `fun` once, in stages; by default, one stage for each rank."""
    check_mesh(mpmd_mesh)
    schedule = OnePass(mpmd_mesh.mpmd_dim if num_stages is None else num_stages, mpmd_mesh.mpmd_dim)

    @functools.wraps(fun)
    def looped(*args: Any, **kwargs: Any) -> Any:
        return treduce_i(lambda _: fun(*args, **kwargs), 1, schedule, Last)

    return looped


def mpmd_jit(
    fun: Callable[..., Any],
    mpmd_mesh: MpmdMesh,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    num_stages: int | None = None,
    cut_policy: CutPolicy = cut_at_every_mark,
    everywhere: Any = False,
) -> MpmdFunction:
    """Compile a function with marks and without a loop into stages: for inference, or for one gradient.

    Args:
      num_stages: the number of stages; by default the number of the mesh's ranks.

    For the other arguments, see `mpmd_jit_with_loop`.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jaxpp_flax import mark_stage_end
      >>> mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> forward = mpmd_jit(lambda w, x: mark_stage_end(x @ w[0]) @ w[1], mesh)
      >>> forward([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))
      MpmdArray(shape=(1, 2), dtype=float32, mpmd_idxs=(1,), sharding=...)
    """
    return MpmdFunction(
        one_pass(fun, mpmd_mesh, num_stages),
        mpmd_mesh,
        in_specs,
        out_specs,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        compiler_options=compiler_options,
        cut_policy=cut_policy,
        everywhere=everywhere,
    )
