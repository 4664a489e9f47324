"""How long the compilers of TPUs and GPUs take for Llama 3 of 8B and 70B, and what they say of bytes and seconds.

    python benchmarks/compilers.py                      every row below, each in a process of its own
    python benchmarks/compilers.py 8b h100-sxm:8x8      the rows of this model and this machine
    python benchmarks/compilers.py --layout 1b tpu-v5p:2x2x2 stage=2,fsdp=2,tensor=2 16

It needs the extras `compilers-tpu` and `compilers-cuda`, and no device. A line has the model, the machine and the
layout; minutes until every stage is compiled and the most memory of the process; the bytes of the fullest rank beside a
device's memory; seconds of a step by the compiler's cost model (TPU) with the share of the best that it is.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

import optax
from flax import linen
from llama_shapes import RULES, SHAPES, Llama, Shape, loss_fn, tokens_of

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.planning.compilers.command import axes_of
from jaxpp_flax.planning.compilers.described import described_mesh
from jaxpp_flax.planning.compilers.report import compiler_report

# model, machine, axes, microbatches
ROWS = (
    ("8b", "tpu-v5p:4x4x4", "stage=8,fsdp=4,tensor=2", 32),
    ("8b", "h100-sxm:8x8", "stage=8,fsdp=2,tensor=4", 32),
    ("70b", "tpu-v5p:4x4x4", "stage=16,tensor=4", 32),
    ("70b", "tpu-v5p:4x8x8", "stage=16,fsdp=4,tensor=4", 32),
    ("70b", "h100-sxm:8x8", "stage=8,tensor=8", 32),
)


def matrix_products(shape: Shape, tokens: int) -> float:
    """Return the operations of a step that counts nothing twice: six for each weight of a product, and attention."""
    heads = shape.width // shape.heads * shape.key_value_heads
    block = 2 * shape.width**2 + 2 * shape.width * heads + 3 * shape.width * shape.hidden
    weights = shape.layers * block + shape.width * shape.vocabulary
    return tokens * (6 * weights + 6 * shape.layers * shape.length * shape.width)  # a causal mask halves attention


def compile_row(model: str, machine: str, axes: str, microbatches: int) -> str:
    shape, sizes = SHAPES[model], axes_of(axes)
    mesh = described_mesh(machine, sizes)
    examples = microbatches * sizes.get("data", 1) * sizes.get("fsdp", 1)
    began = time.monotonic()
    rules = tuple((name, tuple(axis for axis in axes if axis in sizes) or None) for name, axes in RULES)
    with linen.logical_axis_rules(rules):
        trainer = PipelineTrainer(
            lambda rngs: Llama(shape, rngs=rngs), optax.adamw(1e-4), loss_fn, num_stages=sizes["stage"],
            num_microbatches=microbatches, mesh=mesh, logging=False,
        )  # fmt: skip
    report = compiler_report(trainer.compile(tokens_of(shape, examples)))
    minutes = (time.monotonic() - began) / 60
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(report)
    seconds = ""
    if report.seconds is not None:
        rate = matrix_products(shape, examples * shape.length) / report.seconds / mesh.size
        seconds = f"; a step of {examples} examples: {report.seconds:.2f} s by the compiler, {rate / 1e12:.0f} TFLOP/s"
    memory = "" if report.memory is None else f" of {report.memory / 2**30:.0f}"
    return (
        f"{model:4} {machine:14} {axes:26} {microbatches} microbatches: compiled in {minutes:.1f} min with {peak:.1f} "
        f"GiB; {report.fullest.total / 2**30:.1f}{memory} GiB on rank {report.fullest.rank}{seconds}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="models and machines, of which rows are compiled")
    parser.add_argument("--layout", nargs=4, metavar=("MODEL", "MACHINE", "AXES", "MICROBATCHES"), help="one row")
    options = parser.parse_args()
    if options.layout:
        model, machine, axes, microbatches = options.layout
        print(compile_row(model, machine, axes, int(microbatches)), flush=True)
        return
    for row in ROWS:
        if all(name in row for name in options.only):
            command = [sys.executable, Path(__file__), "--layout", *map(str, row)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            print(done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr[-2000:], flush=True)


if __name__ == "__main__":
    main()
