"""`python -m jaxpp_flax.verify script.py:make`: verify the trainer and batch that a function returns.

`python -m jaxpp_flax.verify bisect RUN OTHER`: find the first checkpoint at which two runs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxpp_flax.commands.exit_status import exit_status
from jaxpp_flax.commands.output import check_output
from jaxpp_flax.planning.cli import WrongFactory, made_by
from jaxpp_flax.trainers import PipelineTrainer
from jaxpp_flax.verify import parting
from jaxpp_flax.verify.verification import verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and write it to the file of `--report`; return 0 if the pipeline is right, 1 if it is not.

    It returns 1 also if the whole step was not compared, since it may be wrong then. It returns 2 if the file, its
    function, or what that returns is wrong.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bisect"]:
        return parting.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.verify", description=__doc__)
    parser.add_argument("make", metavar="script.py:make", help="a function that returns (trainer, batch)")
    parser.add_argument("--report", metavar="report.json", help="where to write the report")
    given = parser.parse_args(arguments)
    try:
        return exit_status(lambda: _verify(given), script=given.make.rpartition(":")[0] or None, raised=WrongFactory)
    except WrongFactory as error:
        parser.error(str(error))


def _verify(given: argparse.Namespace) -> int:
    check_output("--report", given.report)
    made = made_by(given.make)
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], PipelineTrainer):
        got = f"({', '.join(type(of).__name__ for of in made)})" if isinstance(made, tuple) else type(made).__name__
        raise ValueError(f"{given.make} must return a PipelineTrainer and a batch, got {got}.")
    report = verify(*made)
    print(report)
    if given.report:
        report.save(given.report)
    return 0 if report.agrees else 1


if __name__ == "__main__":
    raise SystemExit(main())
