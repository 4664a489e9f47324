"""FSDP once per step: the collectives and bytes of a step, counted, and its time over gathering in every microbatch.

python benchmarks/fsdp.py --fsdp 2

Collectives are counted in the compiled tasks, each as often as it runs; bytes are those of a collective's results on
one device. On CPU a collective costs little beside its launch: take the ratio of the times for a direction only.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from workload import Contestant, batch, parameters, parser, prepare, race, report, train_step

_COLLECTIVE = re.compile(r" = ([^=]*?)\b(all-reduce|all-gather|reduce-scatter)(?:-start)?\(")
_COMMENT = re.compile(r"/\*.*?\*/")  # a long tuple of types numbers its entries
_ARRAY = re.compile(r"(pred|[a-z]+(\d+))\[([\d,]*)\]")


def collectives(text: str) -> tuple[Counter[str], Counter[str]]:
    """The number of each collective in a compiled task, and the bytes of their results on a device."""
    number: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for types, kind in _COLLECTIVE.findall(_COMMENT.sub("", text)):
        number[kind] += 1
        for _, bits, shape in _ARRAY.findall(types):
            nbytes[kind] += int(bits or 8) // 8 * math.prod(int(n) for n in shape.split(",") if n)
    return number, nbytes


def in_one_step(compiled: Any) -> tuple[Counter[str], Counter[str]]:
    """The same for a step of all ranks, each task as often as it runs."""
    number: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    found = [collectives(executable.as_text()) for executable in compiled.executables.tasks]
    for instruction in compiled.program.instructions:
        if (task := getattr(instruction, "task", None)) is not None:
            number.update(found[task][0])
            nbytes.update(found[task][1])
    return number, nbytes


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--fsdp", type=int, default=2, help="devices that share a stage's parameters")
    flags.add_argument("--schedule", default="1f1b")
    flags.add_argument("--stages-per-rank", type=int, default=1)
    flags.set_defaults(stages=2, blocks=8, width=128, length=64, microbatches=16, batch=8, repeats=5)
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages * arguments.fsdp)

    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from jaxpp_flax import MpmdMesh, mpmd_jit_with_loop
    from jaxpp_flax.schedules import by_name

    ranks, cut = arguments.stages, arguments.stages * arguments.stages_per_rank
    devices = np.array(jax.devices()[: ranks * arguments.fsdp]).reshape(ranks, arguments.fsdp)
    mesh = MpmdMesh(Mesh(devices, ("stage", "fsdp")), "stage")
    step = train_step(cut, by_name(arguments.schedule, cut, ranks))
    params, data = parameters(arguments), batch(arguments)
    specs = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp")
    contestants: dict[str, tuple[Any, Contestant]] = {}
    for fsdp in ("microbatch", "step"):
        function = mpmd_jit_with_loop(step, mesh, in_specs=specs, donate_argnums=0, fsdp=fsdp)
        contestants[fsdp] = function, Contestant(function, params, data)
    race({name: contestant for name, (_, contestant) in contestants.items()}, arguments.repeats)
    rows: list[dict[str, object]] = []
    reference = contestants["microbatch"][1]
    for name, (function, contestant) in contestants.items():
        compiled = function.compile(contestant.params, data)
        number, nbytes = in_one_step(compiled)
        rows.append(
            {
                "fsdp": name,
                "all-gathers": number["all-gather"],
                "reduce-scatters": number["reduce-scatter"],
                "all-reduces": number["all-reduce"],
                "gathered MB": nbytes["all-gather"] / 1e6,
                "reduced MB": (nbytes["reduce-scatter"] + nbytes["all-reduce"]) / 1e6,
                "peak MB of a device": max(a.peak_bytes for a in compiled.memory_analysis()) / 1e6,
                "step over microbatch": contestant.median / reference.median,
            }
        )
    leaves = len(jax.tree.leaves(params))
    report(f"{leaves} sharded leaves, {arguments.microbatches} microbatches: one step", rows, arguments.json)


if __name__ == "__main__":
    main()
