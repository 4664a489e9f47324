"""Open the loops of a step: read the schedule of each `treduce`, inline its body, and refuse what no pipeline runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

from jaxpp_flax._compat import is_ordered
from jaxpp_flax._compat_texts.traces import is_future
from jaxpp_flax.engine.passes.loop.loop import Loop, Shapes, advanced
from jaxpp_flax.engine.tracing.bodies.several_shapes import split_operands
from jaxpp_flax.engine.tracing.inline import count_marks, inline
from jaxpp_flax.engine.tracing.ir import Equation, Graph, Value, VerificationError, inside, opened
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.treduce import AddOp, Concat, LastOp, treduce_p
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.task import Task, TaskKind

__all__ = ["OnePass", "check_opened", "open_loops", "refuse_ordered_effects"]


class OnePass(Schedule):
    """Runs each rank's stages forward, in order, then backward."""

    def tasks(self, num_microbatches: int) -> list[list[Task]]:
        def tasks_of(rank: int) -> list[Task]:
            stages = self.stages_of(rank)
            ordered = [(TaskKind.FORWARD, s) for s in stages] + [(TaskKind.BACKWARD, s) for s in reversed(stages)]
            return [Task(kind, stage, m) for kind, stage in ordered for m in range(num_microbatches)]

        return [tasks_of(rank) for rank in range(self.num_ranks)]

    def without_dead_stages(self, written: int, live: int) -> OnePass:
        """Return the schedule of the stages that have work.

        Args:
          written: the number of marks in the function.
          live: the number of marks that a result depends on. The stages behind the others do nothing.

        Example:
          >>> OnePass(4).without_dead_stages(written=4, live=1).num_stages
          2
          >>> OnePass(4).without_dead_stages(written=2, live=1).num_stages  # too few marks
          4
        """
        enough = live < self.num_stages - 1 <= written
        return _SomeStages(live + 1, self.num_ranks) if enough else self


class _SomeStages(OnePass):
    """The first stages of a function; ranks without a stage do nothing."""

    def _check_ranks(self) -> None: ...


def open_loops(graph: Graph, num_ranks: int, *, needs_loop: bool = True) -> Graph:
    """Return the step with a `Loop` for each `treduce`, and for each shape of its microbatches.

    Without `needs_loop` the step may hold no loop.

    A call is opened, too, if one of its results needs fewer operands than another. A differentiated `jnp.where` returns
    its mask and its zeros, at full size, beside its value: opened, they are cheap work that a backward does itself; as
    results of a call they would be residuals.

    Raises:
      ValueError, TypeError: if the step holds no loop, or a loop's schedule does not fit the mesh.
      ValueError: if a side effect has `ordered=True`.
      NotImplementedError: if partial sums are carried, or reduced by a user's own operation; if a collective that is
        not done yet leaves its `shard_map`.
    """
    refuse_ordered_effects(graph)
    _refuse_futures(graph)
    if needs_loop and not any(e.primitive is treduce_p for e in graph.equations):
        raise ValueError(
            "the step given to mpmd_jit_with_loop holds no `treduce`: there is no loop over microbatches to pipeline. "
            "Wrap the work of one microbatch: `treduce(jax.value_and_grad(loss), batch, schedule=Std1F1B(n))`; "
            "for inference use `mpmd_jit`. A step without a loop, such as an optimizer's update, needs the ranks of "
            "its arguments: pass `MpmdSharding`s as in_shardings."
        )
    opened_or_kept = (_open(e, num_ranks) if e.primitive is treduce_p else [e] for e in graph.equations)
    return replace(graph, equations=tuple(chain.from_iterable(opened_or_kept)))


def check_opened(step: Graph) -> None:
    """Check that no loop is left closed, at the top or inside of an equation."""
    for equation in step.equations:
        inner = (each for each in inside(equation.params) if each.primitive is treduce_p)
        if (equation.primitive is treduce_p and not isinstance(equation, Loop)) or any(inner):
            raise VerificationError(f"`{equation.name}` at {equation.where} holds a loop that is not opened")


def _open(equation: Equation, num_ranks: int) -> list[Loop]:
    """Return the loop of a `treduce`; of microbatches of several shapes, one for each shape."""
    schedule, params = _read_schedule(equation, num_ranks), equation.params
    if "bodies" not in params:
        return [_opened(equation, params["body"], schedule)]
    constants, carry = equation.inputs[: params["num_consts"]], equation.inputs[params["num_consts"] :]
    numbers, num_leaves = params["pattern"], params["num_leaves"]
    shared, leaves = split_operands(constants, len(numbers), num_leaves)
    shapes = Shapes(numbers=numbers, leaves=tuple(map(tuple, leaves)), first=len(shared))
    loops: list[Loop] = []
    for number, body in enumerate(params["bodies"]):
        inputs = (*shared, *leaves[numbers.index(number)], *carry)
        # The loop that `join_shapes` makes of these has the results of the last one.
        is_last = number + 1 == len(params["bodies"])
        outputs = equation.outputs if is_last else tuple(Value(value.aval) for value in equation.outputs)
        own = {**params, "num_consts": len(shared) + num_leaves}
        loop = _opened(replace(equation, params=own, inputs=inputs, outputs=outputs), body, schedule)
        loops.append(replace(loop, shapes=shapes))
    return loops


def _opened(equation: Equation, body: Graph, schedule: Schedule) -> Loop:
    """Return the loop of an equation over the body of one shape."""
    graph = inline(body, flatten=_mixes, hints=False)
    refuse_ordered_effects(graph)
    _refuse_futures(graph)
    opened_body = LoopBody.of(graph, equation.params)
    _check_partial_sums(opened_body, equation.where)
    if isinstance(schedule, OnePass):
        schedule = schedule.without_dead_stages(count_marks(body), len(opened_body.forward_markers))
    none = (None,) * len(opened_body.operations)
    # What the parameters say stands in the body from here on.
    return advanced(Loop, equation, params={}, schedule=schedule, body=opened_body, data_axes=none, batch_dims=none)


def _check_partial_sums(body: LoopBody, where: str) -> None:
    """Refuse partial sums (`unreduced=`) where only an operation of this package keeps them in parts."""
    carried = [name for name, axes in zip(body.carry_names, body.partial_over, strict=False) if axes]
    own = [
        operation
        for operation, axes in zip(body.operations, body.partial_over[body.num_carry :], strict=True)
        if axes and not isinstance(operation, (AddOp, Concat, LastOp))
    ]
    if carried or own:
        what = f"carries {carried[0]}" if carried else f"reduces a result by {own[0]!r}"
        raise NotImplementedError(
            f"the treduce at {where} {what}, whose type keeps partial sums (`jax.P(unreduced=)`). It would be reduced "
            "over the devices in every microbatch. Return it as a result of the body with the operation `Add`, and "
            "`jax.sharding.reshard` the sum behind the loop; or drop `unreduced=` from its type."
        )


def _mixes(call: Equation) -> bool:
    """Return whether the results of a call need different operands."""
    body = facts_of(call.primitive).body_in(call.params)
    return body is not None and len({*_operands_of_results(body)}) > 1


def _operands_of_results(jaxpr: Any) -> list[frozenset[int]]:
    """Return the places of the operands that each result of a jaxpr needs."""
    jaxpr = opened(jaxpr)
    needed: dict[Any, frozenset[int]] = {variable: frozenset({i}) for i, variable in enumerate(jaxpr.invars)}

    def needed_by(atom: Any) -> frozenset[int]:
        return frozenset() if hasattr(atom, "val") else needed.get(atom, frozenset())  # a literal has no hash

    for equation in jaxpr.eqns:
        body, read = (
            facts_of(equation.primitive).body_in(equation.params),
            [needed_by(atom) for atom in equation.invars],
        )
        every = range(len(read))
        places = [every] * len(equation.outvars) if body is None else _operands_of_results(body)
        needed.update(
            (variable, frozenset().union(*(read[i] for i in those)))
            for variable, those in zip(equation.outvars, places, strict=True)
        )
    return [needed_by(atom) for atom in jaxpr.outvars]


def _read_schedule(equation: Equation, num_ranks: int) -> Schedule:
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


def refuse_ordered_effects(graph: Graph) -> None:
    """Refuse ordered effects: stages run at the same time, so there is no order over the whole step.

    Raises:
      ValueError: if a side effect has `ordered=True`.
    """
    for equation in graph.equations:
        if equation.primitive is treduce_p:
            for body in equation.params.get("bodies", (equation.params["body"],)):
                refuse_ordered_effects(body)
            continue
        if any(map(is_ordered, equation.effects)):
            raise ValueError(
                f"the `{equation.name}` at {equation.where} has a side effect with ordered=True, but the stages of a "
                "pipeline work on several microbatches at the same time, so that no order of the whole step "
                "is kept. Leave out ordered=True: each call still happens once for each microbatch. Pass what "
                "tells the calls apart (the microbatch's index, the layer's name) to the callback."
            )


def _refuse_futures(graph: Graph) -> None:
    """Refuse collectives that start in one equation and end in another: the two could come into different tasks."""
    for equation in graph.equations:
        if any(is_future(value.aval) for value in equation.outputs):
            raise NotImplementedError(
                f"the `{equation.name}` at {equation.where} returns a collective that is not done yet. The stages of a "
                "pipeline are programs of their own, and such a future cannot pass from one to the next. Call its "
                "`.done()` inside the function that starts it, before the shard_map returns."
            )
