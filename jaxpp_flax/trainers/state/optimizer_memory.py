"""The memory kind of the optimizer's state: which leaves lie on the host between steps, and how they get there."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.arrays.memory_kinds import SPACES
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.engine.tracing.memory import in_memory
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["ON_DEVICES", "OptimizerMemory", "default_place", "fetched", "put_back"]


@dataclass(frozen=True)
class OptimizerMemory:
    """The memory kind of the optimizer's arrays between steps; None: the devices' own memory.

    Single numbers stay on the devices: they cost nothing there, and several ranks may read them.

    Example:
      >>> memory = OptimizerMemory("pinned_host")
      >>> memory.kind_of(jax.ShapeDtypeStruct((2,), "float32")), memory.kind_of(jax.ShapeDtypeStruct((), "int32"))
      ('pinned_host', None)
    """

    kind: str | None = None

    def kind_of(self, leaf: Any) -> str | None:
        """Return the memory kind of a leaf of the optimizer's state; None for device memory."""
        return None if self.kind in (None, "device") or math.prod(leaf.shape) == 1 else self.kind

    def described(self, state: TrainState) -> TrainState:
        """Return a state in which the optimizer's leaves are shapes with their memory, unless they lie on ranks.

        A shape that belongs to no rank yet is one of the default device: a pipelined step reads its memory alone.
        """

        def one(leaf: Any) -> Any:
            if self.kind_of(leaf) is None or isinstance(getattr(leaf, "sharding", None), MpmdSharding):
                return leaf
            place, is_weak = default_place(self.kind_of(leaf)), getattr(leaf, "weak_type", False)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place, weak_type=is_weak)

        return replace(state, opt_state=jax.tree.map(one, state.opt_state))

    def traced(self, state: TrainState) -> TrainState:
        """Return shapes in which the optimizer's leaves have their memory in a trace."""

        def one(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=in_memory(None, self.kind_of(leaf)))

        return replace(state, opt_state=jax.tree.map(one, state.opt_state))


ON_DEVICES = OptimizerMemory()


def default_place(kind: str | None = None) -> SingleDeviceSharding:
    """Return the place of a state without ranks: this process's first device, in a kind of memory."""
    return SingleDeviceSharding(jax.local_devices()[0], memory_kind=kind)


def fetched(tree: Any) -> Any:
    """Return a tree of a step's values with those on the host moved to the devices.

    Example:
      >>> from jax.sharding import SingleDeviceSharding
      >>> host = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
      >>> jax.jit(fetched)([jax.device_put(jax.numpy.ones(2), host)])[0].sharding.memory_kind
      'device'
    """
    return jax.tree.map(
        lambda x: x if memory_kind_of(jax.typeof(x)) is None else jax.device_put(x, jax.memory.Space.Device), tree
    )


def put_back(tree: Any, memory: OptimizerMemory) -> Any:
    """Return a tree of a step's values with each leaf in the memory where it lies between steps."""

    def one(leaf: Any) -> Any:
        kind = memory.kind_of(leaf)
        return leaf if kind is None else jax.device_put(leaf, SPACES[kind])

    return jax.tree.map(one, tree)
