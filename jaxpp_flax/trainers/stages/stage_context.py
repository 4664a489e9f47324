"""What JAX sees while a function is traced that stages run: the mesh of a stage, axis names, types of arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
from flax import linen as nn
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxpp_flax._compat_texts.errors import names_mesh
from jaxpp_flax.engine.arrays.ambient_mesh import trace_for_stages
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.trainers.data.batch import shape_of
from jaxpp_flax.trainers.errors import MeshError
from jaxpp_flax.trainers.mesh import batch_spec, inner_sizes
from jaxpp_flax.trainers.model.sharding import AxisRules
from jaxpp_flax.trainers.state.train_state import TrainState

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """The mesh of a trainer, the specs of its state's annotated leaves (see `state_specs`), and its axis rules.

    A model that names axes (`reshard`, `with_sharding_constraint`, `shard_map`) can be traced only where JAX sees them.

    Example:
      >>> from jaxpp_flax.trainers.mesh import build_mesh
      >>> import jax.numpy as jnp
      >>> state = TrainState(step=jnp.int32(0), params={"w": jnp.ones(2)}, opt_state=(), model_state={})
      >>> stage = StageContext(mesh=build_mesh(2, {"data": 2}))
      >>> stage.trace(lambda state, batch: jax.sharding.get_abstract_mesh().shape["data"], state, jnp.ones((4, 2)))
      2
    """

    mesh: MpmdMesh | None
    specs: TrainState | None = None
    rules: AxisRules = field(default_factory=AxisRules)

    def axis_rules(self) -> AbstractContextManager[None]:
        """Return the context in which Flax knows the meanings of axis names."""
        return nullcontext() if self.mesh is None else nn.logical_axis_rules(self.rules.on(inner_sizes(self.mesh)))

    def trace(self, function: Callable[[TrainState, Any], T], state: TrainState, read: Any, specs: Any = None) -> T:
        """Call a function that traces, with the types of what inference reads of a state, and of what else is read.

        Both may be arrays or shapes. `specs` are those of `read` on a rank; without them it is a microbatch.
        """
        state, read = jax.tree.map(shape_of, (state.for_inference(), read))
        if self.mesh is None:
            return _traced_without_mesh(function, state, read)
        with self.axis_rules():
            return trace_for_stages(lambda mesh: function(*self._typed(mesh, state, read, specs)), self.mesh)

    def _typed(self, seen: AbstractMesh, state: TrainState, read: Any, of_read: Any) -> tuple[TrainState, Any]:
        """Add the partitions to the types, on a mesh with Explicit axes."""
        mesh = self.mesh
        if mesh is None or not mesh.is_explicit:
            return state, read

        def typed(leaf: Any, spec: PartitionSpec | None) -> Any:
            return leaf.update(sharding=NamedSharding(seen, PartitionSpec() if spec is None else spec))

        specs = self.specs or jax.tree.map(lambda _: None, state)
        params = jax.tree.map(typed, state.params, specs.params)
        model_state = jax.tree.map(typed, state.model_state, specs.model_state)
        state = replace(state, step=typed(state.step, None), params=params, model_state=model_state)
        if of_read is None:  # `batch_spec` has one entry more, for the axis of microbatches
            of_read = jax.tree.map(lambda x: PartitionSpec(*batch_spec(mesh, x.ndim + 1)[1:]), read)
        return state, jax.tree.map(typed, read, of_read)


def _traced_without_mesh(function: Callable[[TrainState, Any], T], state: TrainState, read: Any) -> T:
    """Call a function that traces; refuse a model that names axes of a mesh."""
    try:
        return function(state, read)
    except (RuntimeError, ValueError) as error:
        if not names_mesh(error):
            raise
        raise MeshError(
            f"the model names axes of a mesh, but one stage on one device has none, and a mesh of jax.set_mesh around "
            f"the trainer has no effect: {error} Name the axes, such as mesh={{'data': 1}}: then the step is traced "
            "under a mesh that has them."
        ) from error
