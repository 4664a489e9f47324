"""Keep the examples of a microbatch divided where a scan carries them.

Nothing tells XLA how a scan's carry lies. If the scan reads parameters that are sharded over an axis of the batch, as
those of FSDP are, XLA's propagation may meet them first: it leaves the batch whole in the carry, and in all that the
scan stacks for its backward, and divides the width. Each device then does the work of all of them, and holds as much.
So what a scan starts from is constrained: its examples lie over the axes of the batch, and XLA chooses all else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ShardCounts
from jaxpp_flax.engine.analyses.batch_flow import BatchFlow, batch_in, batch_of
from jaxpp_flax.engine.passes.loop.loop import Loop, each_loop
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, everywhere
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of

__all__ = ["keep_batch"]


def keep_batch(step: Graph, specs: Sequence[PartitionSpec], shards: ShardCounts, submesh: AbstractMesh | None) -> Graph:
    """Constrain what scans in the loops' bodies start from, where its batch dimension is known.

    A user's constraint that moves this dimension ends what is known of it. On an Explicit mesh, the types say all.

    Args:
      step: with opened loops.
      specs: the partition of each input of the step inside a submesh.
      shards: returns the number of shards over an entry of a spec.
      submesh: that of a rank, without devices; None changes nothing.
    """
    if submesh is None or set(submesh.axis_types) != {AxisType.Auto}:
        return step
    dims = batch_of(step, specs, shards)
    return each_loop(step, Loop, lambda loop: _keep_in_loop(loop, dims, shards, submesh))


def _keep_in_loop(loop: Loop, dims: Mapping[Value, BatchDim], shards: ShardCounts, submesh: AbstractMesh) -> Loop:
    has_scan = any(facts_of(e.primitive).batch is Batch.SCAN for e in everywhere(loop.body))
    if not has_scan or dims.keys().isdisjoint(loop.constants):
        return loop
    body = loop.flat_body()
    flow = BatchFlow(batch_in(body, loop.constants, dims), shards)
    flow.follow(body.equations)
    equations: list[Equation] = []
    for equation in body.equations:
        if (scan := flow.scans.get(equation)) is not None:
            inputs = list(equation.inputs)
            for position, value in enumerate(scan.carry_in, scan.num_consts):
                if (dim := flow.dim_of(value)) is not None:
                    constraint, inputs[position] = _constrained(inputs[position], dim, submesh, equation)
                    equations.append(constraint)
            equation = equation.reading(tuple(inputs))
        equations.append(equation)
    if len(equations) == len(body.equations):
        return loop
    return replace(loop, body=replace(body, equations=tuple(equations)))


def _constrained(atom: Atom, batch_dim: BatchDim, submesh: AbstractMesh, reader: Equation) -> tuple[Equation, Atom]:
    dim, axes = batch_dim
    spec = [PartitionSpec.UNCONSTRAINED] * atom.aval.ndim
    spec[dim] = axes
    sharding = NamedSharding(submesh, PartitionSpec(*spec))
    (constraint,), (value,) = emit(lambda x: jax.lax.with_sharding_constraint(x, sharding), [atom], like=reader)
    return constraint, value
