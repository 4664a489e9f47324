"""Schedules that split the backward, with one stage on each rank."""

from __future__ import annotations

import math

from jaxpp_flax.schedules.families.basic import WarmedUp, WarmedUpForLatency


class ZeroBubble(WarmedUp):
    """ZB-H1: 1F1B in which weight gradients fill a part of the bubble, with the memory of 1F1B.

    With ``p`` stages, (nearly) equal costs ``f``, ``i``, ``w``, and ``m >= p``: makespan
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

    splits_backward = True

    def warmup(self, stage: int) -> int:
        return self.num_stages - 1 - stage

    def lag(self, stage: int) -> int:
        return stage


class ZeroBubbleH2(WarmedUpForLatency):
    """ZB-H2: twice the warm-up of 1F1B; no rank is idle between its first task and its last.

    Rank ``r`` starts and ends ``r`` forwards after rank 0. So steps that follow one another without
    a barrier have no bubble (see :attr:`Timeline.period`); with a barrier, the makespan is that of
    :class:`ZeroBubble`.

    With ``p`` stages of equal costs and ``m >= 2p - 1``: makespan ``m (f + i + w) + (p - 1) f``,
    period ``m (f + i + w)``; every stage holds at most ``min(m, 2p - 1)`` microbatches.

    With ``latency``, the time of a transfer as a fraction of a forward, the warm-up is longer, so that
    it hides the transfers of the first microbatch's round trip: stage ``s`` runs
    ``floor(2(p - s) - 1 + 2(p - s - 1) latency)`` forwards. The period still has no bubble, and the
    makespan is ``m (f + i + w) + (p - 1)(1 + latency) f``.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.

    Args:
        num_stages: number of stages.
        num_ranks: number of ranks, the same.
        latency: time of a transfer as a fraction of a stage's forward, 0 or more.

    >>> ZeroBubbleH2(3).tasks(3)[1]
    [fwd_1__0, fwd_1__1, fwd_1__2, bwd_i_1__0, bwd_i_1__1, bwd_i_1__2, bwd_w_1__0, bwd_w_1__1, bwd_w_1__2]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(ZeroBubbleH2(3), 6))
    rank 0 |F0-F1-F2-F3-F4-B0====F5-B1====B2====B3====B4====B5====......
    rank 1 |...F0-F1-F2-I0~F3-I1~F4-I2~W0:F5-I3~W1:I4~W2:I5~W3:W4:W5:...
    rank 2 |......F0-I0~F1-I1~F2-I2~F3-I3~F4-I4~W0:F5-I5~W1:W2:W3:W4:W5:
    """

    splits_backward = True

    def __init__(self, num_stages: int, num_ranks: int | None = None, *, latency: float = 0.0) -> None:
        super().__init__(num_stages, num_ranks, latency)

    def warmup(self, stage: int) -> int:
        hops = self.num_stages - 1 - stage
        return math.floor(2 * hops + 2 * hops * self.latency)

    def lag(self, stage: int) -> int:
        return self.warmup(self.num_stages - 1 - stage)
