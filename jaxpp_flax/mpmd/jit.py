"""`mpmd.jit`: partition a function over named meshes, by the names in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.memory_kinds import memory_wanted
from jaxpp_flax.engine.arrays.mesh import canonical, keep_axes
from jaxpp_flax.engine.arrays.rank_shardings import moved
from jaxpp_flax.engine.placed import FunctionOnRanks, Types, structs_of, trace
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature, both_ways, paths_of
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.memory import in_memory
from jaxpp_flax.mpmd.config import MpmdConfig, Topology
from jaxpp_flax.mpmd.lowered import MpmdLowered
from jaxpp_flax.mpmd.partitioning.build import build
from jaxpp_flax.mpmd.shardings import Asked, asked_of, check_meshes, spec_of

__all__ = ["MpmdTraced", "MpmdWrapped", "jit"]


class _AskedArgument(NamedTuple):
    """The mesh and the partition that are asked of an argument, its own partition, and its memory in JAX's types."""

    rank: int | None
    spec: PartitionSpec | None
    own_spec: PartitionSpec
    memory: Any


@dataclass(frozen=True, eq=False)
class MpmdTraced:
    """A traced function, not partitioned yet.

    Example:
      >>> import numpy as np, jax.numpy as jnp
      >>> from jaxpp_flax import mpmd
      >>> meshes = {"m0": jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))}
      >>> traced = mpmd.jit(lambda x: x.sum(), mpmd.make_config(meshes, {})).trace(jnp.ones(2))
      >>> traced.out_info.shape, traced.lower().compile()(jnp.ones(2))
      ((), Array(2., dtype=float32))
    """

    _wrapped: MpmdWrapped
    _asked: Sequence[_AskedArgument]
    _structs: list[jax.ShapeDtypeStruct]
    _traced: Any
    _donated: tuple[bool, ...]

    @property
    def fun_name(self) -> str:
        """The function's name."""
        return self._wrapped.name

    @property
    def jaxpr(self) -> Any:
        """The traced function as JAX's jaxpr."""
        return self._traced.jaxpr

    @property
    def out_info(self) -> Any:
        """The types of the results, as a tree."""
        return self._traced.out_info

    def lower(self) -> MpmdLowered:
        """Partition the function; see `MpmdWrapped.lower`."""
        wrapped, traced, donated = self._wrapped, self._traced, self._donated
        config = wrapped.mpmd_config
        with context_mesh(None):  # no mesh around the call may change what is built
            graph, constants = from_jaxpr(traced.jaxpr)
            asked_out = wrapped.asked_of_results(traced.out_info)
            in_ranks, out_ranks = [one.rank for one in self._asked], [asked.rank for asked in asked_out]
            built = build(
                graph, len(constants), config, in_ranks, out_ranks, donated,
                specs_on=self._specs_on, keep_unused=wrapped.keep_unused,
            )  # fmt: skip
            out_tree = jax.tree.structure(traced.out_info)
            return MpmdLowered(
                program=built.program,
                signature=Signature.of(
                    traced.in_tree, self._structs, built.in_specs, out_tree, donated, function=self.fun_name
                ),
                constants=tuple(constants),
                inputs=built.placed.inputs,
                outputs=built.placed.outputs,
                result_specs=[asked.spec for asked in asked_out],
                compiler=wrapped.compiler,
                built=built,
                config=config,
                out_info=traced.out_info,
            )

    def _specs_on(self, ranks: Sequence[int]) -> list[PartitionSpec]:
        """Return the partition of each argument on the mesh of its rank: as asked for, or its own."""
        homes = [self._wrapped.mpmd_config.meshes.unstack[rank].axis_names for rank in ranks]
        return [
            one.spec if one.spec is not None else canonical(keep_axes(one.own_spec, axes.__contains__))
            for one, axes in zip(self._asked, homes, strict=True)
        ]


class MpmdWrapped(FunctionOnRanks[MpmdLowered]):
    """The result of `jit`: `lower(*args)` partitions the function; a call compiles it once for each signature."""

    def __init__(
        self,
        fun: Callable[..., Any],
        config: MpmdConfig,
        in_shardings: Any,
        out_shardings: Any,
        donate_argnums: int | Sequence[int] | None,
        keep_unused: bool,
        name: str,
    ) -> None:
        super().__init__(fun)
        self.mpmd_config, self.name, self.keep_unused = config, name, keep_unused
        self._in_shardings, self._out_shardings = in_shardings, out_shardings

        @functools.wraps(fun)
        def moving(*args: Any) -> Any:
            """Move the function's results to the memories that are asked of them."""
            leaves, tree = jax.tree.flatten(fun(*args))
            asked = self.asked_of_results(jax.tree.unflatten(tree, leaves))
            return jax.tree.unflatten(tree, [moved(leaf, one.memory) for leaf, one in zip(leaves, asked, strict=True)])

        self._jitted = jax.jit(moving, donate_argnums=both_ways(fun, donate_argnums, None)[0])
        self.compiler: TaskCompiler[Topology] = TaskCompiler(config.meshes)

    def __call__(self, *args: Any) -> Any:
        """Run the function. A new structure, type or sharding of an argument, or new settings of JAX, compile it again.

        A sharding that the program would change anyhow compiles nothing.
        """
        leaves, tree = jax.tree.flatten((args, {}))
        return self._find(leaves, tree).compiled.run(leaves)

    def asked_of_results(self, results: Any) -> list[Asked]:
        """Return the mesh, partition and memory that are requested for each result."""
        config = self.mpmd_config
        return asked_of(results, self._out_shardings, config.output_mesh_assignment, config, "out")

    def trace(self, *args: Any) -> MpmdTraced:
        """Trace the function for arguments like these; `.lower()` of the result partitions it.

        Raises:
          TypeError: if an argument is not an array.
          ValueError: if an argument is on a mesh whose axes differ from those of the topology's meshes.
          RuntimeError: under `jax.disable_jit`.
        """
        leaves, tree = jax.tree.flatten((args, {}))
        return self._trace(tree, self._types(leaves, tree), self._argument_places(tree, leaves))

    def lower(self, *args: Any) -> MpmdLowered:
        """Partition the function for arguments like these: arrays, or `jax.ShapeDtypeStruct`s in their place.

        Raises:
          TypeError: if an argument is not an array.
          ValueError: if the function does not fit the topology, the assignment or the schedule; see `jit`.
          RuntimeError: under `jax.disable_jit`.
        """
        return self.trace(*args).lower()

    def _argument_places(self, tree: Any, leaves: Sequence[Any]) -> tuple[_AskedArgument, ...]:
        args, _ = jax.tree.unflatten(tree, leaves)
        config = self.mpmd_config
        check_meshes(args, config)
        asked = asked_of(args, self._in_shardings, config.input_mesh_assignment, config, "in")
        arguments: list[_AskedArgument] = []
        for leaf, path, wish in zip(leaves, paths_of(tree), asked, strict=True):
            own = memory_wanted(getattr(leaf, "sharding", None), f"argument{path}")
            memory = in_memory(None, own if wish.memory is None else wish.memory)  # one value for the devices' own
            arguments.append(_AskedArgument(wish.rank, wish.spec, spec_of(leaf), memory))
        return tuple(arguments)

    def _place(self, tree: Any, types: Types, asked: tuple[_AskedArgument, ...]) -> MpmdLowered:
        return self._trace(tree, types, asked).lower()

    def _trace(self, tree: Any, types: Types, asked: Sequence[_AskedArgument]) -> MpmdTraced:
        refuse_disabled_jit("a function under mpmd.jit")
        with context_mesh(None):  # no mesh around the call may change what is built
            places = zip(structs_of(types), asked, strict=True)
            structs = [struct.update(sharding=one.memory) for struct, one in places]
            args, _ = jax.tree.unflatten(tree, structs)
            with context_mesh(self.mpmd_config.sharding_mesh):
                traced, donated = trace(self._jitted, args)
        return MpmdTraced(self, asked, structs, traced, donated)


def jit(
    func: Callable[..., Any],
    mpmd_config: MpmdConfig,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate_argnums: int | Sequence[int] | None = None,
    keep_unused: bool = False,
    override_func_name: str | None = None,
) -> MpmdWrapped:
    """Partition a function over the meshes of a topology, by the names in it.

    Args:
      func: a JAX function with positional arguments, in which `named_computation`, `named_tensor` and `call` are used.
        Differentiate inside this function.
      mpmd_config: from `make_config`.
      in_shardings, out_shardings: prefix trees of `NamedSharding`s, of `PartitionSpec`s or of None, as in `jax.jit`.
        Their specs apply on the mesh of each array; in a `NamedSharding`, write `config.sharding_mesh` for that mesh.
      donate_argnums: as in `jax.jit`.
      keep_unused: for an argument that the function does not read: False leaves it where it is, True copies it to its
        mesh.
      override_func_name: the program's name in text and messages; by default the function's name.

    Returns:
      A function that returns `jax.Array`s, each on its mesh. `.lower(*args)` gives the partitioned program,
      `.lower(*args).compile()` the compiled one. A call raises a `ValueError` if an argument was placed on another mesh
      than the one on which the program reads it. With several processes, all of them call the function. Each process
      runs the fragments of its own meshes; a result on a mesh of other processes has no addressable shards.

    Raises (when it is lowered):
      TypeError: if an argument is not an array.
      ValueError: if a name in the program is not assigned; nested names are assigned to different meshes or stages; a
        loop holds names of several meshes; shardings do not fit.
      ScheduleError: if the stages do not fit the schedule, or the program cannot run by it.

    Example:
      >>> import jax, numpy as np, jax.numpy as jnp
      >>> from jaxpp_flax import mpmd
      >>> meshes = {f"m{i}": jax.sharding.Mesh(np.array([jax.devices()[i]]), ("data",)) for i in range(2)}
      >>> def model(w1, w2, x):
      ...     x = mpmd.named_computation(lambda x: x @ w1, name="first")(x)
      ...     return mpmd.named_computation(lambda x: x @ w2, name="second")(x)
      >>> lowered = mpmd.jit(model, mpmd.make_config(meshes, {"first": "m0", "second": "m1"})).lower(
      ...     jnp.eye(2), jnp.eye(2), jnp.ones((1, 2)))
      >>> lowered.function_mesh_assignment.input_meshes
      ('m0', 'm1', 'm0')
      >>> where = lowered.function_named_shardings.input_specs
      >>> lowered.compile()(*jax.device_put((jnp.eye(2), jnp.eye(2), jnp.ones((1, 2))), where))
      Array([[1., 1.]], dtype=float32)

    After Shardy:MPMD's function of the same name (openxla/shardy, "MPMD RFC", 2025).
    """
    if not isinstance(mpmd_config, MpmdConfig):
        raise TypeError(f"mpmd_config must come from `mpmd.make_config`, got {type(mpmd_config).__name__}.")
    name = override_func_name or getattr(func, "__name__", "func")
    return MpmdWrapped(func, mpmd_config, in_shardings, out_shardings, donate_argnums, keep_unused, name)
