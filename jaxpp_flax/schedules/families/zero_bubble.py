"""Schedules that split the backward, with one stage on each rank."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.families.basic import OneStagePerRank
from jaxpp_flax.schedules.task import AnyTask, backward, backward_input, backward_weight, forward


class _SplitOnePerRank(OneStagePerRank):
    """Warm-up; then a forward, an input gradient and an older weight gradient in turn.

    The two numbers below make the schedule. The first stage, whose backward is whole, owes no
    weight gradients.
    """

    splits_backward = True

    @abc.abstractmethod
    def ahead(self, stage: int) -> int:
        """Return the number of forwards that ``stage`` starts before its first backward."""

    @abc.abstractmethod
    def lag(self, stage: int) -> int:
        """Return the number of input gradients between a microbatch's input gradient and its weight gradient."""

    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[AnyTask]:
        warmup = min(self.ahead(rank) - 1, num_microbatches)
        lag = self.lag(rank)
        yield from (forward(rank, m) for m in range(warmup))
        for m in range(num_microbatches):
            if m + warmup < num_microbatches:
                yield forward(rank, m + warmup)
            if rank == 0:
                yield backward(0, m)
                continue
            yield backward_input(rank, m)
            if m >= lag:
                yield backward_weight(rank, m - lag)
        if rank:
            done = max(0, num_microbatches - lag)
            yield from (backward_weight(rank, m) for m in range(done, num_microbatches))


class ZeroBubble(_SplitOnePerRank):
    """ZB-H1: 1F1B whose weight gradients fill a part of the bubble, in the memory of 1F1B.

    With ``p`` stages of costs ``f``, ``i``, ``w`` (equal, or nearly), and ``m >= p``: makespan
    ``m (f + i + w) + (p - 1)(f + i - w)``; every stage holds at most ``min(m, p)`` microbatches.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.

    >>> ZeroBubble(2).tasks(3)[1]
    [fwd_1__0, bwd_i_1__0, fwd_1__1, bwd_i_1__1, bwd_w_1__0, fwd_1__2, bwd_i_1__2, bwd_w_1__1, bwd_w_1__2]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(ZeroBubble(4), 5))
    rank 0 |F0-F1-F2-F3-.........B0====F4-B1====B2====B3====B4====
    rank 1 |...F0-F1-F2-......I0~F3-I1~W0:F4-I2~W1:I3~W2:I4~W3:W4:
    rank 2 |......F0-F1-...I0~F2-I1~F3-I2~W0:F4-I3~W1:I4~W2:W3:W4:
    rank 3 |.........F0-I0~F1-I1~F2-I2~F3-I3~W0:F4-I4~W1:W2:W3:W4:
    """

    def ahead(self, stage: int) -> int:
        return self.num_stages - stage

    def lag(self, stage: int) -> int:
        return stage


class ZeroBubbleH2(_SplitOnePerRank):
    """ZB-H2: twice the warm-up, and from its first task to its last a rank never idles.

    The step has the shape of a parallelogram: rank ``r`` starts and ends ``r`` forwards after rank
    0. Steps that follow each other without a barrier have no bubble at all (see
    :attr:`Summary.period`); with a barrier the makespan is that of :class:`ZeroBubble`.

    With ``p`` stages of equal costs and ``m >= 2p - 1``: makespan ``m (f + i + w) + (p - 1) f``,
    period ``m (f + i + w)``; every stage holds at most ``min(m, 2p - 1)`` microbatches.

    With ``latency``, the time of a transfer as a fraction of a forward, stages run as many more
    forwards ahead as hide the transfers of the first microbatch's round trip:
    ``floor(2(p - s) - 1 + 2(p - s - 1) latency)`` in all. The period then still has no bubble, and
    the makespan is ``m (f + i + w) + (p - 1)(1 + latency) f``.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.

    Args:
        num_stages: number of stages, one on each rank.
        latency: time of a transfer as a fraction of a stage's forward, 0 or more.

    >>> ZeroBubbleH2(3).tasks(3)[1]
    [fwd_1__0, fwd_1__1, fwd_1__2, bwd_i_1__0, bwd_i_1__1, bwd_i_1__2, bwd_w_1__0, bwd_w_1__1, bwd_w_1__2]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(ZeroBubbleH2(3), 6))
    rank 0 |F0-F1-F2-F3-F4-B0====F5-B1====B2====B3====B4====B5====......
    rank 1 |...F0-F1-F2-I0~F3-I1~F4-I2~W0:F5-I3~W1:I4~W2:I5~W3:W4:W5:...
    rank 2 |......F0-I0~F1-I1~F2-I2~F3-I3~F4-I4~W0:F5-I5~W1:W2:W3:W4:W5:
    """

    latency: float

    def __init__(self, num_stages: int, latency: float = 0.0) -> None:
        super().__init__(num_stages)
        object.__setattr__(self, "latency", check_latency(latency))

    def __repr__(self) -> str:
        return f"ZeroBubbleH2(num_stages={self.num_stages}, latency={self.latency})"

    def ahead(self, stage: int) -> int:
        hops = self.num_stages - 1 - stage
        return math.floor(2 * hops + 1 + 2 * hops * self.latency)

    def lag(self, stage: int) -> int:
        return self.ahead(self.num_stages - 1 - stage) - 1


def check_latency(latency: float) -> float:
    """A transfer's time as a fraction of a forward: any finite number from 0."""
    if not (math.isfinite(latency) and latency >= 0):
        raise ScheduleError(f"latency is a fraction of a forward's time, 0 or more, got {latency!r}")
    return float(latency)
