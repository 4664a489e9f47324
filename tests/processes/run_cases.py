"""Run by `test_equal.py` as several processes: every case of a group, compared with plain `jax.jit`.

Usage: run_cases.py GROUP
"""

from __future__ import annotations

import faulthandler
import sys
import time
from typing import Any

from tests.processes.running import join_run

join_run()

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax.engine.array import MpmdArray  # noqa: E402
from jaxpp_flax.engine.coordination import process_group  # noqa: E402
from jaxpp_flax.engine.jit import mpmd_jit_with_loop  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402
from tests.processes.cases import GROUPS, STEPS, Case  # noqa: E402


def is_key(leaf: Any) -> bool:
    """Whether it holds PRNG keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_host(leaf: Any) -> np.ndarray:
    """Its values; of a PRNG key, its integers."""
    if is_key(leaf):
        leaf = jax.random.key_data(jax.numpy.asarray(leaf))
    return np.asarray(leaf)


def compare(case: Case) -> None:
    """Fail where what this process has of the results differs from plain `jax.jit`."""
    # Copies: the state is donated.
    host = jax.tree.map(lambda x: jax.random.wrap_key_data(on_host(x).copy()) if is_key(x) else np.array(x), case.state)
    # Sums of float32 in another order; bfloat16 between stages magnifies that.
    rtol = 1e-5 if "odd" in case.name else 1e-6
    donated = (0,) if case.donate else ()
    run = mpmd_jit_with_loop(
        lambda state, batch: case.step(state, batch, case.schedule),
        case.mesh,
        in_specs=case.in_specs,
        donate_argnums=donated,
    )
    plain = jax.jit(lambda state, batch: case.step(state, batch, None))
    state, expected = host, case.state
    compared = 0
    for _ in range(STEPS):
        state, outputs = run(state, case.batch)
        expected, wanted = plain(expected, case.batch)
    for (path, leaf), want in zip(
        jax.tree_util.tree_leaves_with_path((state, outputs)), jax.tree.leaves((expected, wanted)), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert isinstance(leaf, MpmdArray), name
        if not leaf.shape:
            assert leaf.is_partially_addressable, f"{name} is a scalar, which every process gets"
        if not leaf.is_partially_addressable:
            continue
        for part in leaf._parts.values():
            for shard in part.addressable_shards:
                # Sums of float32 in another order; with bfloat16 between stages, one rounding is 4e-3.
                tree_allclose(on_host(shard.data), on_host(want)[shard.index], rtol=rtol)
        compared += 1
    assert compared, "nothing of the results is in this process"
    print(f"case {case.name}: {compared} leaves equal", flush=True)


def num_live_arrays() -> int:
    """How many arrays this process holds, once those that are on their way have come and been given back."""
    process_group().barrier("the end of some steps", 60.0)
    before, now = -1, len(jax.live_arrays())
    while now != before:
        time.sleep(0.3)  # many looks of the thread that follows receives
        before, now = now, len(jax.live_arrays())
    return now


def check_nothing_is_kept(case: Case) -> None:
    """Fail where arrays that were sent or received stay: at least one more for each step."""
    run = mpmd_jit_with_loop(
        lambda state, batch: case.step(state, batch, case.schedule), case.mesh, in_specs=case.in_specs, donate_argnums=0
    )
    state, counts, steps = case.state, list[int](), 30
    for _ in range(2):
        for _ in range(steps):
            state, outputs = run(state, case.batch)
        jax.block_until_ready((state, outputs))
        counts.append(num_live_arrays())
    assert counts[1] < counts[0] + steps, f"{counts} arrays are alive after {steps} and after {2 * steps} steps"


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    for case in GROUPS[sys.argv[1]](jax.process_count()):
        print(f"begin {case.name}", flush=True)
        compare(case)
        if case.name == "chain-1f1b":
            check_nothing_is_kept(case)
    print("all cases done", flush=True)


main()
