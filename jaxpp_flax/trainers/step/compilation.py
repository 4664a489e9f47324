"""The compilation of a step, in one place: as a pipeline, or with plain `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from jaxpp_flax.assignment import CutPolicy
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import on_every_process
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.trainers.mesh import batch_spec, inner_sizes, num_batch_shards
from jaxpp_flax.trainers.model.sharding import AxisRules
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["Backend", "copied", "to_ordinary"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The devices of steps: the ranks of `mesh`; without a mesh, JAX's default device under `jax.jit`."""

    mesh: MpmdMesh | None
    state_specs: TrainState | None  # the specs of the state's leaves; see `state_specs`
    rules: AxisRules  # the meanings of logical axis names

    def compile(self, function: Callable[..., Any], state: Any, batch: Any, policy: CutPolicy, *, donate: bool) -> Any:
        """Compile `function(state, batch)` for arguments like these; with `donate` the state's memory is reused.

        `policy` chooses the marks that cut. With several processes, all of them get the function's results other than a
        new state.
        """
        donated = (0,) if donate else ()
        specs = self.state_specs if donate or self.state_specs is None else self.state_specs.for_inference()
        if self.mesh is None:
            jitted = jax.jit(function, donate_argnums=donated)
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                return jitted  # a compiled function would refuse to run operation by operation
            return jitted.lower(state, batch).compile()
        mesh, shards = self.mesh, num_batch_shards(self.mesh)
        # Only inference has batches that data-parallel devices cannot divide evenly: each device computes all of it.
        leaves, structure = jax.tree.flatten(batch)
        is_shared = all(leaf.shape[1] % shards == 0 for leaf in leaves if len(leaf.shape) > 1)
        specs_of_batch = [batch_spec(mesh, len(leaf.shape)) if is_shared else PartitionSpec() for leaf in leaves]
        step = mpmd_jit_with_loop(
            function,
            mesh,
            in_shardings=(specs, jax.tree.unflatten(structure, specs_of_batch)),
            # A step returns the state with the shardings of its input state.
            out_shardings=(specs, None) if donate and specs is not None else None,
            donate_argnums=donated,
            cut_policy=policy,
            everywhere=(False, True) if donate else True,
        )
        with nn.logical_axis_rules(self.rules.on(inner_sizes(mesh))):
            return step.compile(state, batch)


def copied(leaf: Any) -> jax.Array:
    """Return a copy that shares no memory with `leaf`."""
    return jnp.array(leaf, copy=True)


def to_ordinary(tree: Any) -> Any:
    """Copy every leaf to a new `jax.Array` on the default device.

    If the ranks belong to several processes, all of them must call this function.
    """
    device = jax.local_devices()[0]

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, MpmdArray):
            return copied(leaf)
        if leaf.sharding.mpmd_mesh.jax_mesh.is_multi_process:
            return copied(jax.device_put(on_every_process(leaf), device))
        return copied(jax.device_put(leaf.as_jax_array(), device))

    return jax.tree.map(one, tree)
