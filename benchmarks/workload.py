"""What the benchmarks share: a transformer in plain JAX, steps by three means, and honest timing.

Every figure is a ratio to plain `jax.jit` on one device, taken in the same process, the contestants in turn, medians.
Devices are set up before JAX is imported, so `prepare` comes first in every benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def parser(description: str) -> argparse.ArgumentParser:
    """The flags that all benchmarks take."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--platform", default="cpu", choices=["cpu", "gpu", "tpu"])
    flags.add_argument("--devices", type=int, help="virtual CPU devices; 1 holds all ranks, as one GPU does")
    flags.add_argument("--stages", type=int, default=4)
    flags.add_argument("--microbatches", type=int, default=64)
    flags.add_argument("--blocks", type=int, default=None, help="default: one for each stage")
    flags.add_argument("--width", type=int, default=16)
    flags.add_argument("--length", type=int, default=8)
    flags.add_argument("--batch", type=int, default=1, help="examples in a microbatch")
    flags.add_argument("--repeats", type=int, default=20)
    flags.add_argument("--json", default=None, help="also write the rows to this file")
    return flags


def prepare(arguments: argparse.Namespace, devices: int) -> None:
    """Choose the platform, with virtual devices on CPU. Before JAX is imported."""
    if "jax" in sys.modules:
        raise RuntimeError("jax is already imported: call prepare() first")
    os.environ["JAX_PLATFORMS"] = {"gpu": "cuda"}.get(arguments.platform, arguments.platform)
    if arguments.platform == "cpu":
        flag = f"--xla_force_host_platform_device_count={arguments.devices or devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def use_cache(directory: str | None) -> None:
    """Let JAX keep every executable in a directory, if there is one."""
    import jax

    if directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def ours() -> Any:
    """This library, under the names of JaxPP's interface."""
    import jaxpp_flax.api

    return jaxpp_flax.api


def jaxpp() -> Any:
    """JaxPP, which has the same interface, or None where it is not installed."""
    try:
        return importlib.import_module("jaxpp.api")
    except ImportError:
        return None


def devices_of(ranks: int) -> Any:
    """A `jax.sharding.Mesh` of one device for each rank; on a machine with fewer devices, several ranks on one."""
    import jax
    import numpy as np

    devices = jax.devices()
    return jax.sharding.Mesh(np.array([devices[rank % len(devices)] for rank in range(ranks)]), ("stage",))


def mesh(ranks: int, library: Any = None) -> Any:
    """The devices of the ranks, for a step of this library or of another with its interface."""
    return (library or ours()).MpmdMesh(devices_of(ranks), "stage")


def block(p: Mapping[str, Any], x: Any) -> Any:
    """A transformer block: attention of one head, and a feed-forward layer."""
    import jax

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    y = norm(x, p["n1"])
    q, k, v = y @ p["q"], y @ p["k"], y @ p["v"]
    x = x + jax.nn.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5) @ v @ p["o"]
    return x + jax.nn.gelu(norm(x, p["n2"]) @ p["up"]) @ p["down"]


def parameters(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The blocks' parameters, float32."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    w = arguments.width

    def make(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * np.float32(shape[0] ** -0.5))

    return [
        {
            **{name: make(w, w) for name in "qkvo"},
            "up": make(w, 4 * w),
            "down": make(4 * w, w),
            "n1": jnp.ones(w),
            "n2": jnp.ones(w),
        }
        for _ in range(arguments.blocks or arguments.stages)
    ]


def batch(arguments: argparse.Namespace) -> Any:
    """(microbatches, batch, length, width), float32."""
    import jax.numpy as jnp
    import numpy as np

    shape = (arguments.microbatches, arguments.batch, arguments.length, arguments.width)
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


def stage_of(index: int, blocks: int, stages: int) -> int:
    """The stage of a block, split evenly."""
    return index * stages // blocks


def loss(params: Sequence[Mapping[str, Any]], x: Any, stages: int, library: Any) -> Any:
    """Mean square of the last block's output; a mark after each stage but the last."""
    for i, p in enumerate(params):
        x = block(p, x)
        if i + 1 < len(params) and stage_of(i + 1, len(params), stages) != stage_of(i, len(params), stages):
            x = library.mark_stage_end(x)
    return (x * x).mean()


def train_step(stages: int, schedule: Any, library: Any = None) -> Callable[..., Any]:
    """Gradient accumulation and SGD: runs under plain `jax.jit` and as a pipeline of `library`."""
    import jax

    library = library or ours()

    def step(params: Any, batch: Any) -> Any:
        gradient = jax.value_and_grad(loss)
        losses, grads = library.treduce(lambda x: gradient(params, x, stages, library), batch, schedule=schedule)
        return jax.tree.map(lambda p, g: p - 0.01 * g / batch.shape[0], params, grads), losses

    return step


def operations(arguments: argparse.Namespace) -> float:
    """Operations of a step that the model needs: two for each multiplication, backward twice forward."""
    w, tokens = arguments.width, arguments.microbatches * arguments.batch * arguments.length
    return 3.0 * tokens * (arguments.blocks or arguments.stages) * (24 * w * w + 4 * arguments.length * w)


def peak_operations() -> float | None:
    """The data sheet's operations a second of a float32 product (on NVIDIA: TF32); None if the device is not known."""
    import jax

    from jaxpp_flax.planning.quoting.devices import device_named

    known = {"H100": "h100-sxm", "H200": "h200", "A100": "a100-80", "B200": "b200"}
    found = [device_named(name) for part, name in known.items() if part in jax.devices()[0].device_kind]
    return found[0].peak_of("float32") if found else None


def tasks_in(schedule: Any, microbatches: int) -> int:
    """Scheduled tasks, a fused one counted as the two that it stands for (as peers count)."""
    return sum(2 if str(t).startswith("FusedTask") else 1 for rank in schedule.tasks(microbatches) for t in rank)


def pipelined(name: str, stages: int, ranks: int, library: Any) -> Callable[..., Any]:
    """The train step as a pipeline of `library`, under its own schedule of that class name."""
    arguments = (stages, ranks) if name.startswith("Interleaved") else (stages,)
    schedule = getattr(library, name)(*arguments)
    step = train_step(stages, schedule, library)
    return library.mpmd_jit_with_loop(step, mpmd_mesh=mesh(ranks, library), donate_argnums=(0,))


def wait(tree: Any) -> None:
    """Until every array of a tree is computed."""
    import jax

    for leaf in jax.tree.leaves(tree):
        leaf.block_until_ready()


class Contestant:
    """A step that trains on its own copy of the parameters."""

    def __init__(self, step: Callable[..., Any], params: Any, data: Any) -> None:
        import jax
        import jax.numpy as jnp

        self.step, self.data = step, data
        self.params = jax.tree.map(jnp.array, params)
        self.seconds: list[float] = []

    def run(self) -> None:
        """One step, to its end."""
        self.params, losses = self.step(self.params, self.data)
        wait((self.params, losses))

    def time(self) -> None:
        """One timed step."""
        start = time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.seconds)


def race(contestants: Mapping[str, Contestant], repeats: int) -> None:
    """Time the contestants in turn, so that a noisy machine is noisy for all."""
    for contestant in contestants.values():
        contestant.run()
        contestant.run()
    for _ in range(repeats):
        for contestant in contestants.values():
            contestant.time()


def report(title: str, rows: Sequence[Mapping[str, Any]], path: str | None) -> None:
    """A table, and the same as JSON."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right" if not isinstance(rows[0][column], str) else "left")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)
    print(json.dumps({"title": title, "rows": list(rows)}))
    if path:
        with open(path, "w") as file:
            json.dump({"title": title, "rows": list(rows)}, file, indent=1)
