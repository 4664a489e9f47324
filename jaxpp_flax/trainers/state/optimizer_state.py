"""The optimizer's state: its shapes, its hash for comparisons, its values on the ranks, its copies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.checkpoint import CheckpointMismatchError
from jaxpp_flax.checkpoint.format.leaves import Wanted, is_key
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.reading import RestorePlan
from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdSharding, named_memory
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import key_impl
from jaxpp_flax.engine.program.description import describe_graph
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr, values
from jaxpp_flax.processes import value_hash, value_text
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.optimizer_memory import groups_of_host_leaves
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.loss_trace import used_inputs

# JAX raises these errors if an optimizer's `init` reads values. Such an `init` is called instead of traced.
_NOT_TRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)
# These operations return their operand unchanged.
_COPIES = {"copy", "copy_p", "optimization_barrier"}


def shapes_or_values(init: Callable[[Any], Any], params: Any) -> Any:
    """Return the shapes of `init(params)`; the values, if `init` cannot be traced.

    Raises:
      ModelError: if `init` reads values, and the parameters are shapes.
    """
    try:
        return jax.eval_shape(init, params)
    except _NOT_TRACEABLE as error:
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params)):
            raise ModelError(
                "the optimizer's `init` reads the values of parameters, and this model has none yet: it was given as a "
                f"function or an abstract module ({str(error).splitlines()[0]}). Pass the module itself, or an "
                "optimizer that `jax.eval_shape(tx.init, params)` can trace."
            ) from error
        return init(params)


def hash_of_init(init: Callable[[Any], Any], params: Any) -> str | None:
    """Return a hash of the program of `init` for parameters of these shapes, with its constants.

    Return None if `init` cannot be traced.

    Example:
      >>> import optax
      >>> tx = optax.inject_hyperparams(optax.sgd)
      >>> slow, again, fast = (hash_of_init(tx(rate).init, {"w": jnp.zeros(2)}) for rate in (0.1, 0.1, 0.2))
      >>> slow == again, slow == fast
      (True, False)
    """
    try:
        graph, consts = from_jaxpr(jax.make_jaxpr(init)(params))
    except _NOT_TRACEABLE:
        return None
    text = "\n".join([*describe_graph(graph), *(str(value_hash(const)) for const in consts)])
    return value_hash(np.frombuffer(text.encode(), np.uint8))


def numbers_of_init(init: Callable[[Any], Any], params: Any) -> dict[str, str | None]:
    """Return the single numbers in the result of `init` (hyperparameters, counters) by path, as text.

    Return nothing if `init` cannot be traced. For parameters that are shapes, the numbers are those for zeros.

    Example:
      >>> import optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
      >>> numbers_of_init(tx.init, {"w": jnp.zeros(2)})[".hyperparams['learning_rate']"]
      '0.25'
    """
    try:
        shapes = jax.tree.leaves_with_path(jax.eval_shape(init, params))
    except _NOT_TRACEABLE:
        return {}
    single = {
        jax.tree_util.keystr(path): i
        for i, (path, leaf) in enumerate(shapes)
        if leaf.size == 1 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }

    # The other results of `init`, such as moments of the parameters' size, are never computed.
    def numbers(given: dict[int, Any]) -> list[Any]:
        whole = [given.get(i, jnp.zeros(leaf.shape, leaf.dtype)) for i, leaf in enumerate(leaves)]
        return [jax.tree.leaves(init(jax.tree.unflatten(tree, whole)))[i] for i in single.values()]

    leaves, tree = jax.tree.flatten(params)
    values = jax.jit(numbers)({i: x for i, x in enumerate(leaves) if not isinstance(x, jax.ShapeDtypeStruct)})
    return dict(zip(single, map(value_text, values), strict=True))


def make_on_ranks(function: Callable[[Any], Any], argument: Any, shardings: Any) -> Any:
    """Compute `function(argument)` for a tree of `MpmdArray`s, once: see `RankPrograms`."""
    return RankPrograms(function, argument, shardings)(argument)


class RankPrograms:
    """The programs that compute a function of a tree of `MpmdArray`s: each leaf of the result on its own ranks.

    Every rank has its own program for its leaves. The inputs of this program are copied to the rank if needed.

    Args:
      function: of the tree, and of nothing else.
      argument: the tree, or its shapes.
      shardings: an `MpmdSharding` for each leaf of the result.
    """

    def __init__(self, function: Callable[[Any], Any], argument: Any, shardings: Any) -> None:
        leaves, self._tree = jax.tree.flatten(argument)
        self._shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._wanted: list[MpmdSharding]
        self._wanted, self._structure = jax.tree.flatten(shardings)
        self._function = function
        # For each program: its rank, the inputs that it reads, the results that it makes, and itself.
        self._programs: list[tuple[int, list[int], list[int], Callable[..., Any]]] = []
        if self._wanted:
            with context_mesh(None):
                self._build()

    def _flat(self, values: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(self._function(jax.tree.unflatten(self._tree, values)))

    def _build(self) -> None:
        graph, consts = from_jaxpr(jax.make_jaxpr(self._flat)(self._shapes))
        self._results = jax.eval_shape(self._flat, self._shapes)
        for rank in self._wanted[0].mpmd_mesh.local_ranks:
            own = [i for i, sharding in enumerate(self._wanted) if rank in sharding.ranks]
            kinds = [named_memory(self._wanted[i]) for i in own]
            for group in groups_of_host_leaves(kinds, [self._results[i] for i in own]):
                mine = [own[i] for i in group]
                used = used_inputs(graph, [i in mine for i in range(len(self._wanted))])[len(consts) :]
                read = [i for i, is_used in enumerate(used) if is_used]
                self._programs.append((rank, read, mine, self._program(rank, read, mine)))

    def _program(self, rank: int, read: list[int], mine: list[int]) -> Callable[..., Any]:
        def on_rank(values: Sequence[Any]) -> list[Any]:
            given = dict(zip(read, values, strict=True))
            # This rank's results do not depend on the other inputs, so these values are never computed.
            whole = self._flat([given[i] if i in given else _unused(s) for i, s in enumerate(self._shapes)])
            return [whole[i] for i in mine]

        return jax.jit(on_rank, out_shardings=[self._wanted[i].local_sharding(rank) for i in mine])

    @context_mesh(None)  # with a context mesh, JAX would compare each rank's devices with the devices of that mesh
    def __call__(self, argument: Any) -> Any:
        """Compute the function of a tree with the shapes of the first one."""
        if not self._wanted:
            return jax.tree.unflatten(self._structure, [])
        leaves = jax.tree.leaves(argument)
        parts: list[dict[int, jax.Array]] = [{} for _ in self._wanted]
        for rank, read, mine, program in self._programs:
            made = program([_on_rank(leaves[i], rank) for i in read])
            for i, array in zip(mine, made, strict=True):
                parts[i][rank] = array
            if named_memory(self._wanted[mine[0]]) is not None:  # the devices pass the next group on when this one left
                jax.block_until_ready(made)
        arrays = [
            MpmdArray(of, sharding, shape=result.shape, dtype=result.dtype)
            for of, sharding, result in zip(parts, self._wanted, self._results, strict=True)
        ]
        return jax.tree.unflatten(self._structure, arrays)


def _unused(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if is_key(shape):
        return jnp.broadcast_to(jax.random.key(0, impl=key_impl(shape.dtype)), shape.shape)
    return jnp.zeros(shape.shape, shape.dtype)


def _on_rank(leaf: MpmdArray, rank: int) -> jax.Array:
    part = leaf._partially_addressable_arrays.get(rank)
    return part if part is not None else jax.device_put(leaf._value, leaf.sharding.local_sharding(rank))


def copies_in(init: Any, params: Any) -> dict[str, str | None]:
    """Return the leaves of an optimizer's first state that depend on the parameters' values, by path.

    A plain copy of a parameter has the parameter's path; any other function of parameters has None. A leaf that only
    has a parameter's shape, such as a moment, is left out. An optimizer that cannot be traced gives no leaves.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> copies_in(optax.adam(0.1).init, {"w": jnp.ones(2)})
      {}
      >>> copies_in(lambda params: {"z": params, "size": abs(params["w"]).sum()}, {"w": jnp.ones(2)})
      {'size': None, 'z/w': 'w'}
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    try:
        jaxpr, state = jax.make_jaxpr(init, return_shape=True)(shapes)
    except _NOT_TRACEABLE:
        return {}
    graph, consts = from_jaxpr(jaxpr)
    graph = inline(graph, flatten=True)
    names = dict(zip(graph.inputs[len(consts) :], flatten(params)[0], strict=True))
    source = _sources(graph, names)
    paths = flatten(state)[0]
    return {
        path: source[atom]
        for path, atom in zip(paths, graph.outputs, strict=True)
        if isinstance(atom, Value) and atom in source
    }


def _sources(graph: Graph, names: dict[Value, str]) -> dict[Value, str | None]:
    """Return, for each value that depends on an input, the input that the value is a copy of, or None."""
    source: dict[Value, str | None] = dict(names)
    for equation in graph.equations:
        read = [atom for atom in values(equation.inputs) if atom in source]
        if not read:
            continue
        copies = equation.name in _COPIES and len(equation.inputs) == len(equation.outputs)
        for atom, output in zip(equation.inputs, equation.outputs, strict=False):
            source[output] = source.get(atom) if copies and isinstance(atom, Value) else None
        source |= dict.fromkeys([v for v in equation.outputs if v not in source], None)
    return source


def with_copies(plan: RestorePlan, state: TrainState, init: Any) -> tuple[RestorePlan, list[str]]:
    """Add the copies of restored parameters to a plan; return the new plan and the paths of these copies.

    Refuse a leaf that was computed from a restored parameter other than by a copy: it would keep its old value.
    """
    made = {f"opt_state/{path}": of for path, of in copies_in(init, state.params).items()}
    made |= {f"ema/{path}": path for path in (flatten(state.params)[0] if state.ema is not None else ())}
    chosen, wants, faults = dict(plan.chosen), dict(plan.wants), []
    restored = {path.removeprefix("params/") for path in chosen if path.startswith("params/")}
    for path, of in made.items():
        if path in plan.chosen or not restored or (of is not None and of not in restored):
            continue
        is_average = path.startswith("ema/")  # in its own type, which holds every value of the parameter's
        if of is None or (not is_average and plan.leaves[path].dtype != plan.leaves[f"params/{of}"].dtype):
            faults.append(f"{path}: the optimizer made it of parameters, other than by copying them")
            continue
        chosen[path], wants[path] = plan.chosen[f"params/{of}"], Wanted.of(plan.leaves[path])
    if faults:
        raise CheckpointMismatchError(
            f"{plan.directory} gives the parameters new values, and these leaves would keep what was made of the old "
            "ones. Restore them too, by `only`; or make a new trainer from a model with the checkpoint's weights.",
            faults,
        )
    return replace(plan, chosen=chosen, wants=wants), [path for path in chosen if path not in plan.chosen]
