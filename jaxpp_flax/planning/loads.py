"""The inputs of a planner: the hardware, memory limits, and the work and the bytes of each stage."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.residuals import StageResiduals
from jaxpp_flax.schedules.simulation.costs import Link, Transfer

__all__ = ["Hardware", "StageLoad", "flops_per_byte", "hardware_of", "limits_of"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The speed of one device and of its links, in FLOPs, seconds and bytes.

    Args:
      flops: the floating-point operations per second that a device reaches in models (often 40 to 60 % of its peak).
      link_bandwidth: bytes per second from rank to rank, for each device.
      link_latency: fixed seconds of each transfer from rank to rank, in addition to the time of its bytes.
      host_bandwidth: bytes per second between a device and its host, in each direction.
      host_latency: fixed seconds of each copy to the host or back, in addition to the time of its bytes.
      gather_bandwidth: bytes per second that a device receives from the other devices of its stage, for parameters that
        are sharded inside the stage (FSDP).

    Raises:
      ScheduleError: for a value that is not a number above 0 (a latency may be 0).

    Example:
      >>> card = Hardware(flops=400e12, host_bandwidth=50e9)
      >>> card.host_link.time(1e9)
      0.02
    """

    flops: float
    host_bandwidth: float
    link_bandwidth: float = math.inf
    link_latency: float = 0.0
    host_latency: float = 0.0
    gather_bandwidth: float = math.inf

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            least = "of at least 0" if name.endswith("latency") else "above 0"
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or math.isnan(value) or value < 0 or (value == 0 and least == "above 0"):
                raise ScheduleError(f"Hardware: {name}={value!r}; it must be a number {least}.")

    @property
    def host_link(self) -> Link:
        """The link between a device and its host."""
        return Link(self.host_latency, self.host_bandwidth)

    @property
    def transfer(self) -> Transfer:
        """The links from rank to rank."""
        return Transfer(Link(self.link_latency, self.link_bandwidth))


@dataclass(frozen=True, kw_only=True)
class StageLoad:
    """The work of one stage for one microbatch, in seconds, and its bytes on each device.

    Args:
      forward: seconds of the forward pass.
      backward: seconds of the whole backward pass; if it is split, each part takes half of them.
      residual_bytes: bytes of the values of the forward pass that the backward pass reads.
      weight_bytes: bytes of the values that the weight gradient reads, if the schedule splits the backward pass;
        default: `residual_bytes`.
      input_bytes: bytes of the stage's inputs; a stage that recomputes its residuals keeps these.
      sent_bytes: bytes of the values sent to the next stage.
      passing_bytes: the part of `sent_bytes` that is no residual of this stage: it is freed after the forward pass.
      saved_bytes: bytes of the residuals that the user's `jax.checkpoint` policies save: a stage that recomputes keeps
        them.
      region_bytes: the workspace of the backward pass: that of its fullest block, with what the user's
        `jax.checkpoint` recomputes.
      has_effects: True if the forward pass has side effects: then it must not run twice.
      recomputation: the seconds by which the backward pass is longer if it recomputes the residuals; default:
        `forward`.
      fixed_bytes: bytes held for the whole step, by kind, such as "parameters", "gradients" and "optimizer".
      gathered: bytes of the whole parameters that are sharded inside the stage (FSDP), by name; `StepModel(fsdp=)` says
        how often they are gathered. Stages of one rank share a parameter of one name.
      streamed: for each parameter, the bytes of its optimizer state on the host; the update fetches a window of these
        at a time.

    Raises:
      ScheduleError: for fixed or streamed bytes that are negative or not finite.

    Example:
      >>> StageLoad(forward=1.0, backward=2.0, residual_bytes=8.0, fixed_bytes={"parameters": 4.0}).fixed
      4.0
    """

    forward: float
    backward: float
    residual_bytes: float
    weight_bytes: float | None = None
    input_bytes: float = 0.0
    sent_bytes: float = 0.0
    passing_bytes: float = 0.0
    saved_bytes: float = 0.0
    region_bytes: float = 0.0
    has_effects: bool = False
    recomputation: float | None = None
    fixed_bytes: Mapping[str, float] = field(default_factory=dict)
    gathered: Mapping[str, float] = field(default_factory=dict)
    streamed: Sequence[float] = ()

    def __post_init__(self) -> None:
        for kind, nbytes in (*self.fixed_bytes.items(), *(("streamed", each) for each in self.streamed)):
            if not 0 <= nbytes < math.inf:
                raise ScheduleError(f"StageLoad has {nbytes} bytes of {kind!r}: give a finite number of at least 0.")

    @property
    def time_again(self) -> float:
        """The seconds by which the backward pass is longer if it recomputes the residuals."""
        return self.forward if self.recomputation is None else self.recomputation

    def kept_bytes(self, residuals: StageResiduals) -> float:
        """Return the bytes that the forward pass of a microbatch keeps, on the devices or on the host."""
        # The regions of policies read the stage's input too.
        again = min(max(self.input_bytes, self.saved_bytes), self.residual_bytes)
        return again if residuals.recompute else self.residual_bytes

    def seconds_again(self, residuals: StageResiduals) -> float:
        """Return the seconds by which a backward pass is longer because it recomputes values."""
        return self.time_again if residuals.recompute else 0.0

    @property
    def fixed(self) -> float:
        """The bytes held for the whole step."""
        return sum(self.fixed_bytes.values())


# Approximate FLOPs in the time to move one byte between a device's memory and its cores.
_FLOPS_PER_BYTE = {"cpu": 4.0, "gpu": 100.0, "cuda": 100.0, "rocm": 100.0, "tpu": 200.0}
_OF_AN_ACCELERATOR = 100.0

_CPU = Hardware(flops=50e9, host_bandwidth=10e9, link_bandwidth=10e9, gather_bandwidth=10e9)
# A card of 2023 on PCIe 5, beside others of its host.
_ACCELERATOR = Hardware(flops=400e12, host_bandwidth=50e9, link_bandwidth=50e9, gather_bandwidth=200e9)
_TPU = Hardware(flops=200e12, host_bandwidth=10e9, link_bandwidth=50e9, gather_bandwidth=100e9)
_HARDWARE = {"cpu": _CPU, "tpu": _TPU}


def flops_per_byte(platform: str) -> float:
    """Return the FLOPs in the time to move one byte: an order of magnitude, for a platform.

    Example:
      >>> flops_per_byte("cpu")
      4.0
    """
    return _FLOPS_PER_BYTE.get(platform, _OF_AN_ACCELERATOR)


def hardware_of(platform: str) -> Hardware:
    """Return the speeds that are assumed of one device of a platform, if none are given.

    Example:
      >>> hardware_of("gpu").host_bandwidth
      50000000000.0
    """
    return _HARDWARE.get(platform, _ACCELERATOR)


def limits_of(memory_limit: Any, num_ranks: int) -> tuple[float, ...]:
    """Return the limit of each rank from a number of bytes or one for each rank; infinity for None.

    Raises:
      ScheduleError: for another number of limits than ranks, and for a limit that is no number of bytes above 0.
    """
    if memory_limit is None:
        return (math.inf,) * num_ranks
    several = isinstance(memory_limit, Sequence) and not isinstance(memory_limit, str)
    listed: tuple[Any, ...] = tuple(memory_limit) if several else (memory_limit,) * num_ranks
    for value in listed:
        is_number = hasattr(value, "__float__") and not isinstance(value, (bool, str)) and not getattr(value, "ndim", 0)
        if not is_number or not float(value) > 0:
            raise ScheduleError(
                f"memory_limit={memory_limit!r}: it must be a number of bytes above 0, or one such number for each "
                "rank."
            )
    if len(listed) != num_ranks:
        raise ScheduleError(
            f"memory_limit has {len(listed)} numbers for {num_ranks} ranks. Give one for each, or one number for all."
        )
    return tuple(map(float, listed))
