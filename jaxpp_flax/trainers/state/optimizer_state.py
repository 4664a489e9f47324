"""The first state of the optimizer: its shapes, its hash for comparisons, and its values, made on the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.engine.arrays.ambient_mesh import context_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.program.description import describe_graph
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.processes import value_hash, value_text
from jaxpp_flax.trainers.step.loss_trace import used_inputs

# JAX raises these errors if an optimizer's `init` reads values. Such an `init` is called instead of traced.
NOT_TRACEABLE = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


def shapes_or_values(init: Callable[[Any], Any], params: Any) -> Any:
    """Return the shapes of `init(params)`; the values, if `init` cannot be traced."""
    try:
        return jax.eval_shape(init, params)
    except NOT_TRACEABLE:
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
    except NOT_TRACEABLE:
        return None
    text = "\n".join([*describe_graph(graph), *(str(value_hash(const)) for const in consts)])
    return value_hash(np.frombuffer(text.encode(), np.uint8))


def numbers_of_init(init: Callable[[Any], Any], params: Any) -> dict[str, str | None]:
    """Return the single numbers in the result of `init` (hyperparameters, counters) by path, as text.

    Return nothing if `init` cannot be traced.

    Example:
      >>> import optax
      >>> tx = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
      >>> numbers_of_init(tx.init, {"w": jnp.zeros(2)})[".hyperparams['learning_rate']"]
      '0.25'
    """
    try:
        shapes = jax.tree.leaves_with_path(jax.eval_shape(init, params))
    except NOT_TRACEABLE:
        return {}
    single = {
        jax.tree_util.keystr(path): i
        for i, (path, leaf) in enumerate(shapes)
        if leaf.size == 1 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
    # The other results of `init`, such as moments of the parameters' size, are never computed.
    values = jax.jit(lambda params: [jax.tree.leaves(init(params))[i] for i in single.values()])(params)
    return dict(zip(single, map(value_text, values), strict=True))


@context_mesh(None)  # with a context mesh, JAX would compare each rank's devices with the devices of that mesh
def make_on_ranks(function: Callable[[Any], Any], argument: Any, shardings: Any) -> Any:
    """Compute `function(argument)` for a tree of `MpmdArray`s: each leaf of the result on its own ranks.

    Every rank runs its own program for its leaves. The inputs of this program are copied to the rank if needed.
    `shardings` has an `MpmdSharding` for each leaf of the result.
    """
    leaves, tree = jax.tree.flatten(argument)
    wanted: list[MpmdSharding]
    wanted, structure = jax.tree.flatten(shardings)
    if not wanted:
        return jax.tree.unflatten(structure, [])
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def flat(values: Sequence[Any]) -> list[Any]:
        return jax.tree.leaves(function(jax.tree.unflatten(tree, values)))

    graph, consts = from_jaxpr(jax.make_jaxpr(flat)(shapes))
    results = jax.eval_shape(flat, shapes)
    parts: list[dict[int, jax.Array]] = [{} for _ in wanted]
    for rank in wanted[0].mpmd_mesh.local_ranks:
        mine = [i for i, sharding in enumerate(wanted) if rank in sharding.mesh_ids]
        if not mine:
            continue
        used = used_inputs(graph, [i in mine for i in range(len(wanted))])[len(consts) :]
        read = [i for i, is_used in enumerate(used) if is_used]

        def on_rank(values: Sequence[Any], mine: Sequence[int] = mine, read: Sequence[int] = read) -> list[Any]:
            given = dict(zip(read, values, strict=True))
            # This rank's results do not depend on the other inputs, so these zeros are never computed.
            whole = flat([given[i] if i in given else jnp.zeros(s.shape, s.dtype) for i, s in enumerate(shapes)])
            return [whole[i] for i in mine]

        made = jax.jit(on_rank, out_shardings=[wanted[i].local_sharding(rank) for i in mine])(
            [_on_rank(leaves[i], rank) for i in read]
        )
        for i, array in zip(mine, made, strict=True):
            parts[i][rank] = array
    arrays = [
        MpmdArray(of, sharding, shape=result.shape, dtype=result.dtype)
        for of, sharding, result in zip(parts, wanted, results, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _on_rank(leaf: MpmdArray, rank: int) -> jax.Array:
    part = leaf._partially_addressable_arrays.get(rank)
    return part if part is not None else jax.device_put(leaf._value, leaf.sharding.local_sharding(rank))
