"""What a scheduled task costs beside its arithmetic: a model so small that nothing else is left.

python benchmarks/dispatch.py
python benchmarks/dispatch.py --microbatches 128 --stages 8
"""

from __future__ import annotations

from workload import (
    Contestant,
    batch,
    jaxpp,
    ours,
    parameters,
    parser,
    pipelined,
    prepare,
    race,
    report,
    tasks_in,
    train_step,
)


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    prepare(arguments, arguments.stages)
    import jax
    from by_hand import hand_written_step

    from jaxpp_flax.schedules import Std1F1B

    stages = arguments.stages
    schedule = Std1F1B(stages)
    params, data = parameters(arguments), batch(arguments)
    contestants = {
        "plain jax.jit, one device": Contestant(jax.jit(train_step(stages, schedule), donate_argnums=0), params, data),
        "jaxpp_flax": Contestant(pipelined("Std1F1B", stages, stages, ours()), params, data),
        "a loop written by hand": Contestant(hand_written_step(arguments, schedule), params, data),
    }
    if (peer := jaxpp()) is not None:
        contestants["JaxPP"] = Contestant(pipelined("Std1F1B", stages, stages, peer), params, data)
    race(contestants, arguments.repeats)
    tasks = tasks_in(schedule, arguments.microbatches)
    plain = contestants["plain jax.jit, one device"].median
    rows = [
        {
            "contestant": name,
            "ms per step": c.median * 1e3,
            "µs per task": c.median / tasks * 1e6,
            "over plain": c.median / plain,
        }
        for name, c in contestants.items()
    ]
    own, hand = contestants["jaxpp_flax"].median, contestants["a loop written by hand"].median
    report(f"dispatch: {tasks} scheduled tasks, {own / hand:.2f} × the loop by hand", rows, arguments.json)


if __name__ == "__main__":
    main()
