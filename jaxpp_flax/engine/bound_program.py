"""A compiled program with its arguments and results: what every front starts and runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.engine.binding import Binding
from jaxpp_flax.engine.runtime.instruction_loop import Runtime
from jaxpp_flax.engine.runtime.measuring.profile import TaskTiming
from jaxpp_flax.engine.runtime.startup import compare_values, start
from jaxpp_flax.engine.runtime.transport.connection import DistributedProgram
from jaxpp_flax.engine.tracing.ir import Constant

__all__ = ["BoundProgram", "array_result"]


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """Runs on flat arguments whose types fit the program; the types are not checked.

    `distributed` is None if all ranks are of this process.
    """

    runtime: Runtime
    binding: Binding
    distributed: DistributedProgram | None

    def start(self, constants: Sequence[Any]) -> None:
        """Connect the processes, and compare the arrays that the function closes over; alone, do nothing."""
        if self.distributed is not None:
            named = {f"constant {i}, {jax.typeof(c)}": c for i, c in enumerate(constants)}
            start(self.distributed, self.runtime.parcels, named)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the program; several processes compare the arguments of the first call."""
        environment = self._environment(leaves)
        self.runtime.run(environment)
        return self.binding.collect(environment)

    def profile(self, leaves: Sequence[Any]) -> tuple[Any, list[TaskTiming]]:
        """Run the program and measure it: return the results, and the times of the loop's tasks on all ranks."""
        environment = self._environment(leaves)
        timings = self.runtime.profile(environment)
        return self.binding.collect(environment), timings

    def _environment(self, leaves: Sequence[Any]) -> list[Any]:
        if self.distributed is not None and not self.binding.calls:
            compare_values(self.distributed, "the arguments", self.binding.in_several_processes(leaves))
        return self.binding.environment(leaves)


def array_result(
    result: Mapping[int, int] | Constant, sharding: NamedSharding | None, aval: Any
) -> Callable[[list[Any]], jax.Array]:
    """Return a function that makes a `jax.Array` from the environment after a run, for a result on one rank.

    As in JAX, an array of other processes has no part here. A constant gets the requested sharding, if there is one.
    """
    if sharding is not None and all(d.process_index != jax.process_index() for d in sharding.device_set):
        shape, dtype = tuple(aval.shape), aval.dtype
        return lambda _: jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    if not isinstance(result, Constant):
        return operator.itemgetter(next(iter(result.values())))
    if sharding is None:
        return lambda _: jnp.asarray(result.value, aval.dtype)
    return lambda _: place(jnp.asarray(result.value, aval.dtype), sharding)
