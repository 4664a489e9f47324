"""Time to the first step: trace, compile, run; and how many executables that took.

python benchmarks/compile_time.py
python benchmarks/compile_time.py --microbatches 512      # must not grow
python benchmarks/compile_time.py --cache /tmp/jax_cache  # twice: the second start
"""

from __future__ import annotations

import time

from workload import Contestant, batch, mesh, parameters, parser, prepare, report, train_step


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=64, length=32, microbatches=32, batch=4)
    flags.add_argument("--cache", default=None, help="directory of JAX's persistent compilation cache")
    arguments = flags.parse_args()
    prepare(arguments, max(arguments.stages, 4))
    import jax

    from jaxpp_flax.api import Interleaved1F1B, Std1F1B, mpmd_jit_with_loop

    if arguments.cache:
        jax.config.update("jax_compilation_cache_dir", arguments.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    params, data = parameters(arguments), batch(arguments)
    stages = arguments.stages
    cases = {
        "plain jax.jit": (stages, stages, None),
        "1F1B": (stages, stages, Std1F1B(stages)),
        "interleaved": (2 * stages, stages, Interleaved1F1B(2 * stages, stages)),
    }
    rows: list[dict[str, object]] = []
    plain = 0.0
    for name, (cut, ranks, schedule) in cases.items():
        step = train_step(cut, schedule)
        function = jax.jit(step) if schedule is None else mpmd_jit_with_loop(step, mesh(ranks))
        contestant = Contestant(function, params, data)
        start = time.perf_counter()
        contestant.run()
        seconds = time.perf_counter() - start
        plain = plain or seconds
        compiled = None if schedule is None else function.compile(params, data)
        distinct = compiled.num_lowerings if compiled else 1
        rows.append(
            {
                "contestant": name,
                "seconds to first step": seconds,
                "over plain": seconds / plain,
                "distinct tasks": distinct,
                "executables": compiled.num_executables if compiled else 1,
                "bound: 1.5 plain + 0.3 per task": 1.5 * plain + 0.3 * distinct,
            }
        )
    report(f"time to first step, {arguments.microbatches} microbatches", rows, arguments.json)


if __name__ == "__main__":
    main()
