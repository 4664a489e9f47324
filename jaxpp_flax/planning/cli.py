"""Finding a schedule from a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

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
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.planning", description="Plan pipeline schedules.")
    commands = parser.add_subparsers(dest="command", required=True)
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
