"""How far predicted steps are from steps that run: layouts of three models on eight virtual devices.

    python benchmarks/quote_inside.py [--layouts 63]

Costs are measured once for each model (`trainer.profile_step` of one layout); `jaxpp_flax.planning.plan` predicts the
seconds and bytes of every layout from them. Then each layout trains.

Virtual devices share the cores of the machine, so arithmetic on eight of them would not run side by side. Here each
product of matrices is small, and the device sleeps for the time that it stands for (`nap.cc`, which needs g++): naps of
different devices overlap on any machine, those of one device do not. So this tests the order of tasks, dependencies,
recomputation, and bytes. It does not test arithmetic, memory traffic or links. A rank is one device: XLA's client for
CPUs runs programs of several devices one after another, so that such ranks would not run side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

DEVICES, BATCH, LENGTH, WIDTH, BLOCKS = 8, 64, 32, 32, 8
FORWARD = 12e-3  # seconds of the forward of one example in the whole model
SEED = 7

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # arithmetic is not what is measured
os.environ["NPROC"] = str(4 * DEVICES)  # threads of XLA: one that sleeps must not keep another device waiting

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from memory import live_peaks  # noqa: E402

from jaxpp_flax import PipelineStage, PipelineTrainer  # noqa: E402
from jaxpp_flax.planning import StepProfile, even, plan  # noqa: E402
from jaxpp_flax.planning.predicted.placed_step import predict_memory  # noqa: E402
from jaxpp_flax.schedules import ResidualPlan, StageResiduals  # noqa: E402
from jaxpp_flax.trainers import Memory, MeshOptions  # noqa: E402

# ------------------------------------------------------------------ work that sleeps


def build_nap() -> None:
    source = Path(__file__).with_name("nap.cc")
    library = Path(tempfile.mkdtemp()) / "nap.so"
    flags = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", f"-I{jax.ffi.include_dir()}")
    subprocess.run(["g++", *flags, "-o", str(library), str(source)], check=True)
    jax.ffi.register_ffi_target("nap", jax.ffi.pycapsule(ctypes.CDLL(str(library)).nap), platform="cpu")


def nap(weights: jax.Array, clock: jax.Array, kind: int, nanoseconds: int) -> jax.Array:
    """Sleep; zero.

    XLA would do equal naps once: `weights` differ between products, `clock` between microbatches, `kind` between the
    product and its two gradients.
    """
    call = jax.ffi.ffi_call("nap", jax.ShapeDtypeStruct((), jnp.float32))
    return call(weights, clock, kind=np.int64(kind), nanoseconds=np.int64(nanoseconds))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def product(x: jax.Array, w: jax.Array, clock: jax.Array, nanoseconds: int) -> jax.Array:
    """A product of matrices that takes so long."""
    return (x + nap(w, clock, 0, nanoseconds)) @ w


def _forward(x: jax.Array, w: jax.Array, clock: jax.Array, nanoseconds: int) -> tuple[jax.Array, Any]:
    return product(x, w, clock, nanoseconds), (x, w, clock)


def _backward(nanoseconds: int, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, w, clock = saved
    of_input = (g + nap(w, clock, 1, nanoseconds)) @ w.T
    of_weights = jnp.einsum("bti,btj->ij", x + nap(w, clock, 2, nanoseconds), g)
    return of_input, of_weights, jnp.zeros(())


product.defvjp(_forward, _backward)

# ------------------------------------------------------------------ three models


@dataclass(frozen=True)
class Shape:
    """The hidden width of each block, how long its operations take beside those of others, and of what follows them."""

    hidden: tuple[int, ...]
    slowness: tuple[float, ...]
    head: int

    def nanoseconds(self) -> list[int]:
        """Return the time of each of a block's two products for an example, and of the head's."""
        work = [h * s for h, s in zip(self.hidden, self.slowness, strict=True)]
        unit = FORWARD / (2 * sum(work) + self.head)
        return [round(each * unit * 1e9) for each in (*work, self.head)]


MODELS = {
    "equal blocks": Shape((4 * WIDTH,) * BLOCKS, (1.0,) * BLOCKS, WIDTH),
    "growing blocks": Shape(tuple(WIDTH * (2 + i) for i in range(BLOCKS)), (1.0,) * BLOCKS, WIDTH),
    "slow blocks and a large head": Shape((4 * WIDTH,) * BLOCKS, (1.0, 1.8) * (BLOCKS // 2), 12 * WIDTH),
}


class Block(nnx.Module):
    def __init__(self, hidden: int, nanoseconds: int, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (WIDTH, hidden)))
        self.down = nnx.Param(init(rngs.params(), (hidden, WIDTH)))
        self.nanoseconds = nanoseconds

    def __call__(self, x: jax.Array, clock: jax.Array) -> jax.Array:
        hidden = jnp.tanh(product(x, self.up[...], clock, self.nanoseconds))
        return x + product(hidden, self.down[...], clock, self.nanoseconds)


class Model(nnx.Module):
    """The blocks and a head, for microbatches of so many examples."""

    def __init__(self, shape: Shape, examples: int, rngs: nnx.Rngs) -> None:
        *times, self.nanoseconds = (examples * each for each in shape.nanoseconds())
        blocks = (Block(hidden, time, rngs) for hidden, time in zip(shape.hidden, times, strict=True))
        self.blocks = nnx.List([PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)])
        self.head = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (WIDTH, shape.head)))

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        x, clock = batch["x"], batch["clock"]
        for block in self.blocks:
            x = block(x, clock)
        return product(x, self.head[...], clock, self.nanoseconds)


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean(model(batch) ** 2)


def make_batch() -> dict[str, jax.Array]:
    """Make a batch; `clock` is a scalar that each microbatch has, as far as the engine knows with another value."""
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    return {"x": jnp.asarray(x, jnp.float32), "clock": jnp.zeros(())}


# ------------------------------------------------------------------ layouts


@dataclass(frozen=True)
class Layout:
    ranks: int
    schedule: str
    microbatches: int
    recompute: bool
    assignment: str

    @property
    def stages(self) -> int:
        return self.ranks * (2 if self.schedule in ("interleaved_1f1b", "zbv") else 1)

    def sizes(self) -> list[int]:
        """Return the blocks of each stage."""
        even = [BLOCKS // self.stages] * self.stages
        if self.assignment == "even":
            return even
        giver, taker = (-1, 0) if self.assignment == "early" else (0, -1)
        even[giver], even[taker] = even[giver] - 1, even[taker] + 1
        return even

    def trainer(self, shape: Shape) -> PipelineTrainer:
        again = StageResiduals(recompute=True)
        residuals = ResidualPlan([again] * self.stages) if self.recompute else None
        examples = BATCH // self.microbatches
        return PipelineTrainer(
            Model(shape, examples, nnx.Rngs(0)), optax.adam(1e-3), loss, num_stages=self.stages,
            num_microbatches=self.microbatches, schedule=self.schedule, assignment=self.sizes(),
            mesh=MeshOptions(axes={}, num_ranks=self.ranks),
            memory=Memory(residuals=residuals), logging=False,
        )  # fmt: skip

    def __str__(self) -> str:
        residuals = "recompute" if self.recompute else "keep"
        return (f"{self.ranks} ranks, {self.schedule}, {self.microbatches} microbatches, "
                f"{residuals}, {self.assignment}")  # fmt: skip


def every_layout() -> list[Layout]:
    schedules = ("gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "zbv")
    kinds = itertools.product((2, 4, 8), schedules, (4, 8, 16), (False, True), ("even", "early", "late"))
    found = [Layout(*kind) for kind in kinds]
    return [of for of in found if of.stages <= BLOCKS and min(of.sizes()) > 0 and of.microbatches % of.ranks == 0]


def sample(count: int, seed: int) -> list[Layout]:
    """Return some layouts in which every schedule and number of ranks occurs about equally often."""
    groups: dict[tuple[int, str], list[Layout]] = {}
    for layout in every_layout():
        groups.setdefault((layout.ranks, layout.schedule), []).append(layout)
    chance = random.Random(seed)
    for group in groups.values():
        chance.shuffle(group)
    turns = itertools.chain.from_iterable(itertools.zip_longest(*groups.values()))
    return [layout for layout in turns if layout is not None][:count]


# ------------------------------------------------------------------ predicted and measured


@dataclass(frozen=True, kw_only=True)
class Result:
    layout: Layout
    predicted: float
    measured: float
    bytes_predicted: tuple[int, ...]  # between tasks, as the live ones
    bytes_live: tuple[int, ...]
    workspace: float  # the most that XLA takes inside a task, over the planned bytes of the fullest rank


def profile_of(shape: Shape, batch: Any) -> StepProfile:
    """Measure the tasks of one layout, in which each block is a stage: the best of three, as others use the cores."""
    trainer = Layout(DEVICES, "1f1b", 8, False, "even").trainer(shape)
    trainer.train_step(batch)
    return min((trainer.profile_step(batch) for _ in range(3)), key=lambda of: of.simulated.makespan)


def result_of(layout: Layout, shape: Shape, profile: StepProfile, batch: Any, repeats: int) -> Result:
    trainer = layout.trainer(shape)
    predicted = plan(trainer, batch, costs=profile)
    placed = trainer.planning_step(batch)
    between = predict_memory(placed.place(placed.schedule, placed.cuts or even(), placed.residuals))
    compiled = trainer.compile(batch)

    def step() -> None:
        jax.block_until_ready(trainer.train_step(batch))

    step()
    times = [_seconds(step) for _ in range(repeats)]
    analysis = compiled.memory_analysis()
    above = live_peaks(compiled, _Step(step))
    return Result(
        layout=layout,
        predicted=predicted.seconds or 0.0,
        measured=statistics.median(times),
        bytes_predicted=tuple(of.argument_bytes + of.peak_bytes for of in between),
        bytes_live=tuple(of.argument_bytes + peak for of, peak in zip(analysis, above, strict=True)),
        workspace=max(of.temp_bytes for of in analysis) / max(predicted.peak_bytes),
    )


@dataclass(frozen=True)
class _Step:
    run: Callable[[], None]


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(values)) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def summary(title: str, found: Sequence[Result]) -> dict[str, Any]:
    errors = [of.predicted / of.measured - 1 for of in found]
    groups = [[of for of in found if of.layout.ranks == ranks] for ranks in {of.layout.ranks for of in found}]
    slower = [
        min(of, key=lambda one: one.predicted).measured / min(one.measured for one in of) for of in groups
    ]  # fmt: skip
    return {
        "model": title,
        "layouts": len(found),
        "spearman": spearman([of.predicted for of in found], [of.measured for of in found]),
        "mean error": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
        "chosen over best, on equal devices": max(slower),
        "bytes exact": sum(of.bytes_predicted == of.bytes_live for of in found) / len(found),
        "workspace": max(of.workspace for of in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=63, help="of the three models together")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each, of which the median counts")
    parser.add_argument("--json", default=None, help="also write all results to this file")
    options = parser.parse_args()
    build_nap()
    batch = make_batch()
    profiles = {name: profile_of(shape, batch) for name, shape in MODELS.items()}
    found: dict[str, list[Result]] = {name: [] for name in MODELS}
    samples = (sample(-(-options.layouts // len(MODELS)), SEED + number) for number in range(len(MODELS)))
    for layouts in zip(*samples, strict=True):
        for layout, (name, profile) in zip(layouts, profiles.items(), strict=True):
            last = result_of(layout, MODELS[name], profile, batch, options.repeats)
            found[name].append(last)
            error = last.predicted / last.measured - 1
            print(f"{name}: {layout}: predicted {last.predicted:.3f} s, measured {last.measured:.3f} s ({error:+.1%}), "
                  f"workspace {last.workspace:.0%}", flush=True)  # fmt: skip
            if last.bytes_predicted != last.bytes_live:
                print(f"  bytes of ranks: predicted {last.bytes_predicted}, live {last.bytes_live}", flush=True)
    rows = [summary(name, results) for name, results in found.items()]
    every = [{"model": name, "layout": str(of.layout), "predicted": of.predicted, "measured": of.measured}
             for name, results in found.items() for of in results]  # fmt: skip
    for row in rows:
        print(", ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
    result = {"load": os.getloadavg(), "rows": rows, "results": every}
    print(json.dumps({key: result[key] for key in ("load", "rows")}))
    if options.json:
        Path(options.json).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
