"""`mpmd_jit_with_loop` and `mpmd_jit`: functions cut into one SPMD program per stage, called like any other."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr

from jaxpp_flax.engine.array import MpmdArray
from jaxpp_flax.engine.compile import TaskCompiler
from jaxpp_flax.engine.compiled import Compiled, Leaf, Signature
from jaxpp_flax.engine.ir import from_jaxpr
from jaxpp_flax.engine.loop import Last, treduce_i
from jaxpp_flax.engine.mesh import MpmdMesh
from jaxpp_flax.engine.passes.audience import Audience
from jaxpp_flax.engine.passes.constraints import on_submesh
from jaxpp_flax.engine.pipeline import CutPolicy, build, cut_at_every_mark
from jaxpp_flax.engine.tracing import context_mesh, trace_for_stages
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import FusedTask, Task, TaskKind

__all__ = ["MpmdFunction", "mpmd_jit", "mpmd_jit_with_loop"]


class MpmdFunction:
    """A function that runs as a pipeline; what `mpmd_jit_with_loop` and `mpmd_jit` return.

    Like a function under `jax.jit`, it is traced and compiled once for each structure, shape and dtype of its
    arguments. `compile(*args)` does that ahead of time.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        mpmd_mesh: Any,
        *,
        in_specs: Any = None,
        out_specs: Any = None,
        donate_argnums: int | Sequence[int] | None = None,
        donate_argnames: str | Iterable[str] | None = None,
        static_argnums: int | Sequence[int] | None = None,
        static_argnames: str | Iterable[str] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        cut_policy: CutPolicy = cut_at_every_mark,
        everywhere: Any = False,
    ) -> None:
        _check_mesh(mpmd_mesh)
        functools.update_wrapper(self, fun)
        self.mpmd_mesh: MpmdMesh = mpmd_mesh
        self._fun = fun
        self._in_specs, self._out_specs = in_specs, out_specs
        self._donate_argnums, self._donate_argnames = _both_ways(fun, donate_argnums, donate_argnames)
        self._static_argnums, self._static_argnames = _both_ways(fun, static_argnums, static_argnames)
        self._policy = cut_policy
        self._everywhere = everywhere
        self._compiler = TaskCompiler(mpmd_mesh, compiler_options)
        self._jitted = jax.jit(fun, static_argnums=self._static_argnums, static_argnames=self._static_argnames)
        self._cache: dict[Hashable, Compiled] = {}
        self._latest: Compiled | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; compiles first where this signature is new. Returns `MpmdArray` leaves."""
        leaves, tree, statics = self._flatten(args, kwargs)
        return self._get(leaves, tree, statics, args, kwargs).run(leaves)

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compile ahead of time for arguments like these: arrays, or `jax.ShapeDtypeStruct`s in their place.

        Raises:
          ValueError: whatever does not fit a pipeline; see `mpmd_jit_with_loop`.
        """
        leaves, tree, statics = self._flatten(args, kwargs)
        return self._get(leaves, tree, statics, args, kwargs)

    def trace_and_place(self, *args: Any, **kwargs: Any) -> Compiled:
        """The same as `compile`, under the name by which JaxPP's users reach `in_shardings`."""
        return self.compile(*args, **kwargs)

    def as_text(self, stage: str = "program") -> str:
        """The latest compilation as text; see `Compiled.as_text`."""
        return self._compiled().as_text(stage)

    @property
    def in_shardings(self) -> Any:
        """The `MpmdSharding` of each argument of the latest compilation: a tree like `(args, kwargs)`."""
        return self._compiled().in_shardings

    def memory_analysis(self) -> Any:
        """The memory of the latest compilation; see `Compiled.memory_analysis`."""
        return self._compiled().memory_analysis()

    def _compiled(self) -> Compiled:
        if self._latest is None:
            raise RuntimeError("nothing is compiled yet: call `.compile(*args)`, or the function itself, first.")
        return self._latest

    def _split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Hashable]:
        static = self._static_positions(args)
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        named = {k: v for k, v in kwargs.items() if k not in self._static_argnames}
        positional = tuple((i, args[i]) for i in sorted(static))
        by_name = tuple(sorted((k, kwargs[k]) for k in kwargs if k in self._static_argnames))
        statics = (positional, by_name)
        try:
            hash(statics)
        except TypeError as error:
            raise self._unhashable((*positional, *by_name)) from error
        return dynamic, named, statics

    def _unhashable(self, statics: Sequence[tuple[int | str, Any]]) -> TypeError:
        """What to raise when a static argument cannot be hashed."""
        names = list(inspect.signature(self._fun).parameters)
        for where, value in statics:
            try:
                hash(value)
            except TypeError:
                name = where if isinstance(where, str) else names[where] if where < len(names) else f"number {where}"
                return TypeError(
                    f"the static argument {name!r} is a {type(value).__name__}, which cannot be hashed, so the step "
                    "compiled for it could not be found again. Pass a hashable value (a tuple, a frozen dataclass), or "
                    "an array that is not static."
                )
        return TypeError("a static argument cannot be hashed.")

    def _flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any, Hashable]:
        dynamic, named, statics = self._split(args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten((dynamic, named))
        return leaves, tree, statics

    def _get(self, leaves: list[Any], tree: Any, statics: Hashable, args: Any, kwargs: Any) -> Compiled:
        try:
            types = tuple(type_of(leaf) for leaf in leaves)
        except TypeError as error:
            raise _not_an_array(tree, leaves) from error
        specs = tuple(_spec_of(leaf, self.mpmd_mesh) for leaf in leaves)
        key = (tree, types, specs, statics)
        compiled = self._cache.get(key)
        if compiled is None:
            dynamic, named, _ = self._split(args, kwargs)
            paths = [keystr(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path((dynamic, named))]
            structs = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in types]
            in_specs = tuple(self._argument_specs(tree, dynamic, specs, structs, paths))
            # Where `in_specs` says how arguments are partitioned, how they arrive makes no difference.
            asked = (tree, types, in_specs, statics)
            if asked not in self._cache:
                with context_mesh(None):  # no mesh around the call may change what is compiled
                    self._cache[asked] = self._compile(tree, types, structs, paths, in_specs, args, kwargs)
            compiled = self._cache[key] = self._cache[asked]
        self._latest = compiled
        return compiled

    def _compile(
        self,
        tree: Any,
        types: Any,
        structs: Sequence[jax.ShapeDtypeStruct],
        paths: Sequence[str],
        in_specs: tuple[PartitionSpec, ...],
        args: Any,
        kwargs: Any,
    ) -> Compiled:
        named = self._split(args, kwargs)[1]
        mesh = self.mpmd_mesh
        traced = self._trace(tree, structs, in_specs, args, kwargs)
        graph, consts = from_jaxpr(traced.jaxpr)
        graph = on_submesh(graph, self.mpmd_mesh)
        donated = [False] * len(consts) + self._donated(args, named)
        specs = [PartitionSpec()] * len(consts) + list(in_specs)
        sizes = dict(mesh.unstack[0].shape)
        audience = Audience.of(mesh, _broadcast_flags(self._everywhere, traced.out_info))
        with context_mesh(mesh.abstract_submesh if mesh.is_explicit else None):
            built = build(graph, mesh.mpmd_dim, self._policy, donated, specs, sizes, audience)
        out_specs = _broadcast_specs(self._out_specs, traced.out_info, "out_specs", self.mpmd_mesh)
        signature = Signature(
            tree=tree,
            leaves=tuple(Leaf(p, *t, spec=s) for p, t, s in zip(paths, types, in_specs, strict=True)),
            out_tree=jax.tree.structure(traced.out_info),
            donated=tuple(donated[len(consts) :]),
        )
        return Compiled(built, signature, tuple(consts), out_specs, self._compiler)

    def _trace(
        self, tree: Any, structs: Sequence[Any], in_specs: Sequence[PartitionSpec], args: Any, kwargs: Any
    ) -> Any:
        static = self._static_positions(args)
        mesh = self.mpmd_mesh

        def trace(abstract: AbstractMesh) -> Any:
            leaves = structs
            if mesh.is_explicit:
                shardings = [NamedSharding(abstract, spec) for spec in in_specs]
                leaves = [s.update(sharding=sharding) for s, sharding in zip(structs, shardings, strict=True)]
            dynamic, named = jax.tree_util.tree_unflatten(tree, leaves)
            remaining = iter(dynamic)
            full = [a if i in static else next(remaining) for i, a in enumerate(args)]
            return self._jitted.trace(*full, **{k: named.get(k, v) for k, v in kwargs.items()})

        return trace_for_stages(trace, mesh)

    def _static_positions(self, args: Sequence[Any]) -> set[int]:
        return {n % len(args) for n in self._static_argnums if args and -len(args) <= n < len(args)}

    def _donated(self, args: Sequence[Any], named: dict[str, Any]) -> list[bool]:
        flags: list[bool] = []
        static = self._static_positions(args)
        donated = {n % len(args) for n in self._donate_argnums if args and -len(args) <= n < len(args)}
        for position, argument in enumerate(args):
            if position not in static:
                flags += [position in donated] * len(jax.tree.leaves(argument))
        for name in sorted(named):
            flags += [name in self._donate_argnames] * len(jax.tree.leaves(named[name]))
        return flags

    def _argument_specs(
        self, tree: Any, dynamic: Any, found: Sequence[PartitionSpec], structs: Sequence[Any], paths: Sequence[str]
    ) -> list[PartitionSpec]:
        if self._in_specs is None:
            return list(found)
        shapes = jax.tree_util.tree_unflatten(tree, structs)[0]
        given = self._in_specs if isinstance(self._in_specs, (tuple, list)) else (self._in_specs,) * len(shapes)
        specs = _broadcast_specs(tuple(given), shapes, "in_specs", self.mpmd_mesh)
        merged = [f if s is None else s for s, f in zip(specs, found[: len(specs)], strict=True)]
        return [*merged, *found[len(specs) :]]


def type_of(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    if isinstance(leaf, MpmdArray):
        return leaf.shape, leaf.dtype, leaf.weak_type
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return tuple(leaf.shape), leaf.dtype, bool(getattr(leaf, "weak_type", False))
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype), False
    aval = jax.typeof(leaf)
    return tuple(aval.shape), aval.dtype, bool(aval.weak_type)


def _not_an_array(tree: Any, leaves: Sequence[Any]) -> TypeError:
    """What to raise when the type of some leaf of `(args, kwargs)` is unknown to JAX."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.tree_util.tree_unflatten(tree, leaves)):
        try:
            type_of(leaf)
        except TypeError:
            return TypeError(
                f"argument{keystr(path[1:])} is a {type(leaf).__name__}, which is no array. Pass "
                "arrays or numbers, or name the argument in `static_argnums`/`static_argnames`."
            )
    return TypeError("an argument is no array.")


def _spec_of(leaf: Any, mesh: MpmdMesh) -> PartitionSpec:
    """The partitioning that an argument brings along, the stage axis left out."""
    if isinstance(leaf, MpmdArray):
        return leaf.spec
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return PartitionSpec()
    return _within_submesh(sharding.spec, mesh)


def _within_submesh(spec: PartitionSpec, mesh: MpmdMesh) -> PartitionSpec:
    names = set(mesh.jax_mesh.axis_names) - {mesh.mpmd_axis_name}

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            kept = tuple(name for name in entry if name in names)
            return kept or None
        return entry if entry in names else None

    kept = [keep(entry) for entry in spec]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def _broadcast_specs(prefix: Any, tree: Any, what: str, mesh: MpmdMesh) -> list[PartitionSpec | None]:
    """One spec (or None: no wish) for each leaf of `tree`; a prefix may hold specs or shardings."""
    if prefix is None:
        return [None] * len(jax.tree.leaves(tree))
    is_spec = lambda x: x is None or isinstance(x, (PartitionSpec, jax.sharding.Sharding))  # noqa: E731
    specs: list[PartitionSpec | None] = []
    names = set(mesh.jax_mesh.axis_names)

    def add(path: Any, node: Any, sub: Any) -> None:
        spec: PartitionSpec | None = node if isinstance(node, PartitionSpec) else getattr(node, "spec", None)
        for entry in spec or ():
            for name in entry if isinstance(entry, tuple) else (entry,):
                if name is not None and name not in names:
                    raise ValueError(
                        f"{what}{keystr(path)} is {spec}, but the mesh has no axis {name!r}: its axes are "
                        f"{sorted(names)}. Use one of these, or make a mesh that has it."
                    )
        kept = None if spec is None else _within_submesh(spec, mesh)
        specs.extend([kept] * len(jax.tree.leaves(sub)))

    try:
        jax.tree_util.tree_map_with_path(add, prefix, tree, is_leaf=is_spec)
    except ValueError as error:
        if "mesh has no axis" in str(error):
            raise
        raise ValueError(
            f"{what} is not a prefix of the tree it describes: {prefix!r} against {jax.tree.structure(tree)}."
        ) from error
    return specs


def _broadcast_flags(prefix: Any, tree: Any) -> list[bool]:
    """One flag for each leaf of `tree`."""
    try:
        flags: list[bool] = jax.tree.leaves(jax.tree.broadcast(prefix, tree))
    except ValueError as error:
        raise ValueError(
            f"everywhere={prefix!r} is not a prefix of the results: {jax.tree.structure(tree)}. Pass True, False, or a "
            "tree of these."
        ) from error
    return flags


def mpmd_jit_with_loop(
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
) -> MpmdFunction:
    """Compile a train step with a `treduce` loop into one SPMD program per stage, run as a pipeline.

    Args:
      fun: the step: any JAX function that holds at least one `treduce`, whose body is marked into stages.
      mpmd_mesh: the ranks, and the submesh of each.
      in_specs, out_specs: prefix trees of `PartitionSpec`s over the submesh's axes; `None` keeps what an argument
        brings along, and what XLA finds for results.
      in_shardings, out_shardings: the same as shardings (`MpmdSharding`, `NamedSharding`).
      donate_argnums, donate_argnames: arguments whose memory the step may reuse.
      static_argnums, static_argnames, compiler_options: as in `jax.jit`.
      cut_policy: which marks cut; by default all of them.
      everywhere: with several processes, which results all of them get: a prefix tree of bools. Scalars, and what is
        small and no new value of an argument, they get anyway.

    Returns:
      A callable that takes arrays, NumPy arrays and `MpmdArray`s, and returns `MpmdArray`s.

    Raises (when it is compiled, before anything runs):
      ValueError: no `treduce`; too few or too many marks; a schedule that does not fit; a marker where none can cut.
      TypeError: an argument that is no array.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jaxpp_flax.engine.markers import mark_stage_end
      >>> from jaxpp_flax.engine.loop import treduce
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

    After NVIDIA's JaxPP (Xhonneux et al., "Scaling Deep Learning Training with MPMD Pipeline Parallelism", 2024).
    """
    return MpmdFunction(
        fun,
        mpmd_mesh,
        in_specs=_one_of(in_specs, in_shardings, "in"),
        out_specs=_one_of(out_specs, out_shardings, "out"),
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        compiler_options=compiler_options,
        cut_policy=cut_policy,
        everywhere=everywhere,
    )


def _both_ways(
    fun: Callable[..., Any], argnums: int | Sequence[int] | None, argnames: str | Iterable[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the same arguments: as in `jax.jit`, what is not given is read off the signature."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums or ())
    names = (argnames,) if isinstance(argnames, str) else tuple(argnames or ())
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature
        return numbers, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        numbers = tuple(n + len(positional) if n < 0 else n for n in numbers)
    if numbers and not names:
        names = tuple(positional[n] for n in numbers if 0 <= n < len(positional))
    elif names and not numbers:
        numbers = tuple(positional.index(name) for name in names if name in positional)
    return numbers, names


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, MpmdMesh):
        raise TypeError(
            f"mpmd_mesh must be an MpmdMesh, got {type(mesh).__name__}. Wrap the mesh: "
            '`MpmdMesh(jax_mesh, "stage")` with the name of the stage axis.'
        )


def _one_of(specs: Any, shardings: Any, which: str) -> Any:
    if specs is not None and shardings is not None:
        raise ValueError(f"both {which}_specs and {which}_shardings are given; pass one of them.")
    return specs if specs is not None else shardings


class _OnePass(Schedule):
    """Each rank's stages forward, in order, then backward: all that a function without a loop needs."""

    def tasks(self, num_microbatches: int) -> list[list[Task | FusedTask]]:
        def of(rank: int) -> list[Task | FusedTask]:
            stages = self.stages_of(rank)
            ordered = [(TaskKind.FORWARD, s) for s in stages] + [(TaskKind.BACKWARD, s) for s in reversed(stages)]
            return [Task(kind, stage, m) for kind, stage in ordered for m in range(num_microbatches)]

        return [of(rank) for rank in range(self.num_ranks)]


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
    """The same as `mpmd_jit_with_loop` for a marked function without a loop: inference, or one gradient.

    Args:
      num_stages: stages to cut into; by default as many as the mesh has ranks.

    The other arguments are those of `mpmd_jit_with_loop`.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jaxpp_flax.engine.markers import mark_stage_end
      >>> mesh = MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> forward = mpmd_jit(lambda w, x: mark_stage_end(x @ w[0]) @ w[1], mesh)
      >>> forward([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))
      MpmdArray(shape=(1, 2), dtype=float32, mpmd_idxs=(1,), sharding=...)
    """
    _check_mesh(mpmd_mesh)
    schedule = _OnePass(mpmd_mesh.mpmd_dim if num_stages is None else num_stages, mpmd_mesh.mpmd_dim)

    @functools.wraps(fun)
    def looped(*args: Any, **kwargs: Any) -> Any:
        return treduce_i(lambda _: fun(*args, **kwargs), 1, schedule, Last)

    return MpmdFunction(
        looped,
        mpmd_mesh,
        in_specs=_one_of(in_specs, in_shardings, "in"),
        out_specs=_one_of(out_specs, out_shardings, "out"),
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        compiler_options=compiler_options,
        cut_policy=cut_policy,
        everywhere=everywhere,
    )
