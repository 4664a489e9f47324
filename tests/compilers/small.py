"""A small model of two stages for the facts of the tier `compilers`, and what the compiler says of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax._compat_xla.programs import ProgramText
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.planning.compilers.report import CompilerReport, compiler_report
from jaxpp_flax.planning.compilers.tasks import CompiledTask
from jaxpp_flax.trainers import MeshOptions
from tests.compilers.machines import mesh_of
from tests.trainers.models import Chain, squared_error

WIDTH, MICROBATCHES = 512, 4
KERNEL_BYTES = WIDTH * 4 * WIDTH * 4  # of one of a block's two, in float32
PARAMETER_BYTES = 2 * KERNEL_BYTES + (4 * WIDTH + WIDTH) * 4  # of a block, with its biases
NUMBERS = 64  # bytes: collectives below are those of a loss or a norm


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, names: tuple[str | None, str | None] = (None, None)):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, kernel_init=nnx.with_partitioning(init, names))
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, kernel_init=nnx.with_partitioning(init, names[::-1]))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


def chain(make: Callable[[nnx.Rngs], Any] = Block, blocks: int = 2) -> Callable[[nnx.Rngs], Chain]:
    return lambda rngs: Chain(PipelineStage(make(rngs)) for _ in range(blocks))


def compiled_for(
    machine: str, axes: dict[str, int], make: Callable[[nnx.Rngs], Any] = Block, *, blocks: int = 2, rows: int = 32,
    fsdp: Any = "microbatch", **options: Any,
) -> CompiledPipeline:  # fmt: skip
    """Compile two stages and 4 microbatches of `rows` rows on each shard of the batch."""
    mesh = mesh_of(machine, {"stage": 2, **axes})
    shards = axes.get("data", 1) * axes.get("fsdp", 1)
    x = jax.ShapeDtypeStruct((MICROBATCHES * rows * shards, WIDTH), np.float32)
    options = {"num_stages": 2, "num_microbatches": MICROBATCHES, "assignment": "even", "logging": False, **options}
    tx = options.pop("tx", optax.adam(1e-3))
    loss = options.pop("loss", squared_error)
    with nnx.use_eager_sharding(False):
        trainer = PipelineTrainer(chain(make, blocks), tx, loss, mesh=MeshOptions(mesh=mesh, fsdp=fsdp), **options)
    return trainer.compile({"x": x, "y": x})


def told(compiled: CompiledPipeline) -> CompilerReport:
    return compiler_report(compiled)


def of_loop(report: CompilerReport) -> list[CompiledTask]:
    """The tasks that run for every microbatch."""
    return [task for task in report.tasks if task.names[0].startswith(("fwd", "bwd", "wgrad"))]


def around_loop(report: CompilerReport) -> list[CompiledTask]:
    loop = of_loop(report)
    return [task for task in report.tasks if task not in loop]


def moved(tasks: Iterable[CompiledTask]) -> dict[tuple[str, tuple[str, ...]], int]:
    """The bytes of collectives in a step by their kind and axes, of all ranks; without those of single numbers."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for task in tasks:
        for exchange in task.exchanges:
            if exchange.nbytes > NUMBERS * exchange.count:
                key = exchange.kind, exchange.axes
                found[key] = found.get(key, 0) + exchange.nbytes * task.runs
    return found


def operands_of_products(text: ProgramText) -> Iterator[list[str]]:
    """Yield the types of what each product reads; a library's product has a target that names it."""
    for operations in text.computations.values():
        types = {op.name: op.type for op in operations}
        for op in operations:
            if op.opcode in ("dot", "convolution") or "$matmul" in op.rest or "$gemm" in op.rest:
                yield [types[name] for name in op.operands[:2]]
