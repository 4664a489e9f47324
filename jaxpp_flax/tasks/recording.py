"""What is known of the values of an mpmd function while it is traced: the rank and the sharding of each of them.

Users hold ordinary tracers of JAX. A tracer on an Auto mesh knows no mesh, and ranks share one abstract mesh, so the
shardings are kept beside the tracers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.ir import Graph

__all__ = ["Known", "Recording", "not_recording", "recording", "recording_of"]


@dataclass(frozen=True, eq=False)
class Known:
    """A traced value with its rank and its sharding; the value is kept alive, so that no other gets its address."""

    value: Any
    rank: int
    sharding: NamedSharding


@dataclass(eq=False)
class Recording:
    """One trace of an mpmd function.

    `traced` keeps the graphs of tasks: a function that runs for each microbatch is traced once. `copies` are the
    transfers that nobody wrote, by value and target. `waiting` holds the number of each transfer until `done()`.
    """

    mesh: MpmdMesh
    traced: dict[Hashable, tuple[Any, Graph, Any]] = field(default_factory=dict)
    copies: dict[tuple[int, int], Any] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    transfers: int = 0
    _values: dict[int, Known] = field(default_factory=dict)

    def know(self, value: Any, rank: int, sharding: NamedSharding) -> Any:
        """Remember the place of a traced value, and return the value."""
        self._values[id(value)] = Known(value, rank, sharding)
        return value

    def is_of_other_trace(self, value: Any) -> bool:
        """Return whether a transformation inside of the mpmd function (`jax.grad`, `jax.vmap`) has made the value."""
        kinds = {type(known_value.value) for known_value in self._values.values()}
        return bool(kinds) and id(value) not in self._values and type(value) not in kinds

    def of(self, value: Any) -> Known | None:
        """Return what is known of a value; None for a constant, or for a value made outside of tasks."""
        return self._values.get(id(value))


_current: ContextVar[Recording | None] = ContextVar("jaxpp_flax_tasks_recording", default=None)


@contextmanager
def recording(mesh: MpmdMesh) -> Iterator[Recording]:
    """Record the tasks and transfers that are called inside."""
    token = _current.set(record := Recording(mesh))
    try:
        yield record
    finally:
        _current.reset(token)


def recording_of(what: str) -> Recording:
    """Return the present recording.

    Raises:
      RuntimeError: outside of an mpmd function.
    """
    record = _current.get()
    if record is None:
        raise RuntimeError(
            f"{what} was called outside of an mpmd function, where there are no ranks to run on. Call it inside a "
            "function decorated by `@mpmd(mpmd_mesh, in_shardings=...)`, not under `jax.jit`, and not inside a task."
        )
    return record


@contextmanager
def not_recording() -> Iterator[None]:
    """Trace the body of a task, in which no other task may be called."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)
