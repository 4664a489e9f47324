"""Tracing to program for many ranks and microbatches: seconds and instructions, which must grow with the tasks alone.

python benchmarks/scale.py
"""

from __future__ import annotations

import argparse
import time
import tracemalloc

from workload import prepare, report


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--platform", default="cpu")
    flags.add_argument("--ranks", type=int, nargs="*", default=[16, 32, 64])
    flags.add_argument("--microbatches", type=int, nargs="*", default=[64, 256])
    flags.add_argument("--json", default=None)
    flags.set_defaults(devices=1)  # nothing is placed on them
    arguments = flags.parse_args()
    prepare(arguments, 1)
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    from jaxpp_flax.api import Std1F1B, mark_stage_end, treduce
    from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
    from jaxpp_flax.engine.passes import PLACING, WRITING
    from jaxpp_flax.engine.passes.runner import Settings
    from jaxpp_flax.engine.program.program import Program
    from jaxpp_flax.engine.traced import cut_at_every_mark, with_choices
    from jaxpp_flax.engine.traced import prepare as prepared
    from jaxpp_flax.engine.tracing.ir import Graph, from_jaxpr

    def program_of(graph: Graph, ranks: int) -> Program:
        size = len(graph.inputs)
        settings = Settings(
            num_ranks=ranks, donated=[False] * size, specs=[PartitionSpec()] * size, shards=ShardCounts({})
        )
        step = prepared(graph, settings, ())
        choices = with_choices(settings, step, cut_at_every_mark)
        return WRITING.run(PLACING.run(step, choices, ()), choices, ())

    rows: list[dict[str, object]] = []
    for ranks in arguments.ranks:
        for microbatches in arguments.microbatches:

            def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
                for w in ws[:-1]:
                    x = mark_stage_end(jnp.tanh(x @ w))
                return jnp.mean((x @ ws[-1]) ** 2)

            def step(ws: list[jax.Array], batch: jax.Array, ranks: int = ranks, loss: object = loss) -> object:
                grad = jax.value_and_grad(loss)  # type: ignore[arg-type]
                losses, grads = treduce(lambda x: grad(ws, x), batch, Std1F1B(ranks))
                return jax.tree.map(lambda w, g: w - g, ws, grads), losses

            start = time.perf_counter()
            jaxpr = jax.jit(step).trace([jnp.ones((4, 4))] * ranks, jnp.ones((microbatches, 2, 4))).jaxpr
            graph, _ = from_jaxpr(jaxpr)
            program = program_of(graph, ranks)
            seconds = time.perf_counter() - start
            tracemalloc.start()
            again = program_of(graph, ranks)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            tasks = 2 * ranks * microbatches
            rows.append(
                {
                    "ranks": ranks,
                    "microbatches": microbatches,
                    "tasks": tasks,
                    "seconds, trace to program": seconds,
                    "µs per task": seconds / tasks * 1e6,
                    "instructions": len(program.instructions),
                    "bytes held per task": held / tasks,
                }
            )
            del again
    report("scale: 1F1B, one tiny layer for each stage", rows, arguments.json)


if __name__ == "__main__":
    main()
