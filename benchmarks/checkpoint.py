"""What saving costs a running training, how fast it writes, and what restoring holds in memory.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --megabytes 1024 --leaf-megabytes 64

Three numbers: step time while saving over step time (and how long `save` blocks, over a copy of the state to the
host); bytes written per second over a plain copy of as many bytes on the same disk; the peak of the host's memory
while restoring, above the state's own bytes: into an empty process, in place of a state that is kept until the new
one is whole, and in place of one that is given up once the files are known to be whole (`trainer.restore`).
On CPU the "devices" are the host's memory too, so the state's bytes count once, or twice where both are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
STAGES = 4


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--megabytes", type=int, default=256, help="of the state")
    flags.add_argument("--leaf-megabytes", type=int, default=16)
    flags.add_argument("--repeats", type=int, default=5)
    flags.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    flags.add_argument("--json", type=Path, default=None)
    flags.add_argument("--restore", type=Path, default=None, help=argparse.SUPPRESS)
    flags.add_argument("--over", choices=("nothing", "kept", "released"), default="nothing", help=argparse.SUPPRESS)
    arguments = flags.parse_args()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    if arguments.restore:
        measure_restore(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        rows = measure_save(arguments, Path(root))
    width = max(map(len, rows))
    print(f"checkpoint: {arguments.megabytes} MiB in leaves of {arguments.leaf_megabytes} MiB, {STAGES} stages")
    for name, value in rows.items():
        print(f"  {name:{width}}  {value:10.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def shardings(arguments: argparse.Namespace) -> dict:
    """Leaf by leaf on one stage after another."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    from jaxpp_flax.engine.arrays.mesh import MpmdMesh
    from jaxpp_flax.engine.arrays.mpmd_array import MpmdSharding

    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:STAGES]), ("stage",)), "stage")
    count = arguments.megabytes // arguments.leaf_megabytes
    return {f"leaf_{i}": MpmdSharding(mesh, {i * STAGES // count}, PartitionSpec()) for i in range(count)}


def make_state(arguments: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray

    rng = np.random.default_rng(0)
    size = arguments.leaf_megabytes * MIB // 4
    state = {}
    for name, sharding in shardings(arguments).items():
        rank = sharding.ranks[0]
        value = rng.standard_normal(size, np.float32)
        state[name] = MpmdArray({rank: jax.device_put(value, sharding.local_sharding(rank))}, sharding)
    return state


def measure_save(arguments: argparse.Namespace, root: Path) -> dict[str, float]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpp_flax.checkpoint.checkpoint_store import CheckpointStore

    state = make_state(arguments)
    total = sum(leaf.nbytes for leaf in state.values())
    store = CheckpointStore(root / "run", keep=1)

    @jax.jit
    def step(x):  # a step of some tens of milliseconds, on all ranks
        return jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ y) + x, x)

    inputs = [jax.device_put(jnp.ones((384, 384)) / 384, device) for device in jax.devices()[:STAGES]]

    def one_step() -> float:
        begin = time.perf_counter()
        jax.block_until_ready([step(x) for x in inputs])
        return time.perf_counter() - begin

    for _ in range(3):
        one_step()
    quiet = statistics.median(one_step() for _ in range(20))
    blocked, busy, written, copied, to_host = [], [], [], [], []
    for repeat in range(1, arguments.repeats + 1):
        begin = time.perf_counter()
        for leaf in state.values():
            np.array(leaf, copy=True)
        to_host.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        store.save(repeat, state, {})
        blocked.append(time.perf_counter() - begin)
        while store._manager.is_saving_in_progress():
            busy.append(one_step())
        store.wait()
        begin = time.perf_counter()
        store.save(100 + repeat, state, {}, wait=True)
        written.append(time.perf_counter() - begin)
        files = [path for path in store.path(100 + repeat).rglob("*") if path.is_file()]
        source = max(files, key=lambda path: path.stat().st_size)
        begin, done = time.perf_counter(), 0
        while done < total:
            shutil.copyfile(source, root / "copy")
            done += source.stat().st_size
        with (root / "copy").open("rb") as file:
            os.fsync(file.fileno())
        copied.append((time.perf_counter() - begin) * total / done)
    store.close()
    path = store.path(store.latest())
    command = [sys.executable, __file__, "--restore", str(path)]
    command += ["--megabytes", str(arguments.megabytes), "--leaf-megabytes", str(arguments.leaf_megabytes)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    restored: dict[str, float] = {}
    for over in ("nothing", "kept", "released"):
        done = subprocess.run([*command, "--over", over], env=environment, check=True, stdout=subprocess.PIPE)
        restored |= json.loads(done.stdout)
    median = statistics.median
    return {
        "step, ms": quiet * 1e3,
        "step while saving, over step": median(busy) / quiet,
        "save blocks, ms": median(blocked) * 1e3,
        "save blocks, over a copy to the host": median(blocked) / median(to_host),
        "written, MiB/s": total / MIB / median(written),
        "written, over a plain copy": median(copied) / median(written),
        **restored,
    }


def measure_restore(arguments: argparse.Namespace) -> None:
    """In a process of its own, whose memory holds nothing else than what is restored over."""
    import jax

    from jaxpp_flax.checkpoint.reading import plan_restore, read_whole_metadata

    size = arguments.leaf_megabytes * MIB // 4
    target = {
        name: jax.ShapeDtypeStruct((size,), "float32", sharding=sharding)
        for name, sharding in shardings(arguments).items()
    }
    jax.block_until_ready(jax.device_put(1.0))
    reset_peak()
    before = peak_megabytes()
    if arguments.over != "nothing":
        target = make_state(arguments)
        reset_peak()
    begin = time.perf_counter()
    plan = plan_restore(arguments.restore, read_whole_metadata(arguments.restore), target)
    if arguments.over == "released":
        for leaf in jax.tree.leaves(target):
            leaf.delete()
    restored = plan.read()
    jax.block_until_ready([part for leaf in restored.values() for part in leaf._partially_addressable_arrays.values()])
    seconds = time.perf_counter() - begin
    peak = peak_megabytes() - before
    megabytes = sum(leaf.nbytes for leaf in restored.values()) / MIB
    if arguments.over == "nothing":
        print(json.dumps({"restored, MiB/s": megabytes / seconds, "peak above the state, MiB": peak - megabytes}))
    else:
        print(json.dumps({f"peak above the state, over one {arguments.over}, MiB": peak - megabytes}))


def reset_peak() -> None:
    """The peak begins anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_megabytes() -> float:
    """The most memory this process has held (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    main()
