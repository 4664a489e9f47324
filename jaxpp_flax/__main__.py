"""The list of commands: ``python -m jaxpp_flax``; ``python -m jaxpp_flax doctor`` runs one of them."""

from __future__ import annotations

import runpy
import sys

from jaxpp_flax.messages import near_names

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "doctor": "what is installed, what is wrong, and how fast processes talk",
    "explain": "an error by its code: the usual reasons, and what helps",
    "launch": "run a script as several processes, or as one process of a cluster's job",
    "plan": "quote: layouts on devices that you do not have; choose: schedule and stages on those that you have",
    "schedules": "draw and compare schedules",
    "verify": "compare a pipeline with plain JAX, number by number; bisect: find where two runs differ",
}

_MODULES = {"explain": "commands.explain", "plan": "planning"}  # those of another name


def main(arguments: list[str]) -> int:
    """List the commands, or run one, which may end the process; returns 2 for an unknown one."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m jaxpp_flax COMMAND --help tells more about a command:")
        print(*(f"  {name:11}{text}" for name, text in COMMANDS.items()), sep="\n")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        print(
            f"there is no command {name!r}.{near_names(name, COMMANDS)} They are: {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return 2
    sys.argv[:] = [f"{sys.argv[0]} {name}", *arguments[1:]]
    runpy.run_module(f"jaxpp_flax.{_MODULES.get(name, name)}", run_name="__main__", alter_sys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
