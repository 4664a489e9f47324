"""Random train steps: what is drawn from a seed, and how it is built for plain `jax.jit` and for a pipeline alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max, treduce
from jaxpp_flax.schedules import ResidualPlan, Schedule, StageResiduals, by_name, names
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly
from tests.fuzz.layers import DIM, IDS, KINDS, LAYERS, ROWS, Around, Carried, parameters

# Axes beside the stages, with the most ranks that eight devices have for them.
SUBMESHES = [({}, 4), ({"data": 2}, 4), ({"fsdp": 2}, 4), ({"tensor": 2}, 4), ({"data": 2, "tensor": 2}, 2)]
# Adam divides by the root of a mean of squares: its epsilon bounds how far it magnifies the rounding of tiny gradients.
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.01, 3), momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.01, eps=1e-2),
    "clipped_adamw": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01, eps=1e-2)),
    "rmsprop": lambda: optax.rmsprop(0.01, eps=1e-2),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4, eps=1e-4),
    "every_second_step": lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
    "average_beside": lambda: optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}
# A cheap seed for `draw_storage` (both ranks offload, one recomputes): whoever takes it finds its tasks in the cache.
STORED = 17
LOOP_CARRIES = ("none", "counter", "statistics")
OTHER_LOOPS = ("scale_before", "evaluation_after", "gradients_again")


@dataclass(frozen=True)
class Program:
    """A step that was drawn; its `repr` is all that is needed to build it again."""

    seed: int  # of the numbers
    submesh: tuple[tuple[str, int], ...]
    explicit: bool
    ranks: int
    schedule: str
    stages: tuple[tuple[str, ...], ...]  # the names of each stage's layers
    carried: tuple[str, ...]  # what the stages hand on beside x
    skips: tuple[tuple[int, int], ...]  # from the end of a stage to the end of a later one
    axis: str | None  # of collectives and constraints
    microbatches: int
    microbatch_axis: int
    loop_carry: str
    other_loops: tuple[str, ...]
    loss: str  # how the losses are reduced
    optimizer: str
    donate: tuple[int, ...]
    steps: int
    residuals: ResidualPlan | None = None
    fsdp: Fsdp = "microbatch"

    @property
    def collective(self) -> bool:
        """Whether shards differ in what they compute, so that plain `jax.jit` needs the submesh as well."""
        return self.explicit or any(LAYERS[name].collective for stage in self.stages for name in stage)

    @property
    def rounding(self) -> float:
        """How far the order of sums may move a result, relative to a leaf's largest entry."""
        # An activation that is rounded to 8 bits on the other side of a tie moves by 2^-8.
        return 3e-2 if any("bfloat16" in stage for stage in self.stages) else 1e-5

    @property
    def rows_axis(self) -> str | None:
        """The axis that shards the batch."""
        return next((name for name, _ in self.submesh if name != "tensor"), None)

    def mesh(self) -> MpmdMesh:
        """Of the first devices."""
        shape = (self.ranks, *(size for _, size in self.submesh))
        axes = ("stage", *(name for name, _ in self.submesh))
        devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        return MpmdMesh(jax.sharding.Mesh(devices, axes, axis_types=(kind,) * len(axes)), "stage")

    def make_schedule(self) -> Schedule:
        """The schedule of the loops."""
        return by_name(self.schedule, len(self.stages), self.ranks)


def draw_storage(rng: random.Random, program: Program) -> Program:
    """The program with other places and times for its values: recomputed, on the host, gathered once."""

    def stage() -> StageResiduals:
        return StageResiduals(recompute=rng.choice([False, False, True]), offload=rng.choice([0.0, 0.5, 1.0, 1.0]))

    plan = ResidualPlan(
        [stage() for _ in program.stages], fetch_ahead=rng.randint(1, 3), offload_within=rng.choice([None, 1, 2])
    )
    # `fsdp="step"` is refused where a loop reads no parameter in shards; the shared one may be read by no stage.
    of_stages = jax.tree.leaves(specs(program)[0]["stages"], is_leaf=lambda x: isinstance(x, P))
    sharded = P("fsdp") in of_stages and not program.collective
    return replace(
        program, residuals=plan if rng.random() < 0.8 else None,
        fsdp="step" if sharded else "microbatch",
    )  # fmt: skip


def draw(seed: int, *, collective: bool = False) -> Program:
    """The program of a seed; with collectives, each has at least one."""
    rng = random.Random(seed)
    submesh, most = rng.choice(SUBMESHES[1:] if collective else SUBMESHES)
    explicit = bool(submesh) and "tensor" not in submesh and "fsdp" not in submesh and rng.random() < 0.25
    ranks = min(most, rng.choice([1, 2, 2, 3, 4]))
    count = ranks * rng.choice([1, 1, 2])
    carried = tuple(kind for kind in KINDS if rng.random() < 0.3)
    fitting = [
        name for name, layer in LAYERS.items()
        if (layer.on_explicit or not explicit) and layer.needs in ("", *carried) and layer.collective == collective
    ]  # fmt: skip
    plain = [name for name in fitting if not LAYERS[name].collective] or ["dense", "mlp", "norm", "tied"]
    stages = tuple(tuple(rng.choices(fitting + plain[:4], k=rng.choice([1, 1, 2, 3]))) for _ in range(count))
    pairs = [(i, j) for j in range(len(stages)) for i in range(j)]
    schedule = rng.choice(names(count, ranks))
    return Program(
        seed=seed, submesh=tuple(submesh.items()), explicit=explicit, ranks=ranks, schedule=schedule, stages=stages,
        carried=carried, skips=tuple(rng.sample(pairs, min(len(pairs), rng.choice([0, 0, 1, 2])))),
        axis=rng.choice(list(submesh)) if submesh else None,
        microbatches=ranks * rng.randint(1, 3) if count > ranks else rng.randint(1, 6),
        microbatch_axis=rng.choice([0, 0, 1]) if not explicit else 0,
        loop_carry=rng.choice(LOOP_CARRIES), other_loops=tuple(o for o in OTHER_LOOPS if rng.random() < 0.15),
        loss=rng.choice(["each", "sum", "last"]), optimizer=rng.choice(list(OPTIMIZERS)),
        donate=rng.choice([(), (), (0,), (0, 1)]), steps=rng.choice([1, 2, 2, 3]),
    )  # fmt: skip


def model(program: Program, params: Any, example: Any, key: jax.Array) -> Carried:
    """The stages, marked."""
    carried = {"x": example["x"]} | {kind: KINDS[kind](example) for kind in program.carried}
    kept: dict[int, jax.Array] = {}
    for number, (stage, layers) in enumerate(zip(program.stages, params["stages"], strict=True)):
        if number:
            carried = mark_stage_end(carried, f"stage_{number - 1}")
        for index, (name, p) in enumerate(zip(stage, layers, strict=True)):
            own = jax.random.fold_in(key, 100 * number + index)
            around = Around(example, params["shared"], own, program.axis, program.rows_axis)
            carried = LAYERS[name].apply(p, carried, around)
        for start, end in program.skips:
            if end == number:
                carried = carried | {"x": carried["x"] + 0.5 * kept[start]}
        kept[number] = carried["x"]
    return carried


REDUCED = {"flags": Max, "count": Add, "level": Add, "wave": Add, "code": Last, "half": Concat(1)}


def metrics_of(program: Program, carried: Carried, example: Any) -> dict[str, Any]:
    """What else a microbatch gives, of many types."""
    ids = example["ids"]
    largest, wrapped = jnp.abs(carried["x"]).max(), ids.astype(jnp.uint8).sum(dtype=jnp.uint8)
    return {"largest": largest, "ids": ids.sum(), "wrapped": wrapped} | {
        kind: carried[kind] for kind in program.carried
    }


def operations_of(program: Program) -> Any:
    """How the losses, the gradients and the metrics are reduced."""
    metrics = {"largest": Max, "ids": Add, "wrapped": Add} | {kind: REDUCED[kind] for kind in program.carried}
    return {"each": Concat(), "sum": Add, "last": Last}[program.loss], Add, metrics


def carry_of(program: Program) -> Any:
    """What the loop starts with."""
    if program.loop_carry == "counter":
        return {"n": jnp.int32(0), "odd": jnp.bool_(False)}
    return {"mean": jnp.zeros(DIM), "n": jnp.float32(0)}


def next_carry(program: Program, carry: Any, carried: Carried) -> Any:
    """What the next microbatch meets."""
    if program.loop_carry == "counter":
        return {"n": carry["n"] + 1, "odd": ~carry["odd"]}
    return {"mean": 0.9 * carry["mean"] + 0.1 * carried["x"].mean(0), "n": carry["n"] + 1}


def loop(program: Program, params: Any, batch: Any, scale: Any, schedule: Schedule | None) -> Any:
    """The last carry, and the losses, gradients and metrics of the loop over microbatches."""
    has_carry = program.loop_carry != "none"

    def loss(params: Any, carry: Any, example: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(program.seed), example["number"].max())
        carried = model(program, params, example, key)
        error = carried["x"] - example["y"]
        if program.loop_carry == "statistics":
            error = error + 0.1 * carry["mean"]
        elif has_carry:
            error = error * jnp.where(carry["odd"], 0.5, 1.0)
        value = scale * jnp.mean(error**2 * example["weight"][:, None])
        carried = jax.lax.stop_gradient(carried)
        return value, (next_carry(program, carry, carried), metrics_of(program, carried, example))

    def body(carry: Any, example: Any) -> Any:
        (value, (carry, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(params, carry, example)
        return carry, (value, grads, metrics)

    options: dict[str, Any] = {"axis": program.microbatch_axis, "operation": operations_of(program)}
    if has_carry:
        return treduce(body, batch, schedule, init=carry_of(program), **options)
    return (), treduce(lambda example: body(carry_of(program), example)[1], batch, schedule, **options)


def step_of(program: Program) -> Callable[..., Any]:
    """(parameters, optimizer state, batch, schedule) -> (parameters, optimizer state, everything else)."""
    tx = OPTIMIZERS[program.optimizer]()

    def forward(params: Any, batch: Any, schedule: Schedule | None) -> jax.Array:
        order = None if schedule is None else ForwardOnly(schedule)

        def body(example: Any) -> jax.Array:
            return jnp.mean(model(program, params, example, jax.random.key(0))["x"] ** 2)

        return treduce(body, batch, order, axis=program.microbatch_axis, operation=Concat())

    def step(params: Any, state: Any, batch: Any, schedule: Schedule | None) -> Any:
        results: dict[str, Any] = {}
        scale: Any = 1.0
        if "scale_before" in program.other_loops:
            results["before"] = forward(params, batch, schedule)
            scale = 1 / (1 + results["before"].mean())
        for round_ in range(1 + ("gradients_again" in program.other_loops)):
            carry, (losses, grads, values) = loop(program, params, batch, scale, schedule)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            results[f"round_{round_}"] = (carry, losses, grads, values, optax.tree.norm(grads))
        if "evaluation_after" in program.other_loops:
            results["after"] = forward(params, batch, schedule)
        return params, state, results

    return step


def arguments(program: Program) -> tuple[Any, Any, Any]:
    """Parameters, optimizer state and batch."""
    rng = np.random.default_rng(program.seed)
    params = {
        "stages": [[parameters(LAYERS[name], rng) for name in stage] for stage in program.stages],
        "shared": (rng.normal(size=DIM) / 4).astype(np.float32),
    }
    m = program.microbatches
    batch = {
        "x": rng.normal(size=(m, ROWS, DIM)).astype(np.float32),
        "y": rng.normal(size=(m, ROWS, DIM)).astype(np.float32),
        "ids": rng.integers(0, IDS, (m, ROWS)).astype(np.int32),
        "weight": rng.integers(0, 2, (m, ROWS)).astype(np.bool_),
        "number": np.repeat(np.arange(m, dtype=np.uint32)[:, None], ROWS, 1),
    }
    if program.microbatch_axis:
        batch = {name: np.swapaxes(x, 0, 1).copy() for name, x in batch.items()}
    return params, OPTIMIZERS[program.optimizer]().init(params), batch


def specs(program: Program) -> tuple[Any, Any]:
    """Of the parameters and of the batch, by the axes of the submesh."""
    params, _, _ = arguments(program)
    axes = dict(program.submesh)

    def of_parameter(x: Any) -> P:
        if program.explicit or program.collective:
            return P()
        if "fsdp" in axes and x.shape[0] % 2 == 0:
            return P("fsdp")
        return P(None, "tensor") if "tensor" in axes and x.ndim == 2 else P()

    entries = (program.rows_axis, None) if program.microbatch_axis else (None, program.rows_axis)
    return jax.tree.map(of_parameter, params), P(*entries)
