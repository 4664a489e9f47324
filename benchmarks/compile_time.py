"""Time to the first step: trace, compile, run; how many executables that took, and how many compilations by XLA.

python benchmarks/compile_time.py
python benchmarks/compile_time.py --microbatches 512      # less a second step, it must not grow
python benchmarks/compile_time.py --cache /tmp/jax_cache  # twice: the second start
"""

from __future__ import annotations

import time

from workload import (
    Contestant,
    batch,
    jaxpp,
    ours,
    parameters,
    parser,
    pipelined,
    prepare,
    report,
    train_step,
    use_cache,
)


def main() -> None:
    flags = parser(__doc__ or "")
    flags.set_defaults(blocks=8, width=64, length=32, microbatches=32, batch=4)
    flags.add_argument("--cache", default=None, help="directory of JAX's persistent compilation cache")
    arguments = flags.parse_args()
    prepare(arguments, max(arguments.stages, 4))
    import jax

    use_cache(arguments.cache)
    params, data = parameters(arguments), batch(arguments)
    stages = arguments.stages
    cases = {
        "1F1B": ("Std1F1B", stages, ours()),
        "interleaved": ("Interleaved1F1B", 2 * stages, ours()),
    }
    if (peer := jaxpp()) is not None:
        cases |= {"JaxPP, 1F1B": ("Std1F1B", stages, peer), "JaxPP, interleaved": ("Interleaved1F1B", 2 * stages, peer)}
    functions = {"plain jax.jit": jax.jit(train_step(stages, None))}
    functions |= {name: pipelined(schedule, cut, stages, library) for name, (schedule, cut, library) in cases.items()}
    rows: list[dict[str, object]] = []
    plain = 0.0
    for name, function in functions.items():
        contestant = Contestant(function, params, data)
        start = time.perf_counter()
        contestant.run()
        seconds = time.perf_counter() - start
        start = time.perf_counter()
        contestant.run()
        second = time.perf_counter() - start
        plain = plain or seconds
        ours_compiled = name in cases and cases[name][2] is ours()
        compiled = function.compile(params, data) if ours_compiled else None
        distinct = compiled.compiler.lowerings if compiled else 0
        rows.append(
            {
                "contestant": name,
                "seconds to first step": seconds,
                "over plain": seconds / plain,
                "less a second step": seconds - second,
                "distinct tasks": distinct or "",
                "executables": compiled.compiler.executables if compiled else "",
                "compilations": compiled.compiler.compilations if compiled else "",
                "bound: 1.5 plain + 0.3 per task": 1.5 * plain + 0.3 * distinct if compiled else "",
            }
        )
    report(f"time to first step, {arguments.microbatches} microbatches", rows, arguments.json)


if __name__ == "__main__":
    main()
