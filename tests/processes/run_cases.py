"""Run by `test_equal_to_plain.py` as several processes: cases of a group, compared with plain `jax.jit`.

Usage: run_cases.py GROUP NAMES; the names are JSON.
"""

from __future__ import annotations

import faulthandler
import json
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.processes.running import join_run

# Collectives of a rank's devices are compiled as for users, and the rest quickly.
join_run(optimized=sys.argv[1] == "two")

import jax  # noqa: E402
import numpy as np  # noqa: E402

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray  # noqa: E402
from jaxpp_flax.engine.jit import mpmd_jit_with_loop  # noqa: E402
from jaxpp_flax.engine.pipeline import CompiledPipeline  # noqa: E402
from jaxpp_flax.engine.program.program import Run  # noqa: E402
from jaxpp_flax.processes import process_group  # noqa: E402
from tests.helpers import tree_allclose  # noqa: E402
from tests.processes.cases import GROUPS, NAMES, STEPS, Case  # noqa: E402


def is_key(leaf: Any) -> bool:
    """Whether it holds PRNG keys."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_host(leaf: Any) -> np.ndarray:
    """Its values; of a PRNG key, its integers."""
    if is_key(leaf):
        leaf = jax.random.key_data(jax.numpy.asarray(leaf))
    return np.asarray(leaf)


def write_expected(cases: Iterable[Case], folder: Path) -> None:
    """Run cases under plain `jax.jit`, and write what comes out, as NumPy's values."""
    for case in cases:
        plain = jax.jit(lambda state, batch, case=case: case.step(state, batch, None))
        expected = case.state
        for _ in range(STEPS):
            expected, wanted = plain(expected, case.batch)
        leaves = [on_host(leaf) for leaf in jax.tree.leaves((expected, wanted))]
        (folder / case.name).write_bytes(pickle.dumps(leaves))


def compare(case: Case, expected: list[np.ndarray]) -> None:
    """Fail where what this process has of the results differs from plain `jax.jit`."""
    # Copies: the state is donated.
    state = jax.tree.map(
        lambda x: jax.random.wrap_key_data(on_host(x).copy()) if is_key(x) else np.array(x), case.state
    )
    rtol = 1e-5  # float32: three steps add in another order, and differ by a few last bits of a leaf's largest value
    donated = (0,) if case.donate else ()
    run = mpmd_jit_with_loop(
        lambda state, batch: case.step(state, batch, case.schedule),
        case.mesh,
        in_specs=case.in_specs,
        donate_argnums=donated,
        residuals=case.residuals,
        fsdp=case.fsdp,
    )
    if case.fsdp == "step":
        check_collectives(case, run.compile(state, case.batch))
    for _ in range(STEPS):
        state, outputs = run(state, case.batch)
    compared = 0
    for (path, leaf), want in zip(jax.tree_util.tree_leaves_with_path((state, outputs)), expected, strict=True):
        name = jax.tree_util.keystr(path)
        assert isinstance(leaf, MpmdArray), name
        if not leaf.shape:
            assert leaf.is_partially_addressable, f"{name} is a scalar, which every process gets"
        if not leaf.is_partially_addressable:
            continue
        for part in leaf._parts.values():
            for shard in part.addressable_shards:
                # Sums of float32 in another order; with bfloat16 between stages, one rounding is 4e-3.
                tree_allclose(on_host(shard.data), want[shard.index], rtol=rtol)
        compared += 1
    assert compared, "nothing of the results is in this process"
    print(f"{case.name}: {compared} leaves equal", flush=True)


def check_collectives(case: Case, compiled: CompiledPipeline) -> None:
    """Fail unless this process gathers each parameter of its stages once in a step, and scatters its gradient once."""
    tasks = compiled.program.tasks
    here = [rank for rank in range(case.mesh.mpmd_dim) if case.mesh.is_local(rank)]
    leaves = len(here) * len(case.state[0])
    for kind in ("all-gather(", "reduce-scatter("):
        found = [
            instruction.microbatch
            for instruction in compiled.program.instructions
            if isinstance(instruction, Run) and tasks[instruction.task].rank in here
            for _ in range(compiled.executables.tasks[instruction.task].as_text().count(f" {kind}"))
        ]
        assert found == [-1] * leaves, f"{case.name}: {kind} of microbatches {found}, for {leaves} leaves"


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


@contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all processes see; process 0 makes it, and removes it."""
    group = process_group()
    made = tempfile.mkdtemp() if jax.process_index() == 0 else ""
    folder = Path(group.exchange("a folder", made.encode(), 120.0)[0].decode())
    yield folder
    if jax.process_index() == 0:
        shutil.rmtree(folder)


def main() -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    group, names = sys.argv[1], json.loads(sys.argv[2])
    cases = {case.name: case for case in GROUPS[group](jax.process_count())}
    assert tuple(cases) == NAMES[group]
    # Each process compiles the reference of its share of the cases.
    with shared_folder() as folder:
        write_expected([cases[name] for name in names[jax.process_index() :: jax.process_count()]], folder)
        process_group().barrier("the references", 120.0)
        references = {name: pickle.loads((folder / name).read_bytes()) for name in names}
        process_group().barrier("the references are read", 120.0)
    for name in names:
        faulthandler.dump_traceback_later(100, exit=True)  # anew for each case
        print(f"begin {name}", flush=True)
        compare(cases[name], references[name])
        if name == "chain-1f1b":
            check_nothing_is_kept(cases[name])
        print(f"passed {name}", flush=True)


main()
