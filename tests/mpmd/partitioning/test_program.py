"""What the engine's program of an mpmd step says beside its instructions."""

from __future__ import annotations

from typing import Any

import optax
from jax.sharding import PartitionSpec as P

from jaxpp_flax import mpmd
from tests.mpmd.programs import accumulate, batches, config, in_runs, topology, weights


def test_sums_over_microbatches_are_partitioned_as_the_weights_that_they_update():
    """And not as an optimizer's moments, which have the same shape, or as another weight."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))

    def step(ws: Any, state: Any, xs: Any) -> Any:
        total, grads = accumulate(ws, xs)
        updates, state = optimizer.update(grads, state, ws)
        return optax.apply_updates(ws, updates), state, total

    ws, xs = weights(4), batches(2)
    specs = [P(None, "data"), P("data", None), P("data", None), P(None, "data")]
    cfg = config(topology(2, 2), in_runs(4, 2), "ONE_FWD_ONE_BWD")
    lowered = mpmd.jit(step, cfg, in_shardings=(specs, None, None)).lower(ws, optimizer.init(ws), xs)
    made = [task.out_specs for task in lowered.built.program.tasks if task.out_specs]
    assert made == [tuple(specs[:2]), tuple(specs[2:])]
