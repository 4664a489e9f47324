"""`mpmd.jit`: partition a function over named meshes, by the names in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh, trace_settings
from jaxpp_flax.engine.arrays.layouts import moved
from jaxpp_flax.engine.arrays.memory_kinds import memory_wanted
from jaxpp_flax.engine.arrays.mesh import canonical, keep_axes
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Call, Parameters, Signature, not_an_array, type_of
from jaxpp_flax.engine.tracing.ir import from_jaxpr, in_memory
from jaxpp_flax.mpmd.config import MpmdConfig, Topology
from jaxpp_flax.mpmd.lowered import MpmdCompiled, MpmdLowered
from jaxpp_flax.mpmd.partitioning.build import build
from jaxpp_flax.mpmd.shardings import Asked, asked_of, check_meshes, spec_of

__all__ = ["MpmdTraced", "MpmdWrapped", "jit"]


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
    _call: Call
    _structs: list[jax.ShapeDtypeStruct]
    _asked: list[Asked]
    _traced: Any

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
        wrapped, call, out_info = self._wrapped, self._call, self.out_info
        config, parameters = wrapped.mpmd_config, wrapped.parameters
        with context_mesh(None):  # no mesh around the call may change what is built
            graph, constants = from_jaxpr(self.jaxpr)
            asked_out, donated = wrapped.asked_of_results(out_info), parameters.donated(call)
            in_ranks, out_ranks = ([one.rank for one in of] for of in (self._asked, asked_out))
            built = build(
                graph, len(constants), config, in_ranks, out_ranks, donated,
                specs_on=self._specs_on, keep_unused=wrapped.keep_unused,
            )  # fmt: skip
            out_tree, out_specs = jax.tree.structure(out_info), [one.spec for one in asked_out]
            types = Signature.of(call, self._structs, built.in_specs, out_tree, donated, function=self.fun_name)
            return MpmdLowered(built, types, config, out_specs, tuple(constants), wrapped.compiler, out_info)

    def _specs_on(self, ranks: Sequence[int]) -> list[PartitionSpec]:
        """Return the partition of each argument on the mesh of its rank: as asked for, or its own."""
        homes = [self._wrapped.mpmd_config.meshes.unstack[rank].axis_names for rank in ranks]
        return [
            one.spec if one.spec is not None else canonical(keep_axes(spec_of(leaf), axes.__contains__))
            for one, leaf, axes in zip(self._asked, self._call.leaves, homes, strict=True)
        ]


class MpmdWrapped:
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
        functools.update_wrapper(self, fun)
        self.mpmd_config, self.name, self.keep_unused = config, name, keep_unused
        self._in_shardings, self._out_shardings = in_shardings, out_shardings
        numbers = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums or ())
        self._fun, self.parameters = fun, Parameters(donate_argnums=numbers)

        @functools.wraps(fun)
        def moving(*args: Any) -> Any:
            """Move the function's results to the memories that are asked of them."""
            leaves, tree = jax.tree.flatten(fun(*args))
            asked = self.asked_of_results(jax.tree.unflatten(tree, leaves))
            return jax.tree.unflatten(tree, [moved(leaf, one.memory) for leaf, one in zip(leaves, asked, strict=True)])

        self._jitted = jax.jit(moving)
        self.compiler: TaskCompiler[Topology] = TaskCompiler(config.meshes)
        self._compiled: dict[Hashable, MpmdCompiled] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the function. A new structure, type or spec of an argument, or new settings of JAX, compile it again."""
        call = self.parameters.split(self._fun, args, {})
        key = call.tree, tuple(zip(_structs(call), map(spec_of, call.leaves), strict=True)), trace_settings()
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self.lower(*args).compile()
        return compiled.run(call.leaves)

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
        refuse_disabled_jit("a function under mpmd.jit")
        config = self.mpmd_config
        call = self.parameters.split(self._fun, args, {})
        leaves = _arguments(call, call.leaves)
        check_meshes(leaves, config)
        asked = asked_of(leaves, self._in_shardings, config.input_mesh_assignment, config, "in")
        with context_mesh(None):  # no mesh around the call may change what is built
            structs = _structs(call, list(call.paths()), [one.memory for one in asked])
            with context_mesh(config.sharding_mesh):
                traced = self._jitted.trace(*_arguments(call, structs))
        return MpmdTraced(self, call, structs, asked, traced)

    def lower(self, *args: Any) -> MpmdLowered:
        """Partition the function for arguments like these: arrays, or `jax.ShapeDtypeStruct`s in their place.

        Raises:
          TypeError: if an argument is not an array.
          ValueError: if the function does not fit the topology, the assignment or the schedule; see `jit`.
          RuntimeError: under `jax.disable_jit`.
        """
        return self.trace(*args).lower()


def _arguments(call: Call, leaves: Sequence[Any]) -> tuple[Any, ...]:
    args, _ = call.with_leaves(leaves)
    return tuple(args)


def _structs(
    call: Call, paths: Iterable[str] = repeat(""), memories: Iterable[str | None] = repeat(None)
) -> list[jax.ShapeDtypeStruct]:
    """Return the types of the arguments: with the requested memory or their own, but without their partition.

    Raises:
      TypeError: if an argument is not an array.
    """
    try:
        return [_struct_of(*found) for found in zip(call.leaves, paths, memories, strict=False)]
    except TypeError as error:
        raise not_an_array(call, "close over it") from error


def _struct_of(leaf: Any, path: str, wanted: str | None) -> jax.ShapeDtypeStruct:
    shape, dtype, weak_type = type_of(leaf)
    own = memory_wanted(getattr(leaf, "sharding", None), f"argument{path}")
    kind = own if wanted is None else wanted
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type, sharding=in_memory(None, kind))


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
