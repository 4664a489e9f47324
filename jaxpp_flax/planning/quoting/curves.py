"""The share of their peaks that devices and links reach: a few numbers, fitted to measured steps.

A product of (m, k) and (k, n) reaches `product / (1 + edge * (1/m + 1/n + 1/k))` of the device's peak, unless its bytes
take longer: small and thin products reach less than large ones. A collective is a ring of latency and bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpp_flax.planning.quoting.devices import Device
from jaxpp_flax.planning.quoting.facts import Product, TaskFacts

__all__ = ["Curves", "Group"]


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
    """What is reached of the peaks.

    The defaults are fitted to 27 steps on A100s (`benchmarks/quote_errors.py --fit`); `hop` and `step` are assumed.

    Args:
      product: the share of the peak that a large product reaches.
      edge: the length that a dimension of a product loses to its edges.
      memory: the share of the memory's bandwidth that work element by element reaches.
      inside, across: the shares of the links' bandwidths that collectives reach.
      kernel: seconds that one product or piece of work takes besides.
      hop: seconds that each step of a ring takes besides.
      step: seconds of a step besides.
      spread: 80 % of the measured steps lie within a factor of exp(spread) of the predicted ones.
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
        """Return the time of a task on one device: its products, and its work element by element."""
        products = sum(self._product(each, device) for each in work.products)
        return products + self.moving(work.moved, device) + self.kernel * (len(work.products) + work.kernels)

    def moving(self, nbytes: float, device: Device) -> float:
        """Return the time of reading or writing bytes."""
        return nbytes / (self.memory * device.memory_bandwidth)

    def _product(self, of: Product, device: Device) -> float:
        share = self.product / (1 + self.edge * (1 / of.m + 1 / of.n + 1 / of.k))
        return of.times * max(of.flops / (share * device.peak_of(of.dtype)), self.moving(of.nbytes, device))

    def bandwidth(self, group: Group, device: Device) -> float:
        """Return the bytes a second of a ring: the devices of one node share the ring's way to other nodes."""
        within = self.inside * device.inside
        if group.size <= group.in_node:
            return within
        return min(within, self.across * device.across * group.in_node)

    def gather(self, nbytes: float, group: Group, device: Device) -> float:
        """Return the time of an all-gather to so many bytes, or of a reduce-scatter of them.

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
        """Return the time of a sum: a reduce-scatter, then an all-gather."""
        return 2 * self.gather(nbytes, group, device)
