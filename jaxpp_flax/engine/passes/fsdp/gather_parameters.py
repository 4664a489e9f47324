"""Let a loop read gathered parameters in place of their shards.

A parameter qualifies if every microbatch reads it whole, and it is sharded over axes that also shard the examples of a
microbatch. An equation before the loops gathers it, and the loop's tasks need no collective for it. On an Explicit mesh
the gathered parameter has another type than its shards. The body's own `reshard` reads the gathered one, and the
`reshard` of the gradient to the parameter's partition waits until after the loop (see `defer_reductions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, ShardCounts
from jaxpp_flax.engine.analyses.batch_flow import batch_of
from jaxpp_flax.engine.arrays.mesh import axes_in, keep_axes
from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule, FsdpWarning, Gather
from jaxpp_flax.engine.passes.loop.loop import Loop, each_loop, loops_of
from jaxpp_flax.engine.program.specs import followed_spec
from jaxpp_flax.engine.tracing.ir import Atom, Equation, Graph, Value, emit, prune, struct_of, values
from jaxpp_flax.engine.tracing.loop_body import LoopBody, sliced_by_index
from jaxpp_flax.engine.tracing.primitives import Batch, facts_of
from jaxpp_flax.messages import warn_user

__all__ = ["gather_parameters"]


def gather_parameters(step: Graph, specs: Sequence[PartitionSpec], shards: ShardCounts, rule: FsdpRule | None) -> Graph:
    """Change the loops of a step; without a rule, nothing changes.

    Args:
      step: with opened loops.
      specs: the partition of each input of the step inside a submesh.
      shards: returns the number of shards over an entry of a spec.
      rule: the setting, or None.

    Raises:
      ValueError: if no loop reads a parameter that is sharded over the axes of its batch.
    """
    if rule is None:
        return step
    spec_of = dict(zip(step.inputs, specs, strict=True))
    dims = batch_of(step, specs, shards)
    behind = _follow(step.equations, spec_of)
    gathers: dict[tuple[Value, PartitionSpec], Gather] = {}  # of all loops: two that read one parameter share it

    def gather(operand: Value, spec: PartitionSpec) -> Gather:
        if (operand, spec) not in gathers:
            gathers[operand, spec] = _gather(operand, spec, shards, rule)
        return gathers[operand, spec]

    changed = each_loop(step, Loop, lambda loop: _gather_in_loop(loop, spec_of, behind, dims, gather, rule))
    if not gathers:
        raise ValueError(_nothing_to_gather(step, spec_of, rule))
    equations: dict[Equation, None] = {}
    for equation in changed.equations:
        if isinstance(equation, Loop):  # each gather stands in front of the first loop that reads it
            equations.update(dict.fromkeys(gather.equation for gather in equation.gathered.values()))
        equations[equation] = None
    return replace(changed, equations=tuple(equations))


def _follow(equations: Iterable[Equation], spec_of: dict[Value, PartitionSpec]) -> dict[Value, tuple[Value, ...]]:
    """Follow the inputs of a step to its loops, and return the inputs behind each value of unknown partition.

    `spec_of` has the partitions of the inputs, and gets those of values that are converted, scaled, transposed or
    fetched from the host. Sums are left out, and results of loops, and arrays whose partition the user asks for: these
    are as they should be.
    """
    inputs = set(spec_of)
    behind: dict[Value, tuple[Value, ...]] = {value: (value,) for value in inputs}
    for equation in equations:
        facts = facts_of(equation.primitive)
        if (spec := followed_spec(equation, spec_of)) is not None:
            spec_of[equation.outputs[0]] = spec
        step_inputs = tuple(dict.fromkeys(p for v in values(equation.inputs) for p in behind.get(v, ())))
        if step_inputs and not isinstance(equation, Loop) and not facts.is_reduction and not facts.placing:
            behind.update((v, step_inputs) for v in equation.outputs if v.aval.size > 1)
    return {value: step_inputs for value, step_inputs in behind.items() if value not in spec_of}


def _warn_of_derived(operand: Value, parameter: Value, rule: FsdpRule) -> None:
    """Warn of a value that a loop reads, whose partition XLA chooses, although a parameter behind it is sharded."""
    warn_user(
        f"a loop reads {operand.aval.str_short()}, which is made before the loop of {rule.name_of(parameter)}, "
        f"{parameter.aval.str_short()}, a sharded parameter. Every microbatch gathers it again: only parameters "
        "that are converted, scaled by a number, transposed or fetched from the host are gathered once. Do the rest of "
        "this work inside the loop.",
        FsdpWarning,
    )


def _gather_in_loop(
    loop: Loop,
    spec_of: Mapping[Value, PartitionSpec],
    behind: Mapping[Value, tuple[Value, ...]],
    dims: Mapping[Value, BatchDim],
    gather: Callable[[Value, PartitionSpec], Gather],
    rule: FsdpRule,
) -> Loop:
    body = loop.flat_body()
    sliced = sliced_by_index(body.equations, body.index)
    operands = {v: a for v, a in zip(body.constants, loop.constants, strict=True) if isinstance(a, Value)}
    axes = {name for v in sliced if operands.get(v) in dims for name in axes_in((dims[operands[v]][1],))}
    whole = body.reads.keys() - sliced  # nothing slices a batch leaf that nothing reads
    gathered: dict[Value, Gather] = {}
    twins: dict[Atom, Value] = {}
    for value in [v for v in operands if v in whole]:
        operand = operands[value]
        if derived := [p for p in behind.get(operand, ()) if axes.intersection(axes_in(spec_of[p]))]:
            _warn_of_derived(operand, derived[0], rule)
        if axes.isdisjoint(axes_in(spec_of.get(operand, ()))):
            continue
        gathering = gather(operand, keep_axes(spec_of[operand], lambda name: name not in axes))
        twins[value] = value if struct_of(value.aval).sharding is None else Value(gathering.result.aval)
        gathered[twins[value]] = gathering
    if not gathered:
        return loop
    constants = [
        gathered[twins[v]].result if v in twins else a for v, a in zip(body.constants, loop.constants, strict=True)
    ]
    body = _reading(body, twins, axes)
    _warn_of_shards(body, twins, operands, rule)
    return replace(loop, inputs=(*constants, *loop.carry_init), body=body, gathered=gathered)


def _gather(operand: Value, spec: PartitionSpec, shards: ShardCounts, rule: FsdpRule) -> Gather:
    sharding = NamedSharding(rule.mesh, spec)
    place = jax.lax.with_sharding_constraint if struct_of(operand.aval).sharding is None else jax.sharding.reshard
    (equation,), _ = emit(lambda x: place(x, sharding), [operand])
    return Gather(parameter=operand, equation=equation, spec=spec, nbytes=operand.nbytes // shards.parts(spec))


def _reading(body: LoopBody, twins: dict[Atom, Value], axes: set[str]) -> LoopBody:
    """Let the equations of a body read gathered parameters; `twins` maps a value to the one that takes its place.

    On an Auto mesh a twin is the value itself. On an Explicit mesh its type differs. An equation that needs the old
    type reads the shard that a device has of the gathered parameter: this moves nothing.
    """
    constants = tuple(twins.get(v, v) for v in body.constants)
    equations: list[Equation] = []
    for value, twin in list(twins.items()):
        if twin is not value:
            sharding = struct_of(value.aval).sharding
            (cut,), _ = emit(lambda x, to=sharding: jax.sharding.reshard(x, to), [twin])
            equations.append(replace(cut, outputs=(value,)))
    for equation in body.equations:
        facts, first = facts_of(equation.primitive), equation.inputs[0] if equation.inputs else None
        follows = facts.placing or (facts.batch is Batch.ELEMENTWISE and len(equation.inputs) == 1)
        if first not in twins or not follows:
            equations.append(equation)
            continue
        (out,), twin = equation.outputs, twins[first]
        if twin is first:
            twins[out] = out
            equations.append(_placed_without(equation, axes) if facts.placing else equation)
        elif facts.placing:
            equations.append(equation.reading((twin,)))
        else:
            copies, (twins[out],) = emit(lambda x, e=equation: e.bind(x)[0], [twin], like=equation)  # type: ignore[list-item]
            equations += [*copies, equation]
    graph = prune(Graph((*constants, body.index, *body.carry), body.outputs, tuple(equations)))
    return body.rewritten(graph)


def _warn_of_shards(
    body: LoopBody, twins: Mapping[Atom, Value], operands: Mapping[Value, Value], rule: FsdpRule
) -> None:
    """Warn of parameters that the body reads as shards, which then gathers them itself."""
    for value, operand in operands.items():
        reader = next((e for e in body.equations if value in e.inputs), None)
        if reader is not None and twins.get(value, value) is not value:
            warn_user(
                f"{rule.name_of(operand)}, {value.aval.str_short()}, is read as shards by `{reader.name}` at "
                f"{reader.where}, so every microbatch gathers it again. Call `jax.sharding.reshard` on the parameter "
                "itself, outside scans and other calls.",
                FsdpWarning,
            )


def _placed_without(equation: Equation, axes: set[str]) -> Equation:
    """Return a constraint that does not shard a gathered parameter again."""
    facts = facts_of(equation.primitive)
    sharding = facts.placing_in(equation.params)
    if facts.placing is None or not isinstance(sharding, NamedSharding):
        return equation
    spec = keep_axes(sharding.spec, lambda axis: axis not in axes)
    return replace(equation, params={**equation.params, facts.placing: NamedSharding(sharding.mesh, spec)})


def _nothing_to_gather(step: Graph, spec_of: Mapping[Value, PartitionSpec], rule: FsdpRule) -> str:
    read = [a for loop in loops_of(step, Loop) for a in loop.constants if isinstance(a, Value)]
    specs = sorted({str(spec) for a in read if (spec := spec_of.get(a)) is not None and any(spec.partitions)})
    return (
        f"fsdp='step' gathers parameters that are sharded over an axis that also shards the examples of a "
        f"microbatch, but the step has none. The sharded arguments of its loops have the partitions "
        f"{', '.join(specs) or '(none)'} inside a rank, whose mesh is {dict(rule.mesh.shape)}. Shard a parameter and "
        "the examples over one axis (in_specs, or the annotations of the model), or leave fsdp= out."
    )
