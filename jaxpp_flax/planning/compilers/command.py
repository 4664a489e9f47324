"""Will it fit? ``python -m jaxpp_flax plan quote train.py:make --compile h100-sxm:8x8 --best 3``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from jaxpp_flax.commands.exit_status import NO
from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.runtime.refusals import TaskMemoryError
from jaxpp_flax.messages import amount
from jaxpp_flax.planning.cli import function_of, refuse_given
from jaxpp_flax.planning.compilers.described import described_devices, described_mesh
from jaxpp_flax.planning.compilers.report import CompilerReport, compiler_report
from jaxpp_flax.planning.plan import Plan
from jaxpp_flax.planning.quoting.devices import Device, device_named, device_of_kind
from jaxpp_flax.planning.quoting.quote import Quote, quote
from jaxpp_flax.planning.quoting.step import QuotedStep
from jaxpp_flax.planning.quoting.tracing.one_size import examples_of, made_with

__all__ = ["OPTIONS", "add_options", "axes_of", "run"]

_OF_ONE_LAYOUT = ("stages", "microbatches", "schedule")
OPTIONS = ("axes", "best", *_OF_ONE_LAYOUT, "json")
"""What is for a compilation alone."""

STAGE = "stage"
_BATCH_AXES = ("data", "fsdp")
_INSIDE = (*_BATCH_AXES, "expert", "tensor")  # the axes of a quote's layouts: annotations may name all of them
_MICROBATCHES_OF_A_STAGE = 4  # at most, by default


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a compilation for devices that are only described."""
    group = parser.add_argument_group("will it fit? ask the compiler of the devices; none of them is needed")
    group.add_argument(
        "--compile", metavar="MACHINE", help="compile for these devices, such as tpu-v5p:4x4x4 or h100-sxm:2x8"
    )
    group.add_argument("--axes", help="the mesh to compile for, such as stage=8,data=2,tensor=4")
    group.add_argument("--best", type=int, help="or compile so many layouts, the best of the quote")
    group.add_argument("--stages", type=int, help="with --axes: the stages (default: one for each rank)")
    group.add_argument(
        "--microbatches", type=int, help="with --axes: the parts of a batch (default: up to 4 for each stage)"
    )
    group.add_argument("--schedule", help="with --axes: the name of the schedule (default: 1f1b)")
    group.add_argument("--json", help="write what the compiler says to this file; with --best, of the last layout")


def run(options: argparse.Namespace) -> int:
    """Compile, and print what the compiler says; return the exit status: 1 if nothing fits.

    Raises:
      ValueError, ModuleNotFoundError: for options that do not fit one another, the machine or the trainer, and without
        the compiler.
    """
    if (options.axes is None) == (options.best is None):
        raise ValueError(
            "--compile needs either --axes, such as stage=8,data=2,tensor=4, for one layout, or --best 3 for the three "
            "best of the quote."
        )
    if options.best is None:
        refuse_given(options, ["depth"], "not with --axes: it is for a quote, which --best 3 makes.")
    else:
        refuse_given(options, _OF_ONE_LAYOUT, "for --axes alone: with --best the quote chooses them.")
    axes = None if options.axes is None else axes_of(options.axes)
    if axes is not None and options.save:
        raise ValueError(
            "--save writes the plan of a quote's layout: compile its best with --best 3 in place of --axes."
        )
    count = 0 if options.best is None else check_count("--best", options.best)
    kind = described_devices(options.compile)[0].device_kind  # before JAX runs for anything else
    make = function_of(options.factory)
    if axes is not None:
        return 0 if _compile(options, make, axes) else NO
    found = _quoted(options, make, kind)
    reports = [(step, _compile(options, make, step.layout.axes, found, step)) for step in found.best_of(count)]
    fitting = [_plan(found, step, report) for step, report in reports if report is not None]
    if options.save and fitting:
        print(f"wrote {fitting[0].save(options.save)}")
    return 0 if fitting else NO


def _plan(found: Quote, step: QuotedStep, report: CompilerReport) -> Plan:
    """Return the plan of a quote's layout, with the compiler's bytes in the place of the estimate."""
    plan = found.plan(step)
    notes = (*plan.notes, f"bytes by the compiler of {report.device}")
    return replace(plan, peak_bytes=tuple(float(rank.total) for rank in report.ranks), notes=notes)


def axes_of(text: str) -> dict[str, int]:
    """Return the axes of a mesh from a text, in its order.

    Raises:
      ValueError: for another text, and without the axis of the ranks.

    Example:
      >>> axes_of("stage=8,data=2")
      {'stage': 8, 'data': 2}
      >>> axes_of("data=2")
      Traceback (most recent call last):
      ValueError: --axes data=2: the axis of the ranks is missing. Write stage=1 for one without a pipeline.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if not name.isidentifier() or not size.isdecimal() or not int(size) or name in found:
            raise ValueError(f"--axes {text}: {part!r} is no axis; write a name and a size once, such as data=2.")
        found[name] = int(size)
    if STAGE not in found:
        raise ValueError(f"--axes {text}: the axis of the ranks is missing. Write stage=1 for one without a pipeline.")
    return found


def _quoted(options: argparse.Namespace, make: Callable[..., Any], kind: str) -> Quote:
    device = _row(options) or device_of_kind(kind)
    if device is None:
        raise ValueError(f"{options.compile}: no table has a {kind}. Name a row for its speeds by --hardware.")
    return quote(
        make, hardware=device, devices=len(described_devices(options.compile)), memory=options.memory,
        top=options.best, depth=options.depth,
    )  # fmt: skip


def _compile(
    options: argparse.Namespace, make: Callable[..., Any], axes: dict[str, int],
    found: Quote | None = None, step: QuotedStep | None = None,
) -> CompilerReport | None:  # fmt: skip
    """Compile one layout, and print the report; return it if the layout fits."""
    mesh = _with_all_axes(described_mesh(options.compile, axes))
    if found is None:
        given = _given(options, make, axes)
    else:
        given = {"plan": found.plan(step)}
        print(f"\n{step.layout if step else ''}\n")
    trainer, batch = made_with(make, mesh=mesh, **given)
    try:
        report = compiler_report(trainer.compile(batch), memory=options.memory, device=_row(options))
    except TaskMemoryError as error:
        print(f"It does not fit: {error}")
        return None
    print(report, *_beside(report, step), sep="\n")
    if options.json:
        print(f"wrote {report.save(options.json)}")
    return None if report.fits is False else report


def _with_all_axes(mesh: Mesh) -> Mesh:
    """Add the axes that a layout leaves out, with size 1."""
    missing = tuple(name for name in _INSIDE if name not in mesh.axis_names)
    shape = (*mesh.devices.shape, *(1 for _ in missing))
    return Mesh(mesh.devices.reshape(shape), (*mesh.axis_names, *missing))


def _row(options: argparse.Namespace) -> Device | None:
    return device_named(options.hardware, options.table) if options.hardware else None


def _given(options: argparse.Namespace, make: Callable[..., Any], axes: dict[str, int]) -> dict[str, Any]:
    """Return the trainer's options of the layout that is given."""
    stages = options.stages or axes[STAGE]
    shards = math.prod(axes.get(axis, 1) for axis in _BATCH_AXES)
    return {
        "num_stages": stages,
        "num_microbatches": options.microbatches or _microbatches(examples_of(make, {}), shards, stages),
        "schedule": options.schedule or "1f1b",
    }


def _microbatches(examples: int, shards: int, stages: int) -> int:
    """Return the largest number of microbatches, at most four for each stage, that divides the examples."""
    each = max(1, examples // shards)
    return max(n for n in range(1, _MICROBATCHES_OF_A_STAGE * stages + 1) if each % n == 0)


def _beside(report: CompilerReport, step: QuotedStep | None) -> Iterator[str]:
    """Return what the quote had said."""
    if step is not None:
        seconds = "" if report.seconds is None else f" {amount(step.seconds, 's')} a step, and"
        yield f"The quote had{seconds} {amount(step.memory, 'B')} on the fullest rank's devices."
