"""The functions that `jaxpp_flax.api` returns: a step, and the step before its tasks are compiled."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from jaxpp_flax.engine import jit as engine
from jaxpp_flax.engine.pipeline import CompiledPipeline, PlacedPipeline

__all__ = ["CompiledApiStep", "PlacedStep", "StepFunction"]


class CompiledApiStep(CompiledPipeline):
    """The engine's compiled step with the text that JaxPP's programs print."""

    @property
    def closed_jaxpr(self) -> str:
        """The program as text, which JaxPP prints in its own form: a line for each task, transfer and deletion."""
        return self.as_text()


class PlacedStep(PlacedPipeline):
    """A step whose work is assigned to ranks, before its tasks are compiled; made by `StepFunction.trace_and_place`.

    Example:
      >>> import functools, jax, jax.numpy as jnp, numpy as np
      >>> import jaxpp_flax.api as jaxpp
      >>> mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")
      >>> forward = jaxpp.mpmd_jit_by_yield(lambda w, x, unread: jaxpp.mark_stage_end(x @ w[0]) @ w[1], mesh)
      >>> matrix = jax.ShapeDtypeStruct((3, 3), jnp.float32)
      >>> placed = forward.trace_and_place([matrix, matrix], matrix, matrix)
      >>> [sorted(sharding.mesh_ids) for sharding in jax.tree.leaves(placed.in_shardings)]
      [[0], [1], [0], []]
      >>> placed.infer_intermediate_shardings().mpmdify()([jnp.eye(3), jnp.eye(3)], jnp.eye(3), jnp.eye(3)).mpmd_idxs
      (1,)
    """

    _compiled_type: ClassVar[type[CompiledPipeline]] = CompiledApiStep

    @property
    def closed_jaxpr(self) -> str:
        """The program as text: a line for each task, transfer and deletion."""
        return self.program.as_text()

    def infer_intermediate_shardings(self) -> PlacedStep:
        """Return this step. The partitions of values between tasks are inferred later, by `mpmdify`."""
        return self

    def mpmdify(self) -> CompiledApiStep:
        """Compile the tasks, each for its rank's devices."""
        return cast("CompiledApiStep", self.compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; the first call compiles it."""
        return self.compiled(*args, **kwargs)


class StepFunction(engine.MpmdFunction):
    """The engine's `MpmdFunction` with JaxPP's placement of idle results, and `trace_and_place`.

    A result is idle if no stage reads it and every rank can compute it without a transfer, such as the count of steps
    or a key. JaxPP keeps an idle result on all ranks; the engine keeps it on rank 0 alone.
    """

    _idle_everywhere: ClassVar[bool] = True
    _placed_type: ClassVar[type[PlacedPipeline]] = PlacedStep

    def compile(self, *args: Any, **kwargs: Any) -> CompiledApiStep:
        """Compile ahead of time, as the engine's function does; the result has `closed_jaxpr`."""
        return cast("CompiledApiStep", super().compile(*args, **kwargs))

    def trace_and_place(self, *args: Any, **kwargs: Any) -> PlacedStep:
        """Trace the step and place it on ranks, without compiling anything.

        The devices of the mesh need not exist: they may come from a `jax.experimental.topologies` description.

        Args:
          *args, **kwargs: arrays, or `jax.ShapeDtypeStruct`s in their place.

        Raises:
          ValueError: if the step does not fit a pipeline.
        """
        return cast("PlacedStep", self.place(*args, **kwargs))
