"""The shares of their peaks that devices and links reach: a few numbers, fitted to measured steps.

A matrix product of (m, k) and (k, n) reaches `product / (1 + edge * (1/m + 1/n + 1/k))` of the device's peak, unless
its bytes take longer: small and thin products reach less than large ones. A collective is modelled as a ring with
latency and bandwidth. `MeasuredCurves` instead measures products and memory on JAX's default device.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.planning.quoting.devices import Device
from jaxpp_flax.planning.quoting.facts import Product, TaskFacts

__all__ = ["Curves", "Group", "MeasuredCurves"]

_LONGEST = 4096  # dimension of a product that is measured: longer ones reach no more
_MOST_ELEMENTS = 2**26  # of the operands and the result of a batch of products
_MEASURED_BYTES = 2**26
_MEASURED_SECONDS = 0.01


@dataclass(frozen=True)
class Group:
    """Devices that take part in one collective.

    Args:
      size: their number.
      in_node: how many of them share a node.
    """

    size: int
    in_node: int

    @classmethod
    def of(cls, size: int, stride: int, per_node: int) -> Group:
        """Return a group of every `stride`-th device, in the order of the mesh.

        Example:
          >>> Group.of(size=4, stride=2, per_node=8), Group.of(size=16, stride=4, per_node=8)
          (Group(size=4, in_node=4), Group(size=16, in_node=2))
        """
        return cls(size, max(1, min(size, per_node // stride)))


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The shares of their peaks that devices and links reach.

    The defaults are fitted to 27 steps on A100s (`benchmarks/quote_errors.py --fit`); `hop` and `step` are assumed.

    Args:
      product: the share of the peak that a large matrix product reaches.
      edge: `edge` in the formula of `jaxpp_flax.planning.quoting.curves`: larger values make small products slower.
      memory: the share of the memory's bandwidth that elementwise operations reach.
      inside, across: the shares of the bandwidths inside a node and to other nodes that collectives reach.
      kernel: fixed seconds of each matrix product and each elementwise kernel.
      hop: fixed seconds of each step of a ring.
      step: fixed seconds of each training step.
      spread: 80 % of the measured steps are within a factor of exp(spread) of the predicted ones.
    """

    product: float = 0.95
    edge: float = 468.0
    memory: float = 0.752
    inside: float = 0.916
    across: float = 0.457
    kernel: float = 3.8e-6
    hop: float = 5e-6
    step: float = 0.01
    spread: float = 0.197

    def compute(self, work: TaskFacts, device: Device) -> float:
        """Return the time of a task on one device: its matrix products and its elementwise operations."""
        products = sum(self._product(each, device) for each in work.products)
        return products + self.moving(work.moved, device) + self.kernel * (len(work.products) + work.kernels)

    def moving(self, nbytes: float, device: Device) -> float:
        """Return the time of reading or writing bytes."""
        return nbytes / (self.memory * device.memory_bandwidth)

    def _product(self, of: Product, device: Device) -> float:
        share = self.product / (1 + self.edge * (1 / of.m + 1 / of.n + 1 / of.k))
        return of.times * max(of.flops / (share * device.peak_of(of.dtype)), self.moving(of.nbytes, device))

    def bandwidth(self, group: Group, device: Device) -> float:
        """Return the bytes per second of a ring; between nodes, it uses the links of all its devices of a node."""
        within = self.inside * device.inside
        if group.size <= group.in_node:
            return within
        return min(within, self.across * device.across * group.in_node)

    def gather(self, nbytes: float, group: Group, device: Device) -> float:
        """Return the time of an all-gather that results in `nbytes`, or of a reduce-scatter of `nbytes`.

        Example:
          >>> from jaxpp_flax.planning.quoting.devices import device_named
          >>> full = Curves(inside=1.0, hop=0.0)
          >>> full.gather(8 * 450e9, Group(8, 8), device_named("h100-sxm"))
          7.0
        """
        if group.size == 1 or not nbytes:
            return 0.0
        return (group.size - 1) * (self.hop + nbytes / group.size / self.bandwidth(group, device))

    def all_reduce(self, nbytes: float, group: Group, device: Device) -> float:
        """Return the time of an all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.gather(nbytes, group, device)

    def all_to_all(self, nbytes: float, group: Group, device: Device) -> float:
        """Return the time of an all-to-all: each device sends an equal part of `nbytes` to every device of the group.

        The parts for other nodes use the device's own link to them, at the same time as the parts inside the node.

        Example:
          >>> from jaxpp_flax.planning.quoting.devices import device_named
          >>> full, h100 = Curves(inside=1.0, across=1.0, hop=0.0), device_named("h100-sxm")
          >>> full.all_to_all(8 * 450e9, Group(8, 8), h100), full.all_to_all(16 * 50e9, Group(16, 8), h100)
          (7.0, 8.0)
        """
        if group.size == 1 or not nbytes:
            return 0.0
        each, here = nbytes / group.size, min(group.size, group.in_node)
        near = each * (here - 1) / (self.inside * device.inside)
        return (group.size - 1) * self.hop + max(near, each * (group.size - here) / (self.across * device.across))


@dataclass(frozen=True, kw_only=True)
class MeasuredCurves(Curves):
    """Curves with the measured speed of matrix products and memory on JAX's default device.

    Each shape is measured when a layout needs it, with dimensions rounded to powers of two of at most 4,096; several
    equal products run as one batch. Links between devices are not measured: they keep the shares of `Curves`.

    Example:
      >>> from jaxpp_flax.planning.quoting.devices import device_named
      >>> work = TaskFacts((Product(1.0, 64, 64, 64, "float32", 4),))
      >>> MeasuredCurves().compute(work, device_named("h200")) > 0
      True
    """

    def moving(self, nbytes: float, device: Device) -> float:
        """Return the time of reading or writing bytes."""
        return nbytes * _seconds_of_a_byte()

    def _product(self, of: Product, device: Device) -> float:
        m, n, k = (_near(size, _LONGEST) for size in (of.m, of.n, of.k))
        batch = _near(of.times, max(1, min(_LONGEST**3 // (m * n * k), _MOST_ELEMENTS // (m * k + k * n + m * n))))
        return of.times * of.flops * _seconds_of_a_flop(batch, m, n, k, of.dtype)


def _near(size: float, most: int) -> int:
    """Return the nearest power of two, within bounds.

    Example:
      >>> [_near(size, 4096) for size in (0.5, 48, 100, 3000, 1e6)]
      [1, 64, 128, 4096, 4096]
    """
    return max(1, min(2 ** round(math.log2(max(size, 1))), 2 ** int(math.log2(most))))


@cache
@without_ambient_mesh
def _seconds_of_a_flop(batch: int, m: int, n: int, k: int, dtype: str) -> float:
    left, right = jnp.ones((batch, m, k), dtype), jnp.ones((batch, k, n), dtype)
    return _seconds(jnp.matmul, left, right) / (2.0 * batch * m * n * k)


@cache
@without_ambient_mesh
def _seconds_of_a_byte() -> float:
    values = jnp.ones(_MEASURED_BYTES // 4, jnp.float32)
    return _seconds(lambda x: x + 1, values) / (2 * _MEASURED_BYTES)  # read and written


def _seconds(function: Callable[..., Any], *operands: jax.Array) -> float:
    """Return the median time of a call among others, compiled."""
    compiled, calls, found = jax.jit(function), 1, list[float]()
    jax.block_until_ready(compiled(*operands))
    while len(found) < 3:
        start = time.perf_counter()
        for _ in range(calls - 1):
            compiled(*operands)
        jax.block_until_ready(compiled(*operands))
        taken = time.perf_counter() - start
        if taken < _MEASURED_SECONDS:
            calls *= 2
        else:
            found.append(taken / calls)
    return statistics.median(found)
