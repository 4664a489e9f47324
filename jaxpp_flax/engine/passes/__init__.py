"""The passes of the compiler in order, from the graph of a traced step to its program.

Each pass is a pure function from one frozen structure to the next, in a file of its name (`inline` is in `tracing/`).
"""

from __future__ import annotations

from jaxpp_flax.engine.passes.fsdp.gather_parameters import gather_parameters
from jaxpp_flax.engine.passes.fsdp.keep_batch import keep_batch
from jaxpp_flax.engine.passes.fsdp.scatter_gradients import scatter_gradients
from jaxpp_flax.engine.passes.liveness import check_ends, donate_and_free
from jaxpp_flax.engine.passes.loop.defer_reductions import defer_in_loops
from jaxpp_flax.engine.passes.loop.hoist_constants import hoist_constants
from jaxpp_flax.engine.passes.loop.join_shapes import check_joined, join_shapes
from jaxpp_flax.engine.passes.loop.label import label_loops
from jaxpp_flax.engine.passes.loop.lower_loops import lower_loops
from jaxpp_flax.engine.passes.loop.open_loops import check_opened, open_loops
from jaxpp_flax.engine.passes.loop.partition import partition_loops
from jaxpp_flax.engine.passes.normalise_results import check_results, normalise_results
from jaxpp_flax.engine.passes.offload import offload
from jaxpp_flax.engine.passes.place import StepOnRanks, place
from jaxpp_flax.engine.passes.runner import Choices, Passes, Settings
from jaxpp_flax.engine.passes.unroll import unroll
from jaxpp_flax.engine.program.program import Program
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph
from jaxpp_flax.engine.tracing.regions import shielded

__all__ = ["PASSES", "PLACING", "PREPARING", "WRITING"]

# What no choice of schedules, cuts and residuals changes.
PREPARING = (
    Passes[Graph, Graph, Settings]()
    .then(
        "inline",
        lambda graph, _: shielded(inline(graph, flatten=True)),
        requires="a traced step, on the submesh of one rank",
        ensures="every loop stands at the top; plain calls are gone",
    )
    .then(
        "normalise_results",
        lambda graph, _: normalise_results(graph),
        requires="loops at the top",
        ensures="every result of a loop is read; no two results are one array, arguments and host memory aside",
        check=check_results,
    )
    .then(
        "open_loops",
        lambda graph, settings: open_loops(graph, settings.num_ranks, needs_loop=not any(settings.argument_ranks)),
        requires="loops at the top",
        ensures="each loop has a schedule for the mesh, and a body with every mark at the top; no ordered side effects",
        check=check_opened,
    )
    .then(
        "hoist_constants",
        lambda step, settings: hoist_constants(step, settings.specs),
        requires="opened loops",
        ensures="numbers made of parameters, and narrower copies of parameters, are made once, in front of the loop",
    )
    .then(
        "gather_parameters",
        lambda step, settings: gather_parameters(step, settings.specs, settings.shards, settings.fsdp),
        requires="opened loops",
        ensures="with `fsdp=`, bodies read parameters that are gathered before, and leave their gradients unplaced",
    )
    .then(
        "defer_reductions",
        lambda step, settings: defer_in_loops(step, settings.specs, settings.shards),
        requires="opened loops",
        ensures="sums over sharded examples are partial sums, where they may wait for the end of the loop",
    )
    .then(
        "keep_batch",
        lambda step, settings: keep_batch(step, settings.specs, settings.shards, settings.submesh),
        requires="opened loops, with partial sums",
        ensures="on an Auto mesh, what a scan starts from is divided over the axes of the batch, as its examples are",
    )
)

PLACING = (
    Passes[Graph, Graph, Choices](before=len(PREPARING.rows))
    .then(
        "label",
        lambda step, settings: label_loops(step, settings.choose_cuts),
        requires="bodies in their last form",
        ensures="one cutting mark fewer than the schedule has stages; every equation has a phase no earlier than its "
        "operands: S forward, S backward; or every task has it",
    )
    .then(
        "partition",
        lambda step, settings: partition_loops(step, settings.residual_plan),
        requires="labelled loops",
        ensures="tasks, accumulators and carries; each labelled equation stands in one task, or in the backward of a "
        "stage that recomputes as well",
    )
    .then(
        "join_shapes",
        lambda step, _: join_shapes(step),
        requires="loops cut into tasks",
        ensures="the loops for several shapes of microbatches are one, whose accumulators and carries all shapes share",
        check=check_joined,
    )
    .then(
        "lower_loops",
        lambda step, _: lower_loops(step),
        requires="loops cut into tasks",
        ensures="loops return their accumulators, sums of their partial results stand behind them; each accumulator "
        "knows the argument that it updates, and so its sharding",
    )
    .then(
        "scatter_gradients",
        lambda step, settings: scatter_gradients(step, settings.specs, settings.fsdp),
        requires="accumulators that know their arguments",
        ensures="with `fsdp=`, the sum of a sharded parameter's gradient is one reduce-scatter",
    )
    .then(
        "place",
        lambda step, settings: place(step, settings.result_ranks, settings.idle_ranks, settings.argument_ranks),
        requires="lowered loops",
        ensures="every equation runs on the ranks that read its results; other ranks get them",
    )
)

WRITING = (
    Passes[StepOnRanks, StepOnRanks, Choices](before=PLACING.before + len(PLACING.rows))
    .then(
        "unroll",
        lambda placed, settings: unroll(placed, settings.num_ranks, settings.specs, settings.rounds),
        requires="a step on ranks",
        ensures="instructions in the schedule's order, over values that are made once. No program outside loops "
        "fetches more than a window from host memory, or one leaf",
    )
    .then(
        "offload",
        lambda program, settings: offload(program, settings.residual_plan),
        requires="values without frees or donations",
        ensures="the plan's kept values move to the host after their forward, and come back before their backward; "
        "`offload_within=` adds waits",
    )
    .then(
        "liveness",
        lambda program, settings: donate_and_free(
            program, settings.donated, keep_received=settings.result_ranks is not None, pairs=settings.pairs
        ),
        requires="all readers of each value",
        ensures="values are donated or freed at their last use",
        check=check_ends,
    )
)

PASSES: Passes[Graph, Program, Choices] = PREPARING.joined(PLACING).joined(WRITING)
