"""Planned beside compiled bytes: twelve models on a TPU v5p and an H100 that are only described.

    python benchmarks/planned_bytes.py [--only dense,conv] [--machines tpu-v5p] [--json FILE]

For each model and machine: the bytes of the fullest rank as the planner has them before anything is compiled
(`planning.plan`), and as the compiler has them (`planning.compiler_report`), in a child process each, which needs the
extras `compilers-tpu` and `compilers-cuda` and no device. Terms: parameters, the optimizer's state, accumulators of
gradients, residuals with what lies between tasks, workspace of the task that runs, and programs.

Its last line names the layouts that the planner calls fitting with its own estimate as the limit, and the compiler
does not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MACHINES = {"tpu-v5p": {2: "2x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4"}, "h100-sxm": {4: "1x4", 8: "1x8", 16: "2x8"}}
TERMS = ("parameters", "optimizer", "accumulators", "residuals", "workspace", "programs")
_TERM_OF = {"optimizer state": "optimizer", "gradients between stages": "residuals", "batch": "residuals",
            "between tasks": "residuals", "model state": "parameters"}  # fmt: skip
VOCABULARY = 8192


@dataclass(frozen=True)
class Case:
    """A model and its layout.

    Attributes:
      axes: of the mesh, "stage" first.
      blocks, width, length, examples: of the model, and of a microbatch on all devices of a rank.
      kind: what the blocks are.
      stages: of the model; None: one for each rank.
      schedule, microbatches, precision, fsdp: as a trainer takes them.
      recompute: every stage recomputes its residuals.
    """

    axes: Mapping[str, int]
    blocks: int = 8
    width: int = 512
    length: int = 512
    examples: int = 4
    kind: str = "attention"
    stages: int | None = None
    schedule: str = "1f1b"
    microbatches: int = 8
    precision: str | None = None
    fsdp: str = "microbatch"
    recompute: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


CASES: Mapping[str, Case] = {
    "dense": Case({"stage": 4, "data": 2}),
    "three axes": Case({"stage": 2, "data": 2, "fsdp": 2, "tensor": 2}, blocks=4, width=1024),
    "experts": Case({"stage": 4, "expert": 2}, kind="experts", blocks=4),
    "convolutions": Case({"stage": 2, "data": 4}, kind="conv", blocks=6, width=256, length=32, examples=32),
    "scan in a stage": Case({"stage": 4, "fsdp": 2}, kind="scan", blocks=4),
    "nnx.remat": Case({"stage": 4, "data": 2}, kind="remat"),
    "Memory(residuals)": Case({"stage": 4, "tensor": 2}, recompute=True),
    "tied embedding": Case({"stage": 2, "fsdp": 2}, kind="tied", blocks=4),
    "bfloat16": Case({"stage": 8, "data": 2}, precision="bfloat16", width=1024, microbatches=16),
    "LoRA": Case({"stage": 2, "data": 2, "tensor": 2}, kind="lora", blocks=4, width=1024),
    "interleaved": Case({"stage": 4, "tensor": 2}, stages=8, schedule="interleaved_1f1b"),
    "fsdp once": Case({"stage": 2, "fsdp": 4}, blocks=4, width=1024, fsdp="step"),
}


# ------------------------------------------------------------------ the models


def blocks_of(case: Case) -> Callable[..., Any]:
    """Return a function that makes the model of a case."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxpp_flax import PipelineStage

    width = case.width

    def dense(rows: int, columns: int, cut: tuple[str | None, ...], rngs: nnx.Rngs) -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), cut)
        return nnx.Linear(rows, columns, use_bias=False, kernel_init=init, rngs=rngs)

    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.RMSNorm(width, rngs=rngs)
            self.q, self.k, self.v = (dense(width, width, ("fsdp", "tensor"), rngs) for _ in range(3))
            self.out = dense(width, width, ("tensor", "fsdp"), rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.norm(x)
            heads = (*x.shape[:-1], width // 64, 64)
            q, k, v = (product(y).reshape(heads) for product in (self.q, self.k, self.v))
            return x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))

    class Feed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.norm = nnx.RMSNorm(width, rngs=rngs)
            self.up = dense(width, 4 * width, ("fsdp", "tensor"), rngs)
            self.down = dense(4 * width, width, ("tensor", "fsdp"), rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.down(jax.nn.gelu(self.up(self.norm(x))))

    class Experts(nnx.Module):
        """Each token goes to the best of four experts, which has room for twice its even share."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(batch_axis=0), ("expert", None, None))
            self.router = nnx.Linear(width, 4, use_bias=False, rngs=rngs)
            self.up = nnx.Param(init(rngs.params(), (4, width, 4 * width)))
            self.down = nnx.Param(init(rngs.params(), (4, 4 * width, width)))

        def __call__(self, x: jax.Array) -> jax.Array:
            tokens = x.reshape(-1, width)
            scores = jax.nn.softmax(self.router(tokens))
            chosen = jax.nn.one_hot(scores.argmax(-1), 4)
            room = len(tokens) // 2
            place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1).astype(jnp.int32) - 1
            slots = chosen[:, :, None] * jax.nn.one_hot(place, room)[:, None, :]
            sent = jnp.einsum("tec,td->ecd", slots, tokens)
            made = jax.nn.gelu(jnp.einsum("ecd,edh->ech", sent, self.up[...]))
            made = jnp.einsum("ech,ehd->ecd", made, self.down[...])
            return x + (jnp.einsum("tec,ecd->td", slots, made) * scores.max(-1, keepdims=True)).reshape(x.shape)

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attention = Attention(rngs)
            self.feed = (Experts if case.kind == "experts" else Feed)(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.feed(self.attention(x))

    class Rematted(Block):
        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.remat(Block.__call__)(self, x)

    class Scanned(nnx.Module):
        """Two blocks, whose weights lie in one array each."""

        def __init__(self, rngs: nnx.Rngs) -> None:
            make = nnx.vmap(Block, in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
            self.layers = make(rngs.split(2))

        def __call__(self, x: jax.Array) -> jax.Array:
            scan = nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry,
                transform_metadata={nnx.PARTITION_NAME: None},
            )  # fmt: skip
            return scan(x, self.layers)

    class Conv(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = (nnx.Conv(width, width, (3, 3), rngs=rngs) for _ in range(2))
            self.norm = nnx.GroupNorm(width, num_groups=32, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return x + self.second(jax.nn.relu(self.first(self.norm(x))))

    made = {"scan": Scanned, "remat": Rematted, "conv": Conv}.get(case.kind, Block)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
            self.blocks = nnx.List([PipelineStage(made(rngs), name=f"block_{i}") for i in range(case.blocks)])
            self.head = None if case.kind == "tied" else dense(width, VOCABULARY, ("fsdp", "tensor"), rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.embed.attend(x) if self.head is None else self.head(x)

    class Images(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Conv(3, width, (3, 3), rngs=rngs)
            self.blocks = nnx.List([PipelineStage(Conv(rngs), name=f"block_{i}") for i in range(case.blocks)])
            self.head = nnx.Linear(width, 1000, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)))

    if case.kind != "lora":
        return lambda rngs: (Images if case.kind == "conv" else Model)(rngs)

    def adapted(rngs: nnx.Rngs) -> nnx.Module:
        from jaxpp_flax.layers import add_lora

        return add_lora(Model(rngs), rank=16, alpha=32, layers="blocks/*", rngs=rngs)

    return adapted


def trainer_of(case: Case, mesh: Any) -> tuple[Any, Any]:
    """Return the trainer of a case, and the shapes of a batch."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from jaxpp_flax import PipelineTrainer
    from jaxpp_flax.schedules import ResidualPlan, StageResiduals
    from jaxpp_flax.trainers import Memory, MeshOptions, Training

    stages = case.stages or case.axes["stage"]
    examples = case.microbatches * case.examples * case.axes.get("data", 1) * case.axes.get("fsdp", 1)
    if case.kind == "conv":
        inputs = jax.ShapeDtypeStruct((examples, case.length, case.length, 3), jnp.float32)
        targets = jax.ShapeDtypeStruct((examples,), jnp.int32)
    else:
        inputs = targets = jax.ShapeDtypeStruct((examples, case.length), jnp.int32)

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch["inputs"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    plan = ResidualPlan([StageResiduals(recompute=True)] * stages) if case.recompute else None
    trainer = PipelineTrainer(
        blocks_of(case), optax.adamw(1e-3), loss_fn, num_stages=stages, num_microbatches=case.microbatches,
        schedule=case.schedule, mesh=MeshOptions(mesh=mesh, fsdp=case.fsdp), assignment="even",  # type: ignore[arg-type]
        training=Training(wrt=nnx.LoRAParam if case.kind == "lora" else nnx.Param), precision=case.precision,
        memory=Memory(residuals=plan), logging=False,
    )  # fmt: skip
    return trainer, {"inputs": inputs, "targets": targets}


# ------------------------------------------------------------------ bytes


def in_terms(kinds: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by our terms."""
    found: dict[str, float] = dict.fromkeys(TERMS, 0.0)
    for kind, nbytes in kinds.items():
        term = _TERM_OF.get(kind, kind if kind in TERMS else "residuals")
        found[term] += nbytes
    return found


def planned_terms(trainer: Any, batch: Any, compiled: Any) -> list[dict[str, float]]:
    """Return the planner's bytes of each rank by our terms, as its walk has them at each rank's fullest moment."""
    from jaxpp_flax.engine.summary import inside_of, walk_memory
    from jaxpp_flax.planning.compilers.memory import value_kinds
    from jaxpp_flax.planning.predicted.placed_step import predicted_executables

    step = trainer.planning_step(batch)
    executables = predicted_executables(step.place(step.schedule, step.cuts, step.residuals))
    kinds = value_kinds(executables.program, compiled.argument_paths, compiled.result_paths)
    memory, held = walk_memory(executables, inside_of(executables), kinds)
    found = list[dict[str, float]]()
    for rank, moment in enumerate(memory.fullest):
        total = {kind: held[rank].get(kind, 0) + moment.kinds.get(kind, 0) for kind in {*held[rank], *moment.kinds}}
        found.append(in_terms({**total, "workspace": moment.inside}))
    return found


def child(name: str, machine: str) -> None:
    """Plan and compile one case, and print a row as JSON."""
    from jaxpp_flax.planning import compiler_report, described_mesh, plan

    case = CASES[name]
    axes = {"stage": 1, "data": 1, "fsdp": 1, "expert": 1, "tensor": 1, **case.axes}
    mesh = described_mesh(f"{machine}:{MACHINES[machine][math.prod(axes.values())]}", axes)
    trainer, batch = trainer_of(case, mesh)
    started = time.perf_counter()
    planned = plan(trainer, batch).peak_bytes
    compiled_at = time.perf_counter()
    compiled = trainer.compile(batch)
    report = compiler_report(compiled)
    terms = planned_terms(trainer, batch, compiled)
    rank = report.fullest.rank
    row = {
        "model": name,
        "machine": machine,
        "layout": " ".join(f"{axis}={size}" for axis, size in case.axes.items()),
        "planned": max(planned),
        "compiled": report.fullest.total,
        "rank": rank,
        "planned_rank": planned[rank],
        "task": report.fullest.task,
        "planned_terms": terms[rank],
        "compiled_terms": in_terms(report.fullest.kinds),
        "planned_all": list(planned),
        "compiled_all": [of.total for of in report.ranks],
        "workspaces": {task: of.running_bytes for of in report.tasks for task in of.names},
        "plan_seconds": compiled_at - started,
        "compile_seconds": time.perf_counter() - compiled_at,
    }
    print(json.dumps(row))


# ------------------------------------------------------------------ the table


def run_child(name: str, machine: str, deadline: float) -> dict[str, Any]:
    """Run a case in a process of its own."""
    command = [sys.executable, __file__, "--child", name, machine]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} on {machine}:\n{done.stderr[-1500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def error_of(row: Mapping[str, Any]) -> float:
    """Return by how much the planned bytes differ from the compiled ones, as a share of these."""
    return row["planned"] / row["compiled"] - 1


def show(row: Mapping[str, Any]) -> str:
    """Return the line of a row: for each term what the compiler has beyond the planner, as a share of all bytes."""
    more = (f"{(row['compiled_terms'][term] - row['planned_terms'][term]) / row['compiled']:+9.1%}" for term in TERMS)
    return (
        f"{row['model']:18} {row['machine']:9} {row['planned'] / 1e6:9.1f} {row['compiled'] / 1e6:9.1f} "
        f"{error_of(row):+8.1%} {''.join(more)}  {row['task']} {row['compile_seconds']:.0f} s"
    )


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines that follow the table."""
    if not rows:
        return ["no model was compiled"]
    errors = sorted(abs(error_of(row)) for row in rows)
    refused = [row for row in rows if error_of(row) < 0]
    worst = max(rows, key=lambda row: abs(error_of(row)))
    return [
        f"{len(rows)} rows: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%} ({worst['model']} "
        f"on {worst['machine']}), {sum(error <= 0.1 for error in errors)} within 10 %",
        f"with the planner's own estimate as the limit, the compiler says more for {len(refused)}: "
        + (", ".join(f"{row['model']} on {row['machine']} {-error_of(row):.1%}" for row in refused) or "none"),
    ]


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(CASES), help="names of models, divided by commas")
    flags.add_argument("--machines", default=",".join(MACHINES))
    flags.add_argument("--deadline", type=float, default=300, help="seconds for one model on one machine")
    flags.add_argument("--json", type=Path)
    flags.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = flags.parse_args()
    if options.child:
        child(*options.child)
        return 0
    print(f"{'model':18} {'machine':9} {'planned':>9} {'compiled':>9} {'error':>8} ", end="")
    print("".join(f"{term[:8]:>9}" for term in TERMS), " task; MB of the fullest rank; terms: compiled less planned")
    rows = list[dict[str, Any]]()
    for name in options.only.split(","):
        for machine in options.machines.split(","):
            try:
                rows.append(run_child(name, machine, options.deadline))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(error)
                continue
            print(show(rows[-1]), flush=True)
    print(*summary(rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
