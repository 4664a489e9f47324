"""Planning from a terminal: a plan for a trainer, or a schedule for given costs."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxpp_flax.planning.planner import plan
from jaxpp_flax.planning.schedule_search.search import search
from jaxpp_flax.schedules.simulation.costs import Link, Transfer
from jaxpp_flax.schedules.tools.cli import add_counts, add_model, add_pictures, costs_of, draw_panels, run
from jaxpp_flax.schedules.tools.table import write_csv


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of the user's go to stderr in one line.

    >>> main(["search", "--ranks", "2", "--microbatches", "2", "--width", "60"])
    found by zero_bubble: makespan 7 (lower bound 7, proved optimal), bubble 14.3%
    peak memory by rank: 2, 2
    best named: zero_bubble, makespan 7 (+0.0%)
    <BLANKLINE>
    found: makespan 7, bubble 14.3%, peak memory 2
    rank 0 |F0-F1-...B0====B1====
    rank 1 |...F0-I0~F1-I1~W0:W1:
    <BLANKLINE>
    F forward -  B backward =  I input gradient ~  W weight gradient :  . idle
    0
    """
    return run(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpp_flax.planning", description="Plan a training, or a schedule."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("plan", help="choose schedule, stages and residuals for a trainer")
    make.add_argument("factory", help="file.py:function; the function returns a trainer and a batch (arrays or shapes)")
    make.add_argument("--memory-limit", type=_bytes, help="bytes of each device, such as 40e9 or 40GB")
    make.add_argument("--schedules", nargs="+", help="names to choose from, or all (default: the trainer's own)")
    make.add_argument("--costs", default="estimated", choices=("estimated", "flops"), help="costs of blocks")
    make.add_argument("--save", help="write the plan here, as JSON")
    make.set_defaults(run=_plan)
    find = commands.add_parser("search", help="find a schedule for these costs, links and memory")
    add_counts(find)
    add_model(find)
    find.add_argument(
        "--memory-limit", type=float, help="activation memory of each rank: in activations, or as --costs counts it"
    )
    find.add_argument("--whole-backward", action="store_true", help="do not split the backward")
    find.add_argument(
        "--evaluations", type=int, default=4000, help="schedules that the local search tries (default: 4000)"
    )
    find.add_argument("--csv", help="write the schedule here")
    add_pictures(find)
    find.set_defaults(run=_search)
    return parser


def _bytes(text: str) -> float:
    """Read a number of bytes: plain, or with a prefix."""
    for unit, factor in (("KB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)):
        if text.upper().endswith(unit):
            return float(text[:-2]) * factor
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _plan(options: argparse.Namespace) -> int:
    trainer, batch = _made(options.factory)
    schedules: Any = "all" if options.schedules == ["all"] else options.schedules
    found = plan(trainer, batch, memory_limit=options.memory_limit, schedules=schedules, costs=options.costs)
    Console().print(found)
    if options.save:
        print(f"wrote {found.save(options.save)}")
    return 0


def _made(factory: str) -> Any:
    """Run a function of a user's file."""
    path, _, name = factory.partition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if name else None
    if spec is None or spec.loader is None:
        raise ValueError(f"{factory!r}: write a Python file and a function in it, such as train.py:make.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}.")
    made = function()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{factory} must return a trainer and a batch, got {type(made).__name__}.")
    return made


def _search(options: argparse.Namespace) -> int:
    found = search(
        options.ranks,
        options.microbatches,
        options.stages_per_rank or 1,
        costs_of(options),
        Transfer(Link(options.latency)),
        options.memory_limit,
        split_backward=not options.whole_backward,
        evaluations=options.evaluations,
    )
    print(found.summary() + "\n")
    draw_panels(options, [("found", found.timeline)])
    if options.csv:
        write_csv(found.schedule, options.csv)
        print(f"wrote {options.csv}")
    return 0
