"""A plan for a trainer from a terminal: ``python -m jaxpp_flax plan choose train.py:make``."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxpp_flax.commands.output import check_output
from jaxpp_flax.messages import near_names
from jaxpp_flax.planning.planner import check_made, plan

__all__ = ["WrongFactory", "add_command", "bytes_of", "function_of", "made_by", "refuse_given"]


def add_command(commands: Any) -> None:
    """Add `choose` to the commands of `python -m jaxpp_flax plan`."""
    text = "choose the schedule, stages and residuals of a trainer, on the devices that it has"
    make = commands.add_parser("choose", help=text, description=text)
    make.add_argument("factory", help="file.py:function; the function returns a trainer and a batch (arrays or shapes)")
    make.add_argument("--memory-limit", type=bytes_of, help="bytes that each device may hold, such as 40e9 or 40GB")
    make.add_argument("--schedules", nargs="+", help="names to choose from, or all (default: the trainer's own)")
    make.add_argument("--costs", default="estimated", choices=("estimated", "flops"), help="costs of blocks")
    make.add_argument("--save", help="write the plan here, as JSON")
    make.set_defaults(run=_choose)


def bytes_of(text: str) -> float:
    """Read a number of bytes: plain, or with a prefix."""
    number, factor = text, 1.0
    for unit, scale in (("KB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)):
        if text.upper().endswith(unit):
            number, factor = text[:-2], scale
    try:
        value = float(number) * factor
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write it as 40e9 or 40GB.")
    return value


def refuse_given(options: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse options that the chosen way does not take. Each is None or False if it is not given.

    Raises:
      ValueError: naming those that are given.

    Example:
      >>> refuse_given(argparse.Namespace(axes=None, best=3), ["axes", "best"], "for --compile alone.")
      Traceback (most recent call last):
      ValueError: --best: for --compile alone.
    """
    values = {f"--{name}": getattr(options, name) for name in names}
    given = [flag for flag, value in values.items() if value is not None and value is not False]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}")


def _choose(options: argparse.Namespace) -> int:
    check_output("--save", options.save)
    trainer, batch = check_made(made_by(options.factory), options.factory)
    schedules: Any = "all" if options.schedules == ["all"] else options.schedules
    found = plan(trainer, batch, memory_limit=options.memory_limit, schedules=schedules, costs=options.costs)
    Console().print(found)
    if options.save:
        print(f"wrote {found.save(options.save)}")
    return 0


class WrongFactory(ValueError):  # noqa: N818
    """There is no such file, or it has no such function, or the function needs arguments."""


def made_by(factory: str) -> Any:
    """Call a function of a user's file without arguments, and return what it returns.

    Raises:
      WrongFactory: if there is no such function, or if it needs arguments.
    """
    function = function_of(factory)
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        taken = inspect.signature(function)
        raise WrongFactory(
            f"{factory} is called without arguments, but the function takes {taken}. Give them defaults, or write a "
            "function that returns a trainer and a batch."
        ) from error
    except ValueError:  # it is not written in Python
        pass
    return function()


def function_of(factory: str) -> Callable[[], Any]:
    """Run a user's file, and return a function of it; `factory` names both, as in "train.py:make".

    Raises:
      WrongFactory: if there is no such file, or no such function in it.
    """
    path, _, name = factory.partition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if name else None
    if spec is None or spec.loader is None:
        raise WrongFactory(f"{factory!r}: write a Python file and a function in it, such as train.py:make.")
    if not Path(path).is_file():
        raise WrongFactory(
            f"{factory!r}: no such file. Write a Python file and a function in it, such as train.py:make."
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, UnicodeDecodeError) as error:
        if not os.path.samefile(getattr(error, "filename", None) or path, path):  # a module that the file imports
            raise
        raise WrongFactory(f"{path} is no Python file that can be run: {error}.") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = [known for known, of in vars(module).items() if callable(of) and not known.startswith("_")]
        raise WrongFactory(f"{path} has no function {name!r}.{near_names(name, functions)}")
    return function
