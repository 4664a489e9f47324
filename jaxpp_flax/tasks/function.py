"""`mpmd`: the decorator of functions that consist of tasks and transfers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.rank_shardings import broadcast_prefix, check_divides
from jaxpp_flax.engine.jit import check_mesh
from jaxpp_flax.engine.placed import FunctionOnRanks, Types, structs_of, trace
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.runtime.task_compiler import TaskCompiler
from jaxpp_flax.engine.signature import Signature, both_ways, paths_of
from jaxpp_flax.engine.tracing.ir import Constant, from_jaxpr
from jaxpp_flax.engine.tracing.memory import in_memory
from jaxpp_flax.tasks.lowered import LoweredMpmdFun
from jaxpp_flax.tasks.program import program_of
from jaxpp_flax.tasks.ranks import on_rank
from jaxpp_flax.tasks.recording import Recording, recording

__all__ = ["MpmdFunction", "mpmd"]

Place = tuple[int, NamedSharding]  # the rank of an argument, and its sharding there


class MpmdFunction(FunctionOnRanks[LoweredMpmdFun]):
    """A function of tasks and transfers; see `mpmd`. It is lowered and compiled once for each type of its arguments."""

    def __init__(
        self,
        fun: Callable[..., Any],
        mpmd_mesh: MpmdMesh,
        in_shardings: Any,
        donate_argnums: int | Sequence[int] | None,
        infer_donation: bool,
    ) -> None:
        super().__init__(fun)
        self.mpmd_mesh, self.in_shardings, self.infer_donation = mpmd_mesh, in_shardings, infer_donation
        self._fun, (self._donated, _) = fun, both_ways(fun, donate_argnums, None)
        self._name = getattr(fun, "__name__", type(fun).__name__)
        self._compiler = TaskCompiler(mpmd_mesh)  # the programs for all types of its arguments share tasks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function on its ranks. For new types, compile it first; inside a trace of JAX, trace it instead."""
        leaves, tree = self._flatten(args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            self._types(leaves, tree)
            results, _, out_tree = self._record(args, self._argument_places(tree, leaves))
            return jax.tree_util.tree_unflatten(out_tree, results)
        return self._find(leaves, tree).compiled.run(leaves)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredMpmdFun:
        """Trace the function for arguments like these, arrays or `jax.ShapeDtypeStruct`s, and make its programs.

        Raises: see `mpmd`.
        """
        refuse_disabled_jit("a function under mpmd")
        leaves, tree = self._flatten(args, kwargs)
        types = self._types(leaves, tree)
        with context_mesh(None):  # no mesh around the call may change what is built
            return self._place(tree, types, self._argument_places(tree, leaves))

    def _flatten(self, args: Sequence[Any], kwargs: Any) -> tuple[list[Any], Any]:
        if kwargs:
            raise ValueError(
                f"{self._name} was called with keyword arguments ({', '.join(sorted(kwargs))}), but in_shardings has "
                "one tree for each positional argument. Pass them by position."
            )
        return jax.tree_util.tree_flatten((tuple(args), kwargs))

    def _argument_places(self, tree: Any, leaves: Sequence[Any]) -> tuple[Place, ...]:
        args, _ = jax.tree_util.tree_unflatten(tree, leaves)
        prefix = tuple(self.in_shardings) if isinstance(self.in_shardings, list) else self.in_shardings
        nodes = broadcast_prefix(prefix if prefix is not None else (), args, f"in_shardings of {self._name}")
        return tuple(on_rank(self.mpmd_mesh, node, where) for where, node in nodes)

    def _place(self, tree: Any, types: Types, places: tuple[Place, ...]) -> LoweredMpmdFun:
        refuse_disabled_jit("a function under mpmd")
        structs, in_shardings = structs_of(types), [sharding for _, sharding in places]
        specs = [sharding.spec for sharding in in_shardings]
        paths = [f"argument{path}" for path in paths_of(tree)]
        check_divides(paths, structs, specs, dict(self.mpmd_mesh.abstract_submesh.shape))
        recorded: list[Any] = []

        @functools.wraps(self._fun)
        def flat(*args: Any) -> list[Any]:
            results, shardings, out_tree = self._record(args, places)
            recorded[:] = [shardings, out_tree]
            return results

        args, _ = jax.tree_util.tree_unflatten(tree, map(_typed, structs, in_shardings))
        traced, donated = trace(jax.jit(flat, donate_argnums=self._donated), args)
        graph, constants = from_jaxpr(traced.jaxpr)
        program = program_of(
            graph,
            self.mpmd_mesh,
            [None] * len(constants) + [rank for rank, _ in places],
            [False] * len(constants) + list(donated),
            infer_donation=self.infer_donation,
            keep_received=len(self.mpmd_mesh.processes) > 1,
        )
        shardings, out_tree = recorded
        return LoweredMpmdFun(
            program=program,
            signature=Signature.of(tree, structs, specs, out_tree, donated, function=self._name),
            constants=tuple(constants),
            inputs=graph.inputs,
            outputs=graph.outputs,
            result_specs=[None] * len(program.results),
            compiler=self._compiler,
            argument_shardings=in_shardings,
            result_shardings=list(map(self._result_sharding, graph.outputs, shardings)),
        )

    def _result_sharding(self, atom: Any, own: NamedSharding | None) -> NamedSharding | None:
        if isinstance(atom, Constant):
            return None
        return own or NamedSharding(self.mpmd_mesh.unstack[0], PartitionSpec())  # a captured array

    def _record(
        self, args: Sequence[Any], places: Sequence[Place]
    ) -> tuple[list[Any], list[NamedSharding | None], Any]:
        """Run the function on traced arguments; return the results, their shardings, and their tree."""
        with recording(self.mpmd_mesh) as record:
            for leaf, (rank, sharding) in zip(jax.tree.leaves(args), places, strict=True):
                record.know(leaf, rank, sharding)
            results, tree = jax.tree_util.tree_flatten(self._fun(*args))
            _check_done(self._name, record)
        homes = [record.of(result) for result in results]
        return results, [None if k is None else k.sharding for k in homes], tree


def _typed(struct: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Add an argument's memory to its type; on an Explicit mesh, add its partition too."""
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    typed = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec) if explicit else None
    return struct.update(sharding=in_memory(typed, sharding.memory_kind))


def _check_done(name: str, record: Recording) -> None:
    if record.waiting:
        numbers = ", ".join(map(str, sorted(record.waiting)))
        raise ValueError(
            f"{name} starts {record.transfers} transfers and never takes the values of transfer "
            f"{numbers} (counted from 0, in the order of the calls). Call `.done()` "
            "on its future before the first task that needs the values, or leave the transfer out."
        )


def mpmd(
    mpmd_mesh: MpmdMesh,
    *,
    in_shardings: Any,
    donate_argnums: int | Sequence[int] | None = None,
    infer_donation: bool = False,
) -> Callable[[Callable[..., Any]], MpmdFunction]:
    """Decorate a function that consists of `task` and `transfer` calls: each rank runs its tasks in the order of calls.

    The function may rearrange containers and call tasks in loops, but it computes nothing itself. All ranks follow the
    one order of the calls, so a program cannot deadlock. With several processes, each process calls the function,
    compiles the tasks of its own ranks, and gets their results; results of other ranks have no addressable shards.

    Args:
      mpmd_mesh: the mesh of all ranks. A rank is a group of devices, one submesh of `mpmd_mesh.unstack`.
      in_shardings: a prefix tree of the tuple of arguments, with the `NamedSharding` of each argument over the submesh
        of its rank.
      donate_argnums: arguments whose memory the function may reuse.
      infer_donation: True lets each task reuse the memory of values that nothing reads afterwards; False lets it reuse
        only its own `donate_argnums`. The memory of sent values is never reused.

    Returns:
      A decorator, which gives an `MpmdFunction`: call it, or `.lower(*shapes).compile()`.

    Raises (when the function is lowered, before anything runs):
      TypeError: if `mpmd_mesh` is no `MpmdMesh`, a sharding no `NamedSharding`, or an argument no array.
      ValueError: if the function computes outside of tasks; a sharding is over a mesh that is no rank's; a task's
        shardings name several ranks; a transfer would change a partition, or its `done()` is never called; a donated
        value is read again or was sent.
      RuntimeError: if `done()` of a future is called twice.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec
      >>> from jaxpp_flax.tasks import task, transfer
      >>> mesh = MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> on = [NamedSharding(submesh, PartitionSpec()) for submesh in mesh.unstack]
      >>> @mpmd(mesh, in_shardings=([on[0], on[1]], on[0]))
      ... def model(w, x):
      ...     x = task(lambda w, x: jnp.tanh(x @ w), out_shardings=on[0], name="first")(w[0], x)
      ...     x = transfer(x, out_shardings=on[1]).done()
      ...     return task(lambda w, x: x @ w, out_shardings=on[1], name="second")(w[1], x)
      >>> lowered = model.lower([jnp.ones((3, 3))] * 2, jnp.zeros((2, 3)))
      >>> print(lowered.as_text(rank=1))
      rank 0 -> rank 1: send v2 receive v3
      rank 1: v5 = second(v4, v3)
      rank 1: free v3
      >>> model([jnp.ones((3, 3))] * 2, jnp.zeros((2, 3))).shape
      (2, 3)

    After the function of the same name in NVIDIA's JaxPP (`jaxpp.experimental.mpmd`, 2026).
    """
    check_mesh(mpmd_mesh)
    return lambda fun: MpmdFunction(fun, mpmd_mesh, in_shardings, donate_argnums, infer_donation)
