"""From the graph of a step to its program: the passes in order, each a pure function of the one before."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import BatchDim, propagate
from jaxpp_flax.engine.analyses.partial_sums import refuse_partial_sums
from jaxpp_flax.engine.analyses.result_ranks import Audience
from jaxpp_flax.engine.arrays.mesh import axes_in
from jaxpp_flax.engine.blocks import LoopBody, Marks
from jaxpp_flax.engine.passes.defer_reductions import defer_reductions
from jaxpp_flax.engine.passes.drop_unused import drop_unused_results
from jaxpp_flax.engine.passes.label import find_marks, label
from jaxpp_flax.engine.passes.liveness import allocate
from jaxpp_flax.engine.passes.partition import Partial, Partition, partition, verify_effects
from jaxpp_flax.engine.passes.place import Loop, Placed, place
from jaxpp_flax.engine.passes.schedule import unroll
from jaxpp_flax.engine.passes.split_conditions import split_conditions
from jaxpp_flax.engine.passes.updated_arguments import find_relatives
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.effects import refuse_ordered_effects
from jaxpp_flax.engine.tracing.hints import without_hints
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Atom, Constant, Equation, Graph, Value, from_jaxpr, struct_of
from jaxpp_flax.engine.tracing.markers import Mark
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import FusedTask

__all__ = ["Built", "CutPolicy", "build", "cut_at_every_mark"]

# Which of the marks cut, given them in program order and the number of stages: one index fewer than stages.
CutPolicy = Callable[[Sequence[Mark], int], Sequence[int]]


@dataclass(frozen=True)
class Built:
    """The program, and what it was made from."""

    program: Program
    placed: Placed
    loops: tuple[Loop, ...]
    marks: tuple[tuple[Mark, ...], ...]
    cuts: tuple[tuple[int, ...], ...]


def cut_at_every_mark(marks: Sequence[Mark], num_stages: int) -> Sequence[int]:
    """The default policy: every mark cuts; a final one after the last stage adds none.

    Raises:
      ValueError: if there are fewer or more marks than the stages need.
    """
    if len(marks) in (num_stages - 1, num_stages):
        return range(num_stages - 1)
    # The line alone: with the functions around it, a few marks fill the screen.
    listing = "; ".join(f"{m.name or 'unnamed'} at {m.where.partition(' (')[0]}" for m in marks[:5]) or "none"
    more = f" and {len(marks) - 5} more" if len(marks) > 5 else ""
    need = f"{num_stages - 1} mark{'' if num_stages == 2 else 's'} (or {num_stages} with a final one)"
    remedy = "Add marks" if len(marks) < num_stages - 1 else "Choose which of them cut (`assignment=`/`cut_policy=`)"
    raise ValueError(
        f"a pipeline of {num_stages} stages needs {need}, but the loop's body holds {len(marks)}: {listing}{more}. "
        f"{remedy}, or change the number of stages."
    )


def _verifying() -> bool:
    return os.environ.get("JAXPP_FLAX_VERIFY", "0") not in ("", "0")


def build(
    graph: Graph,
    num_ranks: int,
    policy: CutPolicy,
    donated: Sequence[bool],
    specs: Sequence[PartitionSpec],
    axis_sizes: Mapping[str, int],
    audience: Audience | None = None,
) -> Built:
    """Run all passes on a traced step.

    Args:
      graph: the step; may hold several loops.
      num_ranks: ranks of the mesh.
      policy: which marks cut.
      donated: for each input, whether its buffers may be reused.
      specs: how each input is partitioned inside a submesh.
      axis_sizes: of the submesh's axes.
      audience: with several processes, which results all of them get.

    Raises:
      ValueError: if the step holds no loop, a loop's schedule or marks do not fit, or a marker cannot cut.
    """
    verify = _verifying()
    flat = split_conditions(drop_unused_results(inline(graph, flatten=True)))
    refuse_partial_sums(flat)
    refuse_ordered_effects(flat)
    if verify:
        flat.verify()
    size = _Sizes(axis_sizes)
    known = {v: dim for v, spec in zip(flat.inputs, specs, strict=True) if (dim := size.batch_dim(v, spec)) is not None}
    dims = propagate(flat.equations, known, size) if known else {}
    spec_of = dict(zip(flat.inputs, specs, strict=True))
    position = {value: i - len(flat.inputs) for i, value in enumerate(flat.inputs)}
    nodes: list[Equation | Loop] = []
    sums: set[Equation] = set()
    marks: list[tuple[Mark, ...]] = []
    cuts: list[tuple[int, ...]] = []
    for equation in flat.equations:
        if equation.primitive is not treduce_p:
            nodes.append(equation)
            continue
        cut = _cut_loop(equation, num_ranks, policy, verify, size, dims, spec_of, position)
        before, loop, after = _as_loop(equation, cut)
        nodes.extend([*before, loop, *after])
        sums.update(after)
        marks.append(cut.marks)
        cuts.append(cut.cuts)
    nodes = find_relatives(nodes, flat.inputs)
    loops = tuple(n for n in nodes if isinstance(n, Loop))
    if not loops:
        raise ValueError(
            "the step given to mpmd_jit_with_loop holds no `treduce`: there is no loop over microbatches to pipeline. "
            "Wrap the work of one microbatch: `treduce(jax.value_and_grad(loss), batch, schedule=Std1F1B(n))`; "
            "for inference use `mpmd_jit`."
        )
    placed = place(nodes, flat.inputs, flat.outputs, frozenset(sums), audience)
    unrolled = unroll(placed, num_ranks)
    program = allocate(unrolled, donated, keep_received=audience is not None)
    if verify:
        placed.verify()
        unrolled.verify()
        program.verify()
    return Built(program, placed, loops, tuple(marks), tuple(cuts))


@dataclass(frozen=True)
class _CutLoop:
    partition: Partition
    schedule: Schedule
    marks: tuple[Mark, ...]
    cuts: tuple[int, ...]
    deferred: tuple[Any, ...]


@dataclass(frozen=True)
class _Sizes:
    """The number of shards over an entry of a PartitionSpec."""

    axes: Mapping[str, int]

    def __call__(self, entry: Any) -> int:
        names = entry if isinstance(entry, tuple) else (entry,)
        return math.prod(self.axes[name] for name in names)

    def batch_dim(self, value: Value, spec: PartitionSpec) -> BatchDim | None:
        """The first dimension of an argument that is really sharded."""
        for dim, entry in enumerate(spec):
            if entry is not None and self(entry) > 1:
                return dim, entry
        return None


def _check_schedule(equation: Equation, num_ranks: int) -> Schedule:
    schedule, length = equation.params["schedule"], equation.params["length"]
    where = equation.where
    if schedule is None:
        raise ValueError(
            f"the treduce at {where} has no schedule, so its tasks have no order. Pass one: "
            f"`treduce(..., schedule=Std1F1B({num_ranks}))`."
        )
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"the treduce at {where} got schedule={schedule!r} ({type(schedule).__name__}). Pass a Schedule object, "
            f"e.g. `Std1F1B({num_ranks})`; `jaxpp_flax.schedules.by_name` makes one from a name."
        )
    if schedule.num_ranks != num_ranks:
        raise ValueError(
            f"the schedule of the treduce at {where}, {type(schedule).__name__}, is for {schedule.num_ranks} ranks, "
            f"but the mesh has {num_ranks}. Make it with the mesh's `mpmd_dim`."
        )
    schedule.check(length)
    return schedule


def _cut_loop(
    equation: Equation,
    num_ranks: int,
    policy: CutPolicy,
    verify: bool,
    size: _Sizes,
    dims: Mapping[Value, BatchDim],
    spec_of: Mapping[Value, PartitionSpec],
    position: Mapping[Value, int],
) -> _CutLoop:
    schedule = _check_schedule(equation, num_ranks)
    params = equation.params
    body = without_hints(inline(params["body"]))
    refuse_partial_sums(body)
    operands = dict(zip(body.inputs, equation.inputs[: params["num_consts"]], strict=False))
    batch = {v: dims[a] for v, a in operands.items() if isinstance(a, Value) and a in dims}
    deferred: tuple[Any, ...] = (None,) * len(params["operations"])
    if batch:
        flat = without_hints(inline(body, flatten=True, remat=True))
        batch = {v: dim for v, dim in batch.items() if v in _indexed(flat, body.inputs[params["num_consts"]])}
        sharded = {
            (v.aval.shape, name)
            for v, a in operands.items()
            for name in axes_in(spec_of.get(a, ()) if isinstance(a, Value) and v not in batch else ())
        }

        def may_defer(gradient: Value, axes: Any) -> bool:
            return all((gradient.aval.shape, name) not in sharded for name in axes_in((axes,)))

        body, deferred = defer_reductions(flat, params["num_carry"], params["operations"], batch, size, may_defer)
    markers, marks = find_marks(body)
    outer = [*equation.inputs[: params["num_consts"]], params["length"], *equation.inputs[params["num_consts"] :]]
    known = LoopBody(
        graph=body,
        num_consts=params["num_consts"],
        num_carry=params["num_carry"],
        operations=params["operations"],
        length=params["length"],
        split_backward=schedule.splits_backward,
        markers=markers,
        arguments={
            v: (position[a], spec_of[a])
            for v, a in zip(body.inputs, outer, strict=True)
            if isinstance(a, Value) and a in position
        },
        data_axes=deferred,
        shards_of=size,
        batch_shards=math.prod(size(entry) for entry in {entry for _, entry in batch.values()}),
        carry_names=params.get("carry_names", ()),
    )
    cuts = tuple(policy(Marks(marks, known), schedule.num_stages))
    legal = len(cuts) == schedule.num_stages - 1 and list(cuts) == sorted({*cuts})
    if not legal or any(not 0 <= c < len(marks) for c in cuts):
        raise ValueError(
            f"the cut policy chose the marks {list(cuts)} of {len(marks)} for {schedule.num_stages} stages: it must "
            f"return {schedule.num_stages - 1} different indices in ascending order."
        )
    labels = label(body, params["num_consts"], params["num_carry"], markers, cuts)
    last = schedule.num_stages - 1
    tasks = [t for rank in schedule.tasks(params["length"]) for t in rank if t.stage == last]
    cut = partition(
        labels,
        params["num_consts"],
        params["num_carry"],
        params["operations"],
        params["length"],
        fuse_last=all(isinstance(t, FusedTask) for t in tasks),
        split_backward=schedule.splits_backward,
        carry_names=params.get("carry_names", ()),
    )
    if verify:
        body.verify()
        labels.verify()
        cut.verify()
        verify_effects(body, cut, labels)
    return _CutLoop(cut, schedule, tuple(marks), cuts, deferred)


def _indexed(body: Graph, index: Value) -> set[Value]:
    """The inputs that a body slices by the microbatch index: data, not parameters."""
    moving: set[Value] = {index}
    found: set[Value] = set()
    for equation in body.equations:
        values = [a for a in equation.inputs if isinstance(a, Value)]
        if moving.isdisjoint(values):
            continue
        if equation.name in ("dynamic_slice", "gather"):
            found.update(v for v in values if v not in moving)
        elif all(v.aval.ndim == 0 for v in values):
            moving.update(equation.outputs)
    return found


def _materialise(atom: Atom) -> tuple[Value, list[Equation]]:
    """A literal operand as a value: tasks take arrays."""
    if isinstance(atom, Value):
        return atom, []
    graph, _ = from_jaxpr(jax.make_jaxpr(jax.lax.copy_p.bind)(struct_of(atom.aval)))
    (copy,) = graph.equations
    copy = replace(copy, inputs=(Constant(atom.value, atom.aval),))
    return copy.outputs[0], [copy]


def _as_loop(equation: Equation, found: _CutLoop) -> tuple[list[Equation], Loop, list[Equation]]:
    """The loop as a node of the outer program, with the sums of partial results behind it."""
    cut = found.partition
    num_consts, num_carry = equation.params["num_consts"], equation.params["num_carry"]
    before: list[Equation] = []
    operands: list[Atom] = []
    for atom in equation.inputs:
        value, made = _materialise(atom)
        operands.append(value)
        before.extend(made)
    results: dict[int, Value] = {}
    after: list[Equation] = []

    leading: dict[int, Any] = {}

    def resolve(tree: Partial | int, axes: Any, target: Value | None) -> Value:
        if isinstance(tree, int):
            state = cut.accumulators[tree].result
            if axes is None:
                results[tree] = target if target is not None else Value(state.aval)
                return results[tree]
            results[tree], leading[tree] = Value(state.aval), axes
            after.append(_sum_shards(results[tree], target, equation))
            return after[-1].outputs[0]
        left, right = resolve(tree.left, axes, None), resolve(tree.right, axes, None)
        aval = struct_of(left.aval)
        graph, _ = from_jaxpr(jax.make_jaxpr(jax.lax.add)(aval, aval), [left, right])
        (add,) = graph.equations
        add = replace(add, outputs=(target or Value(add.outputs[0].aval),), source=equation.source)
        after.append(add)
        return add.outputs[0]

    for tree, axes, target in zip(cut.results, found.deferred, equation.outputs[num_carry:], strict=True):
        resolve(tree, axes, target)
    loop = Loop(
        partition=cut,
        schedule=found.schedule,
        length=equation.params["length"],
        operands=tuple(operands[:num_consts]),
        carry_init=tuple(operands[num_consts:]),
        carry_results=tuple(equation.outputs[:num_carry]),
        accumulator_results=tuple(results[k] for k in range(len(cut.accumulators))),
        leading=tuple(leading.get(k) for k in range(len(cut.accumulators))),
    )
    return before, loop, after


def _sum_shards(partials: Value, target: Value | None, loop: Equation) -> Equation:
    """The one reduction over the data axis: the sum of the shards' partial gradients."""
    aval = struct_of(partials.aval)
    graph, _ = from_jaxpr(jax.make_jaxpr(lambda x: jax.lax.reduce_sum(x, (0,)))(aval), [partials])
    (total,) = graph.equations
    return replace(total, outputs=(target or Value(total.outputs[0].aval),), source=loop.source)
