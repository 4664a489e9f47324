"""Variables whose gradients are their next values, such as the scales of Flax's fp8 layers.

A step overwrites them with the largest of their gradients over the microbatches, as Flax's `TrainState` does with the
gradient of the whole batch. The optimizer does not see them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr, prune
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.messages import listed
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.frozen import path_text
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["check_overwritten", "total_weight"]


def check_overwritten(
    model: ModelAdapter,
    loss_of: Callable[[Any, Any, Any, Any, Any], Any],
    num_microbatches: int,
    state: TrainState,
    microbatch: Any,
) -> None:
    """Refuse variables that several places of one call read, if there are several microbatches.

    JAX adds the gradients of the places. The largest of such sums is not the sum of the largest gradients, which one
    call for the whole batch would return.

    Args:
      model: the adapter of the model.
      loss_of: returns the loss, a scalar, of the rest of the model's state, the parameters, the numbers of the step and
        the microbatch, and the microbatch; it is traced.
      num_microbatches: the number of microbatches of a step.
      state, microbatch: shapes.

    Raises:
      ModelError: naming the variables.
    """
    leaves, tree = jax.tree.flatten(state.model_state)
    chosen = [i for i, is_one in enumerate(model.overwritten_by_gradients(state.model_state)) if is_one]
    if num_microbatches == 1 or not chosen:
        return

    def gradients(values: Sequence[Any], leaves: Sequence[Any], *others: Any) -> Sequence[Any]:
        def of(values: Sequence[Any]) -> Any:
            given = dict(zip(chosen, values, strict=True))
            return loss_of(jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)]), *others)

        return jax.grad(of)(values)

    index = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = [leaves[i] for i in chosen], leaves, state.params, state.step, index, microbatch
    graph, _ = from_jaxpr(jax.make_jaxpr(gradients)(*arguments))
    paths = [
        path_text(path).removeprefix("collections/")
        for path, _ in jax.tree_util.tree_leaves_with_path(state.model_state)
    ]
    if shared := [paths[i] for i, is_sum in zip(chosen, _sums(graph), strict=True) if is_sum]:
        raise ModelError(
            f"one call reads {listed(shared, 3, str)} at several places, as a layer that is used twice does. Its "
            "gradients are its next values, and JAX adds those of the places, so the largest over the "
            f"{num_microbatches} microbatches is not that of the whole batch. Convert it to Flax's type fm32 once, "
            "before the first use, so that JAX takes the largest instead of the sum: "
            f"`model.variables[{OVERWRITE_WITH_GRADIENT!r}] = jax.tree.map(lambda x: jax.lax.convert_element_type(x, "
            f"fm32), model.variables[{OVERWRITE_WITH_GRADIENT!r}])`; or use num_microbatches=1."
        )


def _sums(graph: Graph) -> list[bool]:
    """Mark the outputs that are sums of gradients."""
    found: list[bool] = []
    for atom in graph.outputs:
        equation = graph.producer.get(atom) if isinstance(atom, Value) else None
        if equation is None:
            found.append(False)
        elif (called := facts_of(equation.primitive).body_in(equation.params)) is not None:
            found.append(_sums(from_jaxpr(called)[0])[equation.outputs.index(atom)])  # type: ignore[arg-type]
        else:
            found.append(equation.name == "add_any")
    return found


def total_weight(weight_of: Callable[[Any, Any], Any], batch: Any, num_microbatches: int) -> Any:
    """Return the sum of the microbatches' weights, outside of the loop.

    Args:
      weight_of: returns the weight of a microbatch and its number; of its work, only what the weight needs is done.
      batch: the microbatches, stacked along the first axis.
      num_microbatches: their number.
    """
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    jaxpr = jax.make_jaxpr(weight_of)(shapes, jax.ShapeDtypeStruct((), jnp.int32))
    graph, constants = from_jaxpr(jaxpr)
    weight = prune(graph)
    indices = jnp.arange(num_microbatches, dtype=jnp.int32)
    return jax.vmap(lambda *inputs: weight.run(*constants, *inputs)[0])(*jax.tree.leaves(batch), indices).sum()
