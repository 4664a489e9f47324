"""What a scheduled task costs beside its arithmetic: a model so small that nothing else is left.

python benchmarks/dispatch.py
python benchmarks/dispatch.py --microbatches 128 --stages 8
"""

from __future__ import annotations

from typing import Any

from workload import (
    Contestant,
    batch,
    block,
    jaxpp,
    ours,
    parameters,
    parser,
    pipelined,
    prepare,
    race,
    report,
    stage_of,
    tasks_in,
    train_step,
)


def pieces(arguments: Any) -> Any:
    """The workload's model and SGD for a loop by hand."""
    import jax
    from by_hand import Pieces

    def forward(stage: int, params: Any, x: Any) -> Any:
        for p in params:
            x = block(p, x)
        return x

    def split(params: Any) -> list[Any]:
        stages = [stage_of(i, len(params), arguments.stages) for i in range(len(params))]
        return [[p for p, of in zip(params, stages, strict=True) if of == s] for s in range(arguments.stages)]

    return Pieces(
        split=split,
        merge=lambda parts: [p for part in parts for p in part],
        params_of=lambda part: part,
        forward=forward,
        loss=lambda y, x: (y * y).mean(),
        update=lambda part, grads: jax.tree.map(lambda p, g: p - 0.01 * g / arguments.microbatches, part, grads),
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
        "a loop written by hand": Contestant(
            hand_written_step(pieces(arguments), schedule, arguments.microbatches), params, data
        ),
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
