"""`python -m jaxpp_flax.verify script.py:make`: verify the trainer and batch that a function returns."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxpp_flax.verify.verification import verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and write it if asked; return 0 if the pipeline is right, and 1 if it is not."""
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.verify", description=__doc__)
    parser.add_argument("make", metavar="script.py:make", help="a function that returns (trainer, batch)")
    parser.add_argument("--report", metavar="report.json", help="where to write the report")
    given = parser.parse_args(arguments)
    try:
        make = _find(given.make)
    except ValueError as error:
        parser.error(str(error))
    report = verify(*make())
    print(report)
    if given.report:
        report.save(given.report)
    return 0 if report.agrees else 1


def _find(text: str) -> Callable[[], tuple[Any, Any]]:
    script, _, name = text.rpartition(":")
    if not script or not Path(script).is_file():
        raise ValueError(f"{text!r} names no file; write script.py:make")
    names = runpy.run_path(script, run_name="jaxpp_flax_verify")
    if not callable(names.get(name)):
        raise ValueError(f"{script} has no function {name!r}; it must return (trainer, batch)")
    return names[name]


if __name__ == "__main__":
    raise SystemExit(main())
