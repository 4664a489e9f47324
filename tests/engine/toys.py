"""Small models, steps and bodies that the engine's tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes import PLACING, WRITING
from jaxpp_flax.engine.passes.loop.label import label
from jaxpp_flax.engine.passes.loop.loop import Labels, Loop, Partition
from jaxpp_flax.engine.passes.loop.partition import partition
from jaxpp_flax.engine.passes.place import ResultRanks, StepOnRanks
from jaxpp_flax.engine.passes.runner import Choices, Settings, observers
from jaxpp_flax.engine.program.program import Program, ProgramTask
from jaxpp_flax.engine.traced import CutPolicy, cut_at_every_mark, prepare, with_choices
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import Graph, Value, from_jaxpr
from jaxpp_flax.engine.tracing.loop_body import LoopBody
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Op, treduce, treduce_p
from jaxpp_flax.schedules import GPipe, Schedule
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.task import TaskKind
from tests.helpers import DIM, tree_allclose


def mesh_of(num_ranks: int, kind: AxisType = AxisType.Auto, /, **axes: int) -> MpmdMesh:
    """Ranks times the other axes, on the first devices."""
    shape = (num_ranks, *axes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return MpmdMesh(Mesh(devices, ("stage", *axes), axis_types=(kind,) * len(shape)), "stage")


def chain(num_stages: int, dim: int = DIM, seed: int = 0) -> list[dict[str, jax.Array]]:
    """Parameters of one dense layer for each stage; NumPy's values, so that making them compiles nothing."""
    rng = np.random.default_rng(seed)
    return [
        {"w": jnp.asarray(rng.normal(size=(dim, dim)) / dim**0.5, jnp.float32), "b": jnp.zeros(dim)}
        for _ in range(num_stages)
    ]


def forward(params: Sequence[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    """Dense layers with a mark between every two."""
    for i, p in enumerate(params):
        if i:
            x = mark_stage_end(x, f"layer_{i - 1}")
        x = jnp.tanh(x @ p["w"] + p["b"])
    return x


def chain_loss(params: Sequence[dict[str, jax.Array]], batch: dict[str, jax.Array]) -> jax.Array:
    """Mean squared error of `forward`."""
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def gradients(schedule: Schedule | None, loss: Callable[..., jax.Array] = chain_loss) -> Callable[..., Any]:
    """Nothing but the loop: `(params, batch) -> (losses, gradients)`."""
    return lambda params, batch: treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)


def sgd_step(schedule: Schedule | None, loss: Callable[..., jax.Array] = chain_loss) -> Callable[..., Any]:
    """A step as simple as can be: `(params, batch) -> (params, losses, gradients)`."""

    def step(params: Any, batch: Any) -> Any:
        losses, grads = gradients(schedule, loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), losses, grads

    return step


def loop_of(step: Callable[..., Any], *args: Any) -> tuple[Graph, dict[str, Any]]:
    """The body of the one loop in a step, with the loop's parameters."""
    graph, _ = from_jaxpr(jax.jit(step).trace(*args).jaxpr)
    graph = inline(graph, flatten=True)
    (loop,) = [e for e in graph.equations if e.primitive is treduce_p]
    return loop.params["body"], dict(loop.params)


def opened(
    graph: Graph, num_consts: int, num_carry: int = 0, operations: Sequence[Op] = (), length: int = 4
) -> LoopBody:
    """A loop body whose inputs are constants, the microbatch's index and a carry."""
    params = {"num_consts": num_consts, "num_carry": num_carry, "operations": tuple(operations), "length": length}
    return LoopBody.of(graph, {**params, "carry_names": ()})


def opened_loop(body: LoopBody) -> Loop:
    """A loop of one stage over a body."""
    none = (None,) * len(body.operations)
    return Loop(
        primitive=treduce_p,
        params={},
        inputs=(*body.constants, *body.carry),
        outputs=tuple(Value(atom.aval) for atom in body.outputs),
        schedule=GPipe(1),
        body=body,
        data_axes=none,
        batch_dims=none,
    )


def indexless(graph: Graph, operations: Sequence[Op]) -> LoopBody:
    """The same of a function that reads no index."""
    index = Value(jax.core.ShapedArray((), np.dtype("int32")))
    return opened(Graph((*graph.inputs, index), graph.outputs, graph.equations), len(graph.inputs), 0, operations)


def labelled(body: Graph, params: dict[str, Any], cuts: Sequence[int] | None = None) -> Labels:
    """Inline and label a loop's body; by default every mark cuts."""
    loop = LoopBody.of(inline(body), params)
    return label(loop, range(len(loop.marks)) if cuts is None else cuts)


def parted(labels: Labels, *, fuse_last: bool = False, split_backward: bool = False) -> Partition:
    """Cut a labelled body into tasks."""
    return partition(labels, fuse_last=fuse_last, splits_backward=split_backward)


def partition_of(step: Callable[..., Any], *args: Any, **options: Any) -> Partition:
    """The tasks of a step's only loop, verified."""
    body, params = loop_of(step, *args)
    labels = labelled(body, params)
    labels.verify()
    part = parted(labels, **options)
    part.verify()
    return part


def same_as_plain(step: Callable[..., Any], num_ranks: int, *args: Any, rtol: float = 1e-6, **kwargs: Any) -> Any:
    """Run a step as a pipeline and under `jax.jit`, compare everything it returns, and give that back.

    A few sums of float32 in another order: 1e-6 is sixteen units in the last place.
    """
    expected = jax.jit(step)(*args, **kwargs)
    actual = mpmd_jit_with_loop(step, mesh_of(num_ranks))(*args, **kwargs)
    tree_allclose(actual, expected, rtol=rtol)
    return actual


class Built(NamedTuple):
    """What the passes make of a step."""

    program: Program
    placed: StepOnRanks
    settings: Choices

    @property
    def loops(self) -> tuple[Loop, ...]:
        return self.placed.loops


def built(
    step: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    donated: Sequence[bool] | None = None,
    specs: Sequence[PartitionSpec] | None = None,
    axes: Mapping[str, int] | None = None,
    residuals: ResidualPlan | Callable[[], ResidualPlan] | None = None,
    policy: CutPolicy = cut_at_every_mark,
    result_ranks: ResultRanks | None = None,
) -> Built:
    """All passes over a step and nothing compiled; without `specs` and `axes`, on a mesh of single devices."""
    graph, consts = from_jaxpr(jax.jit(step).trace(*args).jaxpr)
    assert not consts
    size = len(graph.inputs)
    settings = Settings(
        num_ranks=num_ranks,
        donated=donated or [False] * size,
        specs=specs or [PartitionSpec()] * size,
        shards=ShardCounts(axes or {}),
        result_ranks=result_ranks,
    )
    observe = observers()
    prepared = prepare(graph, settings, observe)
    choices = with_choices(settings, prepared, policy, residuals)
    placed = PLACING.run(prepared, choices, observe)
    return Built(WRITING.run(placed, choices, observe), placed, choices)


def kinds(part: Partition) -> list[tuple[int, TaskKind]]:
    """Stage and kind of every task, in order."""
    return [(t.stage, t.kind) for t in part.tasks]


def count(graph: Graph, primitive: str) -> int:
    """How many equations of a kind a graph holds, those inside opaque calls included."""

    def inside(jaxpr: Any) -> int:
        equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
        return sum((e.primitive.name == primitive) + below(e.params) for e in equations)

    def below(params: Any) -> int:
        return sum(map(inside, jex_core.jaxprs_in_params(dict(params))))

    return sum((e.name == primitive) + below(e.params) for e in graph.equations)


def identity(*shapes: tuple[int, ...]) -> Graph:
    """One output for each input, of the same type."""
    values = tuple(Value(jax.core.ShapedArray(shape, np.dtype("float32"))) for shape in shapes)
    return Graph(values, values, ())


def made(*shapes: tuple[int, ...]) -> Graph:
    """The same with outputs of its own."""
    one, other = identity(*shapes), identity(*shapes)
    return Graph(one.inputs, other.outputs, ())


def by_hand(instructions: Sequence[Any], tasks: Sequence[ProgramTask], results: Sequence[int], size: int) -> Program:
    """A program on one rank (or two) whose only argument is value 0 on rank 0; `size` values."""
    return Program(tuple(instructions), tuple(tasks), ({0: 0},), tuple({0: r} for r in results), {}, size, 2)
