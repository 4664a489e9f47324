"""A compiler that refuses a task, too large for its device: the message says which one, and what is large in it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat_xla.refusals import TooLarge, read_refusal
from jaxpp_flax.engine.program.program import ProgramTask
from jaxpp_flax.engine.program.specs import shard_bytes
from jaxpp_flax.error_codes import documented
from jaxpp_flax.messages import amount

__all__ = ["TaskMemoryError", "refusals_named"]

_SHOWN = 5  # buffers


@documented("JPF604")
class TaskMemoryError(RuntimeError):
    """XLA refuses to compile a task: alone, it needs more memory than a device has.

    Attributes:
      rank: the rank whose task it is.
      task: the name of the task, such as "bwd_0".
      excess: the bytes that are missing; None if the compiler does not say.
    """

    def __init__(self, message: str, rank: int = 0, task: str = "", excess: float | None = None) -> None:
        super().__init__(message)
        self.rank, self.task, self.excess = rank, task, excess


@contextmanager
def refusals_named(task: ProgramTask, mesh: Mesh, in_specs: Sequence[PartitionSpec]) -> Generator[None]:
    """Name the rank, the task and its largest buffers in the error of a compiler that refuses it for its size.

    Raises:
      TaskMemoryError: in place of the compiler's error.
    """
    try:
        yield
    except RuntimeError as error:
        refusal = read_refusal(str(error))
        if refusal is None:
            raise
        largest = refusal.largest[:_SHOWN] or _largest_inputs(task, mesh, in_specs)
        over = None if refusal.needed is None or refusal.available is None else refusal.needed - refusal.available
        message = _message(task, mesh.devices.flat[0].device_kind, refusal, over, largest)
        raise TaskMemoryError(message, task.rank, task.name, over) from error


def _message(
    task: ProgramTask, device: str, refusal: TooLarge, over: float | None, largest: Sequence[tuple[float, str]]
) -> str:
    needed, available, missing = (amount(nbytes, "B") for nbytes in (refusal.needed, refusal.available, over))
    size = "" if over is None else f": it needs {needed} of {available}, {missing} too much"
    listed = "; ".join(f"{amount(nbytes, 'B')} {what}".rstrip() for nbytes, what in largest) or "not known"
    return (
        f"rank {task.rank}: the compiler refuses task {task.name}, which does not fit on one {device}{size}. Its "
        f"largest buffers: {listed}. Use more stages, a larger `tensor` or `fsdp` axis, smaller microbatches (more of "
        "them), or `nnx.remat` in the blocks."
    )


def _largest_inputs(task: ProgramTask, mesh: Mesh, in_specs: Sequence[PartitionSpec]) -> list[tuple[float, str]]:
    """Return the largest values that a task reads on a device, for a compiler that does not tell."""
    inputs = list[tuple[float, str]]()
    for value, spec in zip(task.graph.inputs, in_specs, strict=True):
        sharding = NamedSharding(mesh, spec)
        shape = sharding.shard_shape(tuple(value.aval.shape))
        inputs.append((shard_bytes(value.aval, sharding), f"{value.aval.dtype}{list(shape)}, an input"))
    return sorted(inputs, key=lambda pair: -pair[0])[:_SHOWN]
