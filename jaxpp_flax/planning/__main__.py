"""The command that plans a training: ``python -m jaxpp_flax plan quote|choose train.py:make``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxpp_flax.commands.exit_status import run
from jaxpp_flax.planning import cli as choosing
from jaxpp_flax.planning.choice import LimitError
from jaxpp_flax.planning.quoting import cli as quoting

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 1 if nothing fits, 2 for a user's error."""
    return run(parser(), arguments, (LimitError,))


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(prog="python -m jaxpp_flax plan", description="Plan a training.")
    commands = made.add_subparsers(dest="command", required=True)
    quoting.add_command(commands)
    choosing.add_command(commands)
    return made


if __name__ == "__main__":
    sys.exit(main())
