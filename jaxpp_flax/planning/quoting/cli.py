"""A quote from a terminal: ``python -m jaxpp_flax plan quote train.py:make --hardware h100-sxm --devices 64``.

With ``--compile`` the same command asks the compiler of the devices: see `planning/compilers/command.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import jax

from jaxpp_flax.commands.output import check_output
from jaxpp_flax.planning.cli import bytes_of, function_of, refuse_given
from jaxpp_flax.planning.compilers import command
from jaxpp_flax.planning.quoting.curves import MeasuredCurves
from jaxpp_flax.planning.quoting.devices import device_named
from jaxpp_flax.planning.quoting.layouts import explained
from jaxpp_flax.planning.quoting.quote import quote

__all__ = ["add_command"]

_OF_A_QUOTE = ("devices", "measure", "price", "top", "explain")


def add_command(commands: Any) -> None:
    """Add `quote` to the commands of `python -m jaxpp_flax plan`."""
    text = "rank the layouts of a training on devices that you do not have, or compile for them"
    parser = commands.add_parser("quote", help=text, description=text)
    parser.add_argument("factory", help="file.py:function; it takes a trainer's options, returns a trainer and a batch")
    parser.add_argument("--hardware", help="a name of the table of devices, such as h100-sxm")
    parser.add_argument("--devices", type=int, help="the number of devices")
    parser.add_argument(
        "--memory", type=bytes_of, help="bytes that each device may hold, such as 72GB (default: 90 %% of its memory)"
    )
    parser.add_argument("--depth", help="the parameter of the function whose default is the number of equal blocks")
    parser.add_argument("--table", help="a TOML file with more devices")
    parser.add_argument(
        "--measure", action="store_true", help="measure matrix products and memory on this machine's device"
    )
    parser.add_argument("--price", type=float, help="the price of one device for an hour")
    parser.add_argument("--top", type=int, help="layouts to show (default: 10)")
    parser.add_argument("--explain", help="sizes such as PP=8,DP=8: explain the seconds and bytes of the best of these")
    parser.add_argument(
        "--save", help="write the plan of the best layout as JSON; with --best, of the best that the compiler lets fit"
    )
    command.add_options(parser)
    parser.set_defaults(run=_quote)


def _quote(options: argparse.Namespace) -> int:
    check_output("--save", options.save)
    check_output("--json", options.json)
    if options.compile is not None:
        refuse_given(options, _OF_A_QUOTE, "not with --compile, which names the devices and asks their compiler.")
        return command.run(options)
    refuse_given(options, command.OPTIONS, "for --compile alone, such as --compile h100-sxm:8x8 --best 3.")
    if options.hardware is None or options.devices is None:
        raise ValueError(
            "a quote needs --hardware and --devices, such as --hardware h100-sxm --devices 64. Or ask a compiler: "
            "--compile h100-sxm:8x8 --best 3."
        )
    device = device_named(options.hardware, options.table)
    if options.price is not None:
        device = replace(device, price=options.price)
    curves = MeasuredCurves() if options.measure else None
    wanted = None if options.explain is None else explained(options.explain)
    found = quote(
        function_of(options.factory), hardware=device, devices=options.devices, memory=options.memory,
        top=10 if options.top is None else options.top, depth=options.depth, wanted=wanted, curves=curves,
    )  # fmt: skip
    print(found if wanted is None else found.explain())
    if options.measure:
        print(f"products and memory: as measured on {jax.devices()[0].device_kind}; links: of {device.name}")
    if options.save:
        print(f"wrote {found.plan().save(options.save)}")
    return 0
