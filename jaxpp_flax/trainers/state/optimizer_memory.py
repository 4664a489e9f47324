"""The memory kind of the optimizer's state: which leaves lie on the host between steps, and how they get there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jaxpp_flax.engine.arrays.memory_kinds import SPACES
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.tracing.ir import memory_kind_of
from jaxpp_flax.trainers.state.train_state import TrainState, is_abstract

__all__ = ["ON_DEVICES", "OptimizerMemory", "fetched", "groups_of_host_leaves", "put_back"]

# Leaves that go to the host are made together up to this number of bytes; a larger leaf is made alone.
_GROUP_BYTES = 256 << 20


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
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=self._here(leaf), weak_type=getattr(leaf, "weak_type", False)
            )

        return replace(state, opt_state=jax.tree.map(one, state.opt_state))

    def on_default_device(self, opt_state: Any) -> Any:
        """Return arrays on the default device, each in its memory."""
        return jax.tree.map(
            lambda leaf: leaf if self.kind_of(leaf) is None else jax.device_put(leaf, self._here(leaf)), opt_state
        )

    def first(self, init: Callable[[Any], Any], params: Any, opt_state: Any) -> Any:
        """Return the first state of the optimizer on the default device, made of the parameters.

        `opt_state` has its shapes, or its values if `init` cannot be traced. What goes to the host is made in groups,
        so that it is never on the device as a whole.
        """
        if self.kind in (None, "device") or not is_abstract(opt_state):
            return self.on_default_device(init(params))
        shapes, tree = jax.tree.flatten(opt_state)
        made: list[Any] = [None] * len(shapes)
        for group in groups_of_host_leaves([self.kind_of(shape) for shape in shapes], shapes):
            shardings = [self._here(shapes[i]) for i in group]
            some = jax.jit(lambda p, group=group: [jax.tree.leaves(init(p))[i] for i in group], out_shardings=shardings)
            for i, leaf in zip(group, jax.block_until_ready(some(params)), strict=True):
                made[i] = leaf
        return jax.tree.unflatten(tree, made)

    def _here(self, leaf: Any) -> SingleDeviceSharding:
        return SingleDeviceSharding(jax.local_devices()[0], memory_kind=self.kind_of(leaf))


ON_DEVICES = OptimizerMemory()


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


def groups_of_host_leaves(kinds: Sequence[str | None], shapes: Sequence[Any]) -> Iterator[list[int]]:
    """Divide the positions of leaves: those in device memory (None) first, then groups of those on the host, by bytes.

    Example:
      >>> leaf = jax.ShapeDtypeStruct((40 << 20,), "float32")
      >>> list(groups_of_host_leaves([None, *["pinned_host"] * 3], [leaf] * 4))
      [[0], [1], [2], [3]]
    """
    on_host = [i for i, kind in enumerate(kinds) if kind is not None]
    rest = [i for i, kind in enumerate(kinds) if kind is None]
    if rest:
        yield rest
    group, total = list[int](), 0
    for i in on_host:
        size = math.prod(shapes[i].shape) * shapes[i].dtype.itemsize
        if group and total + size > _GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(i)
        total += size
    if group:
        yield group
