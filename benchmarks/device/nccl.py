"""NCCL and CUDA through CuPy beside JAX, as far as one device can tell: what `NcclTransport` relies on.

Each fact is told as soon as it is known, and one that fails leaves the others alone. The last ones may hang: the
program then ends by its caller's deadline.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import workload

# Keeps a device busy for a number of its clock's ticks.
SPIN = 'extern "C" __global__ void spin(long long ticks) { long long s = clock64(); while (clock64() - s < ticks); }'
SECOND = 1_500_000_000  # ticks, about


def tell(fact: str, find: Callable[[], dict[str, object]]) -> None:
    """Report what `find` returns, or its error."""
    start = time.perf_counter()
    try:
        found = find()
    except Exception as error:
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    workload.report("NCCL by CuPy", [{"fact": fact, **found, "seconds": time.perf_counter() - start}], None)


class Facts:
    """The facts, in the order in which they are asked for."""

    def __init__(self) -> None:
        from jaxpp_flax.engine.runtime.transport.cupy_nccl import Cupy, load_cupy

        self.cupy, self.nccl = load_cupy()
        self.ours = Cupy()
        self.spin = self.cupy.RawKernel(SPIN, "spin")

    def alone(self) -> Any:
        """A communicator of this process by itself."""
        return self.nccl.NcclCommunicator(1, self.nccl.get_unique_id(), 0)

    def versions(self) -> dict[str, object]:
        from jaxpp_flax.engine.runtime.transport.cupy_nccl import nccl_version

        driver = self.cupy.cuda.runtime.driverGetVersion()
        return {"cupy": self.cupy.__version__, "nccl": ".".join(map(str, nccl_version(self.nccl))), "driver": driver}

    def names(self) -> dict[str, object]:
        return {"bytes of a name": len(self.ours.unique_id()), "type": type(self.nccl.get_unique_id()).__name__}

    def to_itself(self) -> dict[str, object]:
        """Send from XLA's memory into a buffer as `recv` takes it, on a side stream, in one group."""
        import jax
        import jax.numpy as jnp

        communicator, stream = self.alone(), self.cupy.cuda.Stream(non_blocking=True)
        value = jnp.arange(1 << 24, dtype=jnp.float32)
        value.block_until_ready()
        begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        times: list[float] = []
        for _ in range(5):
            buffer = self.ours.empty(value.nbytes, jax.devices()[0])
            begin.record(stream)
            self.nccl.groupStart()
            communicator.send(value.unsafe_buffer_pointer(), value.nbytes, self.nccl.NCCL_UINT8, 0, stream.ptr)
            communicator.recv(buffer.pointer, value.nbytes, self.nccl.NCCL_UINT8, 0, stream.ptr)
            self.nccl.groupEnd()
            end.record(stream)
            stream.synchronize()
            times.append(self.cupy.cuda.get_elapsed_time(begin, end) / 1e3)
        same = bool((buffer.as_jax().view(jnp.float32) == value).all())
        communicator.check_async_error()
        communicator.destroy()
        return {"equal": same, "GB/s": value.nbytes / min(times) / 1e9}

    def exchange(self) -> dict[str, object]:
        """The same memory under both libraries, without a copy."""
        import jax
        import jax.numpy as jnp

        value = jnp.arange(1024.0)
        there = self.cupy.from_dlpack(value)
        back = jax.dlpack.from_dlpack(self.cupy.arange(1024, dtype="float32"))
        return {
            "to CuPy: same memory": there.data.ptr == value.unsafe_buffer_pointer(),
            "to JAX: equal": bool((back == value).all()),
        }

    def life(self) -> dict[str, object]:
        """A buffer of CuPy's that both libraries have dropped while a kernel of JAX's has yet to read it."""
        import jax
        import jax.numpy as jnp

        def slow(x: Any, y: Any) -> Any:
            return jax.lax.fori_loop(0, 200, lambda _, a: a @ y, jnp.eye(2048)).sum() * 0 + x.sum()

        step, y = jax.jit(slow), jnp.eye(2048)
        wrong = 0
        for trial in range(5):
            held = self.cupy.full(1 << 24, float(trial), dtype="float32")
            self.cupy.cuda.Device().synchronize()
            x = jax.dlpack.from_dlpack(held)
            result = step(x, y)
            del held, x
            self.cupy.full(1 << 24, -1.0, dtype="float32")  # takes the memory if the pool has it back
            wrong += float(result) != trial * float(1 << 24)
        return {"wrong of 5": wrong}

    def pressure(self) -> dict[str, object]:
        """Buffers of CuPy's pool while XLA's allocator is nearly full; then more than is left: it must be refused."""
        import jax
        import jax.numpy as jnp

        stats = jax.devices()[0].memory_stats() or {}
        free = stats["bytes_limit"] - stats["bytes_in_use"]
        filled = [jnp.ones((1 << 28) // 4, jnp.float32) for _ in range(int(0.8 * free) >> 28)]
        jax.block_until_ready(filled)
        left = self.cupy.cuda.runtime.memGetInfo()[0]
        buffers = [self.ours.empty(1 << 26, jax.devices()[0]) for _ in range(max(0, min(16, (left >> 26) - 2)))]
        refused = ""
        try:
            buffers.append(self.ours.empty(left * 2, jax.devices()[0]))
        except Exception as error:
            refused = type(error).__name__
        lives = bool((filled[0] + 1 == 2).all()) if filled else ""
        buffers.clear()
        self.cupy.get_default_memory_pool().free_all_blocks()
        return {
            "GB of XLA's limit": stats["bytes_limit"] / 1e9, "GB filled": len(filled) * 2**28 / 1e9,
            "GB left for CuPy": left / 1e9, "beyond it": refused, "JAX lives": lives,
        }  # fmt: skip

    def abort(self) -> dict[str, object]:
        """Abort a communicator whose work waits behind a kernel of seconds."""
        import jax.numpy as jnp

        communicator, stream = self.alone(), self.cupy.cuda.Stream(non_blocking=True)
        into = self.cupy.zeros(1 << 20, dtype="float32")
        with stream:
            self.spin((1,), (1,), (3 * SECOND,))
        communicator.allReduce(
            into.data.ptr, into.data.ptr, into.size, self.nccl.NCCL_FLOAT32, self.nccl.NCCL_SUM, stream.ptr
        )
        waiting = self.cupy.cuda.runtime.streamQuery(stream.ptr)
        start = time.perf_counter()
        communicator.abort()
        aborted = time.perf_counter() - start
        status = self.cupy.cuda.runtime.streamQuery(stream.ptr)
        return {
            "status before": int(waiting), "s to abort": aborted, "status after": int(status),
            "JAX lives": float(jnp.ones(8).sum()) == 8,
        }  # fmt: skip

    def other_end(self) -> dict[str, object]:
        """Join a communicator of two whose other end never comes: it must leave the rest of the process alone."""
        import jax.numpy as jnp

        joined = threading.Event()

        refused: list[str] = []

        def join() -> None:
            try:
                self.nccl.NcclCommunicator(2, self.nccl.get_unique_id(), 0)
            except Exception as error:
                refused.append(f"{type(error).__name__}: {error}"[:300])
            joined.set()

        threading.Thread(target=join, daemon=True).start()
        waits = not joined.wait(3.0)
        return {"waits": waits, "refused": "".join(refused), "JAX lives": float(jnp.ones(8).sum()) == 8}


def main() -> None:
    arguments = workload.parser(__doc__ or "").parse_args()
    workload.prepare(arguments, 1)
    try:
        facts = Facts()
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        workload.report("NCCL by CuPy", [{"fact": "it loads", "failed": reason}], None)
        return
    for name in ("versions", "names", "exchange", "to_itself", "life", "pressure", "abort", "other_end"):
        tell(name.replace("_", " "), getattr(facts, name))
    sys.stdout.flush()
    os._exit(0)  # a thread may still be inside NCCL, which no exit of Python's waits for


if __name__ == "__main__":
    main()
