"""A quote beside the compiler's report: seconds and bytes by term, of one model in some layouts on described TPUs.

    python benchmarks/quote_beside_compiler.py [--only v6e,fsdp] [--quote] [--json FILE]

The model is a Llama of 0.4 billion parameters in 4 blocks (64 examples of 2,048 tokens, bfloat16, nothing recomputed).
It needs the extra `compilers-tpu` and no device; each row compiles in a process of its own. `--quote` compiles nothing.

Terms of the seconds. The quote's: products at the peak of the data sheet, what the curves add to them, other work in
memory, collectives, and the rest (bubble, update, what each step takes besides). The compiler's, from its two models:
`cost_analysis` (the report's seconds) has each operation's operations at the peak, or its bytes at 85 % of the
bandwidth if they take longer, and no collectives; the scheduler has cycles for each operation it has laid out, copies
between layouts included, and none for collectives. Both are of the rank with the most work.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optax
from flax import linen
from llama_shapes import RULES, SHAPES, Llama, Shape, loss_fn, tokens_of

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.program.program import Run
from jaxpp_flax.engine.summary import costs_of
from jaxpp_flax.planning import Curves, Quoter, compiler_report, described_mesh, device_named
from jaxpp_flax.planning.compilers.command import axes_of
from jaxpp_flax.planning.quoting.devices import Device
from jaxpp_flax.planning.quoting.layouts import Layout
from jaxpp_flax.planning.quoting.traced import TracedModel, trace_model

EXAMPLES, MICROBATCH, LAYERS = 64, 4, 4
SHAPE = Shape(
    width=2048, hidden=8192, layers=LAYERS, heads=16, key_value_heads=16, vocabulary=32000, length=2048, recompute=False
)
TOPOLOGIES = {"tpu-v5p": "2x2x1", "tpu-v6e": "2x2"}
AXES = ("stage=4", "stage=1,data=4", "stage=1,fsdp=4", "stage=1,tensor=4", "stage=2,fsdp=2")
CYCLES = 1.75e9  # a second, of both: the peak over the operations that the matrix units do in a cycle


def make(layers: int = LAYERS, *, shape: Shape = SHAPE, **options: Any) -> tuple[PipelineTrainer, Any]:
    shape = replace(shape, layers=layers)
    with linen.logical_axis_rules(RULES):
        trainer = PipelineTrainer(
            lambda rngs: Llama(shape, rngs=rngs), optax.adamw(1e-4), loss_fn, logging=False, **options
        )
    return trainer, tokens_of(shape, EXAMPLES)


def layout_of(axes: str) -> Layout:
    sizes = axes_of(axes)
    data, fsdp, tensor = (sizes.get(name, 1) for name in ("data", "fsdp", "tensor"))
    stages = sizes["stage"]
    return Layout(pipeline=stages, stages=stages, data=data, fsdp=fsdp, tensor=tensor, microbatch=MICROBATCH)


def quoted(model: TracedModel, device: Device, axes: str) -> dict[str, float]:
    """Return the seconds and the bytes of a quote by term; quotes with other curves tell the terms apart."""
    layout = layout_of(axes)

    def compute(device: Device, **curves: float) -> float:
        return Quoter(model, device, Curves(**curves)).quoted(layout).parts["compute"]

    step = Quoter(model, device, Curves()).quoted(layout)
    at_peak = compute(replace(device, memory_bandwidth=1e30), product=1.0, edge=0.0, kernel=0.0)
    in_products = compute(replace(device, memory_bandwidth=1e30), kernel=0.0) - at_peak
    moving = ("tensor sums", "sums and exchanges", "fsdp gathers", "data sums")
    collectives = sum(step.parts.get(name, 0.0) for name in moving)
    return {
        "seconds": step.seconds,
        "products at the peak": at_peak,
        "products beyond it": in_products,
        "other work": step.parts["compute"] - at_peak - in_products,
        "collectives": collectives,
        "bubble": step.parts.get("bubble", 0.0),
        "update and besides": step.parts["update"] + step.parts["besides"],
        "bytes": step.memory,
    }


def compiled(shape: Shape, device: Device, machine: str, axes: str) -> dict[str, float]:
    """Return the compiler's seconds and bytes by term."""
    layout = layout_of(axes)
    trainer, batch = make(
        shape=shape, num_stages=layout.stages, num_microbatches=layout.num_microbatches(EXAMPLES),
        mesh=described_mesh(f"{machine}:{TOPOLOGIES[machine]}", {"data": 1, "fsdp": 1, "tensor": 1, **axes_of(axes)}),
    )  # fmt: skip
    step = trainer.compile(batch)
    report = compiler_report(step)
    executables, program = step.executables.tasks, step.executables.program
    peak, cycles = [0.0] * program.num_ranks, [0.0] * program.num_ranks
    for instruction in program.instructions:
        if isinstance(instruction, Run):
            rank, executable = program.tasks[instruction.task].rank, executables[instruction.task]
            found = re.findall(r'"estimated_cycles":"(\d+)"', executable.as_text())
            peak[rank] += costs_of(executable).get("flops", 0.0) / device.peak_of("bfloat16")
            cycles[rank] += sum(map(int, found)) / CYCLES
    return {
        "seconds": report.seconds or 0.0,
        "operations at the peak": max(peak),
        "waiting": (report.idle or 0.0) * (report.seconds or 0.0),
        "scheduler": max(cycles),
        "bytes": report.fullest.total,
        "workspace": report.fullest.kinds.get("workspace", 0),
    }


def show(machine: str, axes: str, quote: dict[str, float], compiler: dict[str, float]) -> str:
    def cells(of: dict[str, float]) -> str:
        return ", ".join(
            f"{name} {value / 1e9:.1f} GB" if name in ("bytes", "workspace") else f"{name} {1e3 * value:.0f} ms"
            for name, value in of.items()
        )

    lines = [f"{machine} {axes}", f"  quote:    {cells(quote)}"]
    if compiler:
        ratios = (f"{name} {quote[name] / compiler[name]:.2f} x the compiler's" for name in ("seconds", "bytes"))
        lines += [f"  compiler: {cells(compiler)}", f"  {', '.join(ratios)}"]
    return "\n".join(lines)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default="", help="texts that a row's machine and axes must have, divided by commas")
    flags.add_argument("--quote", action="store_true", help="compile nothing")
    flags.add_argument("--tiny", action="store_true", help="a model so small that only the program is tried")
    flags.add_argument("--json", type=Path)
    flags.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = flags.parse_args()
    shape = replace(SHAPES["tiny"], recompute=False) if options.tiny else SHAPE
    if options.child:
        machine, axes = options.child
        print(json.dumps(compiled(shape, device_named(machine), machine, axes)))
        return
    rows, model = list[dict[str, Any]](), trace_model(partial(make, shape=shape), "layers")
    for machine, axes in ((machine, axes) for machine in TOPOLOGIES for axes in AXES):
        if not all(text in f"{machine} {axes}" for text in options.only.split(",")):
            continue
        compiler: dict[str, float] = {}
        if not options.quote:
            command = [sys.executable, __file__, *(["--tiny"] if options.tiny else []), "--child", machine, axes]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{machine} {axes}: {done.stderr[-1000:]}", flush=True)
                continue
            compiler = json.loads(done.stdout.splitlines()[-1])
        rows.append({"machine": machine, "axes": axes, "quote": quoted(model, device_named(machine), axes),
                     "compiler": compiler})  # fmt: skip
        print(show(**rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
