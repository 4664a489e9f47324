"""Showing and comparing schedules from a terminal."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxpp_flax.commands.exit_status import run
from jaxpp_flax.commands.output import check_output
from jaxpp_flax.counts import check_count
from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.names import by_name, names
from jaxpp_flax.schedules.schedule import Schedule
from jaxpp_flax.schedules.simulation.costs import Costs
from jaxpp_flax.schedules.simulation.simulate import simulate
from jaxpp_flax.schedules.tools.drawing import draw
from jaxpp_flax.schedules.tools.table import read_csv

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of the user's go to stderr in one line.

    >>> main(["show", "1f1b", "--ranks", "2", "--microbatches", "2", "--width", "60"])
    1f1b: makespan 9, bubble 33.3%, peak memory 2
    rank 0 |F0-F1-......B0====...B1====
    rank 1 |...F0-B0====F1-B1====......
    <BLANKLINE>
    F forward -  B backward =  . idle
    0
    """
    return run(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpp_flax.schedules",
        description="Show and compare pipeline schedules.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="validate and draw one schedule")
    show.set_defaults(run=_show)
    compare = commands.add_parser("compare", help="a table of all named schedules that fit, at equal total work")
    compare.set_defaults(run=_compare)

    show.add_argument(
        "schedule",
        help="a CSV file, with a row for each rank and cells such as 0F0, 1B0, 1I0, 1W0, empty where it idles; "
        f"or one of: {', '.join(names())}",
    )
    for command in (show, compare):
        add = command.add_argument
        add("--ranks", type=int, default=4, help="groups of devices, each of which runs its own stages (default: 4)")
        add("--microbatches", type=int, default=8, help="parts of a batch (default: 8)")
        add(
            "--forward",
            default="1",
            help="time of a forward: one number, or one for each stage with commas (default: 1)",
        )
        add("--input-gradient", default="1", help="time of an input gradient, likewise (default: 1)")
        add("--weight-gradient", default="1", help="time of a weight gradient, likewise (default: 1)")
        add("--costs", help="a JSON file with arguments of Costs, such as measured ones, in place of the three above")
        add("--latency", type=float, default=0.0, help="time of every transfer between ranks (default: 0)")
    show.add_argument("--stages-per-rank", type=int, help="default: 1, or 2 for a schedule in a V")
    show.add_argument("--output", "-o", help="also draw to this file: .svg, .json (Chrome trace) or .txt")
    show.add_argument("--width", type=int, help="columns of the drawing (default: the terminal's)")
    compare.add_argument("--stages-per-rank", default="1,2", help="numbers with commas between (default: 1,2)")
    return parser


def _costs_of(options: argparse.Namespace) -> Costs:
    """Return the costs that the options name."""
    if options.costs:
        try:
            return Costs(**json.loads(Path(options.costs).read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ScheduleError(f"{options.costs}: {error}. Write a JSON object with arguments of Costs") from error

    def numbers(flag: str, text: str) -> float | list[float]:
        try:
            values = [float(part) for part in text.split(",")]
        except ValueError:
            raise ScheduleError(f"{flag} {text!r}: give one number, or one for each stage with commas") from None
        return values[0] if len(values) == 1 else values

    return Costs(
        forward=numbers("--forward", options.forward),
        backward_input=numbers("--input-gradient", options.input_gradient),
        backward_weight=numbers("--weight-gradient", options.weight_gradient),
    )


def _check_counts(options: argparse.Namespace) -> None:
    check_count("--ranks", options.ranks)
    check_count("--microbatches", options.microbatches)


def _named(options: argparse.Namespace) -> tuple[Schedule, int]:
    if options.schedule.endswith(".csv"):
        schedule = read_csv(options.schedule)
        return schedule, schedule.num_microbatches
    if options.stages_per_rank is not None:
        return _of_stages(options, check_count("--stages-per-rank", options.stages_per_rank)), options.microbatches
    try:
        return _of_stages(options, 1), options.microbatches
    except ScheduleError:
        return _of_stages(options, 2), options.microbatches


def _of_stages(options: argparse.Namespace, per_rank: int) -> Schedule:
    try:
        return by_name(options.schedule, options.ranks * per_rank, options.ranks)
    except ScheduleError:
        raise
    except ValueError as error:  # no schedule has this name
        raise ValueError(f"{error} A CSV file can be given too; its name ends in .csv.") from None


def _show(options: argparse.Namespace) -> int:
    _check_counts(options)
    check_output("--output", options.output)
    schedule, microbatches = _named(options)
    step = simulate(schedule, _costs_of(options), options.latency, num_microbatches=microbatches)
    width = options.width or shutil.get_terminal_size((120, 24)).columns
    print(draw(step, options.output, title=options.schedule, width=width))
    if options.output:
        print(f"wrote {options.output}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    _check_counts(options)
    whole = _costs_of(options)
    rows: list[tuple[float, str]] = []
    for per_rank in _counts("--stages-per-rank", options.stages_per_rank):
        costs = _shared_out(whole, per_rank)
        for name in names(options.ranks * per_rank, options.ranks):
            schedule = by_name(name, options.ranks * per_rank, options.ranks)
            step = simulate(schedule, costs, options.latency, num_microbatches=options.microbatches)
            row = f"{name:28} {per_rank:>6} {step.makespan:>9.4g} {step.bubble:>7.1%} {step.steady_bubble:>13.1%} "
            row += f"{min(step.peak_memory):>7.3g} {max(step.peak_memory):>7.3g}"
            rows.append((step.makespan, row))
    print(
        f"{options.ranks} ranks, {options.microbatches} microbatches; fastest first. Stages of a rank share its work."
    )
    print(f"{'schedule':28} {'stages':>6} {'makespan':>9} {'bubble':>7} {'no barrier':>13} {'memory':>7} {'to':>7}")
    for _, row in sorted(rows):
        print(row)
    return 0


def _counts(option: str, text: str) -> list[int]:
    """Return the numbers, with commas between them, that an option gives."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ScheduleError(f"{option} must be whole numbers with commas between them, such as 1,2, got {text!r}")
    return [check_count(option, int(part)) for part in parts]


def _shared_out(costs: Costs, per_rank: int) -> Costs:
    """The same work and memory on each rank, cut into more stages."""
    if per_rank == 1:
        return costs
    fields: dict[str, float | None] = {}
    for name in ("forward", "backward_input", "backward_weight", "backward", "activation", "weight_activation"):
        value = getattr(costs, name)
        if isinstance(value, Sequence):
            raise ScheduleError(f"compare with --stages-per-rank {per_rank} needs one {name} for all stages")
        fields[name] = None if value is None else value / per_rank
    return Costs(**fields, sent=costs.sent)  # type: ignore[arg-type]
