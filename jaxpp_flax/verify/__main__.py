"""`python -m jaxpp_flax.verify script.py:make`: verify the trainer and batch that a function returns.

`python -m jaxpp_flax.verify bisect RUN OTHER`: find the first checkpoint at which two runs differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxpp_flax.planning.cli import function_of
from jaxpp_flax.verify import parting
from jaxpp_flax.verify.verification import verify

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report, and write it to the file of `--report`; return 0 if the pipeline is right, else 1."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bisect"]:
        return parting.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m jaxpp_flax.verify", description=__doc__)
    parser.add_argument("make", metavar="script.py:make", help="a function that returns (trainer, batch)")
    parser.add_argument("--report", metavar="report.json", help="where to write the report")
    given = parser.parse_args(arguments)
    try:
        make = function_of(given.make)
    except ValueError as error:
        parser.error(str(error))
    report = verify(*make())
    print(report)
    if given.report:
        report.save(given.report)
    return 0 if report.agrees else 1


if __name__ == "__main__":
    raise SystemExit(main())
