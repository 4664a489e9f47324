"""The time of a step on a model with real arithmetic, over plain `jax.jit` on one device with all cores.

python benchmarks/step.py
python benchmarks/step.py --platform gpu --width 2048 --length 512
"""

from __future__ import annotations

from workload import Contestant, batch, mesh, parameters, parser, prepare, race, report, train_step


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=256, length=256, microbatches=16, batch=1, repeats=7)
    flags.add_argument("--schedules", nargs="*", default=["1f1b", "interleaved_1f1b", "zero_bubble"])
    arguments = flags.parse_args()
    prepare(arguments, arguments.stages)
    import jax

    from jaxpp_flax.api import mpmd_jit_with_loop
    from jaxpp_flax.schedules import by_name

    params, data = parameters(arguments), batch(arguments)
    ranks = arguments.stages
    contestants = {
        "plain jax.jit, one device": Contestant(jax.jit(train_step(ranks, None), donate_argnums=0), params, data)
    }
    for name in arguments.schedules:
        cut = 2 * ranks if name in ("interleaved_1f1b", "zbv", "dualpipe_v") else ranks
        step = train_step(cut, by_name(name, cut, ranks))
        contestants[name] = Contestant(mpmd_jit_with_loop(step, mesh(ranks), donate_argnums=0), params, data)
    race(contestants, arguments.repeats)
    plain = contestants["plain jax.jit, one device"].median
    tokens = arguments.microbatches * arguments.batch * arguments.length
    rows = [
        {
            "contestant": name,
            "ms per step": c.median * 1e3,
            "over plain": c.median / plain,
            "tokens per second": tokens / c.median,
        }
        for name, c in contestants.items()
    ]
    report(f"step: {arguments.blocks} blocks of width {arguments.width}, {ranks} ranks", rows, arguments.json)


if __name__ == "__main__":
    main()
