"""The products of matrices in the optimizer's update, as of Muon: of each parameter, on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Value, from_jaxpr
from jaxpp_flax.planning.planner import TracedUpdate
from jaxpp_flax.planning.quoting.facts import TaskFacts, facts_of_products

__all__ = ["facts_of_update"]


def facts_of_update(
    update: TracedUpdate, specs: Mapping[int, PartitionSpec], axis_sizes: Mapping[str, int]
) -> dict[int, TaskFacts]:
    """Return the products that the update of each parameter takes, by the parameter's place among the arguments.

    What else an update does is reading and writing of its state, which a quote counts by its bytes.

    Args:
      update: the traced update.
      specs: the partitions of the parameters inside a rank, by their places.
      axis_sizes: the sizes of the axes inside a rank.
    """
    graph = inline(from_jaxpr(update.jaxpr)[0], flatten=True, remat=True)
    # The constants that the trace captured come first.
    owners = [None] * (len(graph.inputs) - len(update.parameters)) + list(update.parameters)
    shapes: dict[int, Any] = {}
    owner_of, in_specs = dict[Value, int](), list[PartitionSpec]()
    for value, owner in zip(graph.inputs, owners, strict=True):
        spec = None
        if owner is not None:
            owner_of[value] = owner
            is_alike = shapes.setdefault(owner, value.aval.shape) == value.aval.shape  # its gradient comes first
            spec = specs.get(owner) if is_alike else None
        in_specs.append(spec or PartitionSpec())
    found: dict[int, TaskFacts] = {}
    for equation, facts in facts_of_products(graph, in_specs, axis_sizes):
        of = [owner_of[atom] for atom in equation.inputs if isinstance(atom, Value) and atom in owner_of]
        if of:  # a norm of all gradients, a single number, belongs to no parameter
            owner_of.update((value, of[0]) for value in equation.outputs if getattr(value.aval, "size", 0) > 1)
        if facts is not None:
            owner = of[0] if of else next(iter(shapes))
            before = found.get(owner, TaskFacts())
            found[owner] = TaskFacts(
                before.products + facts.products, collectives=before.collectives + facts.collectives
            )
    return found
