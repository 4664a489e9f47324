"""Open the loops of a step: read each schedule, and make each body a structure of its own."""

from __future__ import annotations

from typing import Any

from jaxpp_flax.engine.passes.check_supported import check_supported
from jaxpp_flax.engine.passes.loop.loop import Loop, Step
from jaxpp_flax.engine.program.one_pass import OnePass
from jaxpp_flax.engine.tracing.inline import count_marks, inline
from jaxpp_flax.engine.tracing.ir import Equation, Graph, opened
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.treduce import treduce_p
from jaxpp_flax.schedules.schedule import Schedule

__all__ = ["open_loops"]


def open_loops(graph: Graph, num_ranks: int) -> Step:
    """Read the schedule of each loop, and inline its body.

    A call is opened, too, if one of its results needs fewer operands than another. A differentiated `jnp.where` returns
    its mask and its zeros, at full size, beside its value: opened, they are cheap work that a backward does itself; as
    results of a call they would be residuals.

    Raises:
      ValueError, TypeError: if the step holds no loop, or a loop's schedule does not fit the mesh.
      ValueError, NotImplementedError: if the step has what no pipeline runs; see `check_supported`.
    """
    check_supported(graph)
    loops = tuple(_open(e, num_ranks) for e in graph.equations if e.primitive is treduce_p)
    if not loops:
        raise ValueError(
            "the step given to mpmd_jit_with_loop holds no `treduce`: there is no loop over microbatches to pipeline. "
            "Wrap the work of one microbatch: `treduce(jax.value_and_grad(loss), batch, schedule=Std1F1B(n))`; "
            "for inference use `mpmd_jit`."
        )
    return Step(graph, loops)


def _open(equation: Equation, num_ranks: int) -> Loop:
    schedule = _read_schedule(equation, num_ranks)
    graph = inline(equation.params["body"], flatten=_mixes, hints=False)
    check_supported(graph)
    body = LoopBody.of(graph, equation.params)
    if isinstance(schedule, OnePass):
        schedule = schedule.without_dead_stages(count_marks(equation.params["body"]), len(body.markers))
    none = (None,) * len(body.operations)
    return Loop(equation, schedule, body, data_axes=none, batch_dims=none)


def _mixes(call: Equation) -> bool:
    """Return whether the results of a call need different operands."""
    body = facts_of(call.primitive).body_in(call.params)
    return body is not None and len({*_operands_of_results(body)}) > 1


def _operands_of_results(jaxpr: Any) -> list[frozenset[int]]:
    """Return the places of the operands that each result of a jaxpr needs."""
    jaxpr = opened(jaxpr)
    needed: dict[Any, frozenset[int]] = {variable: frozenset({i}) for i, variable in enumerate(jaxpr.invars)}

    def of(atom: Any) -> frozenset[int]:
        return frozenset() if hasattr(atom, "val") else needed.get(atom, frozenset())  # a literal has no hash

    for equation in jaxpr.eqns:
        body, read = facts_of(equation.primitive).body_in(equation.params), [of(atom) for atom in equation.invars]
        every = range(len(read))
        places = [every] * len(equation.outvars) if body is None else _operands_of_results(body)
        needed.update(
            (variable, frozenset().union(*(read[i] for i in those)))
            for variable, those in zip(equation.outvars, places, strict=True)
        )
    return [of(atom) for atom in jaxpr.outvars]


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
