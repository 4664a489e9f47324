"""What only a device can decide: products by shape, a call, copies to the host, another way to executables.

Each fact is told as soon as it is known.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import workload


def seconds_of(run: Callable[[], Any], calls: int, trials: int = 5) -> float:
    """Median seconds of a call among `calls` in a row, the last of which is waited for; compiled before."""
    import jax

    jax.block_until_ready(run())
    found: list[float] = []
    for _ in range(trials):
        start = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def products(sizes: list[tuple[int, int, int]]) -> None:
    """Operations a second of matrix products, which a planner's table needs, by shape and number format."""
    import jax
    import jax.numpy as jnp

    kinds = {"bfloat16": (jnp.bfloat16, None), "float32": (jnp.float32, None), "highest": (jnp.float32, "highest")}
    for m, k, n in sizes:
        row: dict[str, object] = {"product": f"{m} x {k} x {n}"}
        for name, (dtype, precision) in kinds.items():
            a, b = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
            product = jax.jit(lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision))
            calls = max(3, min(50, int(2e12 / (2 * m * k * n))))
            row[f"{name} TFLOP/s"] = 2 * m * k * n / seconds_of(lambda f=product, a=a, b=b: f(a, b), calls) / 1e12
        workload.report("matrix products", [row], None)


def calls() -> None:
    """What a call of a jitted function costs on the host, by its number of arrays, each donated and returned."""
    import jax
    import jax.numpy as jnp

    for count in (1, 36, 144):
        step = jax.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)
        held = [[jnp.zeros(8) for _ in range(count)]]

        def run(step: Any = step, held: list[Any] = held) -> Any:
            held[0] = step(held[0])
            return held[0]

        workload.report("calls", [{"call": f"{count} arrays", "µs": seconds_of(run, 200) * 1e6}], None)


def host_copies(nbytes: int, width: int) -> None:
    """Bandwidth to pinned memory of the host and back, alone and beside matrix products."""
    import jax
    import jax.numpy as jnp

    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = here.with_memory_kind("pinned_host")
    value = jax.device_put(jnp.ones(nbytes // 4, jnp.float32), here)
    there = jax.device_put(value, host)
    a = jnp.ones((width, width), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    ways = {"to the host": lambda: jax.device_put(value, host), "from the host": lambda: jax.device_put(there, here)}
    for name, copy in ways.items():
        alone, one = seconds_of(copy, 3), seconds_of(lambda: product(a), 3)
        beside = max(1, round(alone / one))

        def both(copy: Callable[[], Any] = copy, beside: int = beside) -> Any:
            return [copy(), *(product(a) for _ in range(beside))]

        together = seconds_of(both, 1)
        hidden = (alone + beside * one - together) / min(alone, beside * one)
        row = {"copy": name, "GB/s": nbytes / alone / 1e9, "hidden behind products": max(0.0, min(1.0, hidden))}
        workload.report("pinned host memory", [row], None)


def executables() -> None:
    """Seconds to compile a backward, to load its copy from bytes, and to read it from JAX's cache on disk."""
    import tempfile

    import jax
    import jax.numpy as jnp
    from jax.experimental.serialize_executable import deserialize_and_load, serialize

    p = {name: jnp.ones((64, 64)) for name in "qkvo"}
    p |= {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64)), "n1": jnp.ones(64), "n2": jnp.ones(64)}

    def compiled() -> tuple[float, Any]:
        jax.clear_caches()
        lowered = jax.jit(jax.grad(lambda p, x: workload.block(p, x).sum())).lower(p, jnp.ones((4, 64, 64)))
        start = time.perf_counter()
        executable = lowered.compile()
        return time.perf_counter() - start, executable

    with tempfile.TemporaryDirectory() as folder:
        workload.use_cache(folder)
        first, executable = compiled()
        second, _ = compiled()
    start = time.perf_counter()
    deserialize_and_load(*serialize(executable))
    row = {"executable": "backward of a block", "s to compile": first, "s from bytes": time.perf_counter() - start}
    workload.report("executables", [{**row, "s from JAX's cache": second}], None)


def main() -> None:
    flags = workload.parser(__doc__ or "")
    flags.set_defaults(width=4096)
    arguments = flags.parse_args()
    workload.prepare(arguments, 1)
    w = arguments.width
    calls()
    host_copies(2**16 * w, w)
    products([(w // d, w // d, w // d) for d in (16, 8, 4, 2, 1)] + [(w // 8, w, w), (w, w // 8, w), (2 * w, w, w)])
    executables()  # the last: it changes where JAX keeps them


if __name__ == "__main__":
    main()
