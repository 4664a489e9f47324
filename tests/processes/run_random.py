"""Run by `test_random.py` as several processes: the programs in a JSON file, each compared with plain `jax.jit`.

Usage: run_random.py FILE
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jaxpp_flax.engine.arrays.mesh import MpmdMesh  # noqa: E402
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray  # noqa: E402
from jaxpp_flax.engine.jit import mpmd_jit_with_loop  # noqa: E402
from jaxpp_flax.engine.tracing.markers import mark_stage_end  # noqa: E402
from jaxpp_flax.engine.tracing.treduce import treduce  # noqa: E402
from jaxpp_flax.schedules import by_name  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402

SECONDS_FOR_ONE = 100


def step_of(program: dict[str, Any], schedule: Any) -> Any:
    """(parameters, batch) -> (new parameters, losses, norm)."""
    skips = [tuple(skip) for skip in program["skips"]]

    def loss(params: Any, mb: Any) -> Any:
        x, kept = mb["x"], {}
        for stage, p in enumerate(params["layers"]):
            if stage:
                x = mark_stage_end(x, f"end_{stage}")
            x = jnp.tanh(x @ p)
            for start, end in skips:
                if end == stage:
                    x = x + jnp.mean(kept[start], axis=-1, keepdims=True).astype(x.dtype)
            kept[stage] = x
            if stage in program["uses_shared"]:
                x = x * (1 + jnp.sum(params["shared"]))
            if program["bfloat16"]:
                x = x.astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.mean((jnp.sum(x, -1) - mb["y"]) ** 2)

    def step(params: Any, batch: Any) -> Any:
        losses, grads = treduce(lambda mb: jax.value_and_grad(loss)(params, mb), batch, schedule)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        scale = 0.1 / (1 + norm) if program["clip"] else 0.1
        return jax.tree.map(lambda p, g: p - scale * g, params, grads), losses, norm

    return step


def run(program: dict[str, Any]) -> None:
    """Fail if what this process has of the results is wrong."""
    rng = np.random.default_rng(program["seed"])
    widths, rows = program["widths"], program["rows"]
    stages = len(widths) - 1
    params = {
        "layers": [rng.normal(size=(a, b)).astype(np.float32) / a**0.5 for a, b in itertools.pairwise(widths)],
        "shared": rng.normal(size=3).astype(np.float32) * 0.1,
    }
    batch = {
        "x": rng.normal(size=(program["microbatches"], rows, widths[0])).astype(np.float32),
        "y": rng.normal(size=(program["microbatches"], rows)).astype(np.float32),
    }
    ranks = jax.device_count()
    mesh = MpmdMesh(Mesh(np.array(jax.devices()), ("stage",)), "stage")
    schedule = by_name(program["schedule"], stages, ranks)
    piped = mpmd_jit_with_loop(step_of(program, schedule), mesh, donate_argnums=0 if program["donate"] else ())
    plain = jax.jit(step_of(program, None))
    actual, expected = jax.tree.map(np.copy, params), params
    for _ in range(program["steps"]):
        actual, *results = piped(actual, batch)
        expected, *wanted = plain(expected, batch)
    for have, want in zip(jax.tree.leaves((actual, results)), jax.tree.leaves((expected, wanted)), strict=True):
        assert isinstance(have, MpmdArray)
        if have.is_partially_addressable:
            # A few steps with sums in another order; rounding to bfloat16 magnifies a difference in the last place.
            tree_allclose(np.asarray(have), np.asarray(want), rtol=1e-2 if program["bfloat16"] else 2e-5, atol=1e-6)


def main() -> None:
    programs = json.loads(Path(sys.argv[1]).read_text())
    for number, program in enumerate(programs):
        print(f"program {number}: {json.dumps(program)}", flush=True)
        faulthandler.dump_traceback_later(SECONDS_FOR_ONE, exit=True)
        run(program)
    print(f"{len(programs)} programs right", flush=True)


main()
