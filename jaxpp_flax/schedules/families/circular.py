"""Circular schedules, and GPipe with 1F1B on the last rank."""

from __future__ import annotations

from jaxpp_flax.schedules.families.basic import GPipe
from jaxpp_flax.schedules.families.interleaved import InterleavedGPipe


class Circular(InterleavedGPipe):
    """All forwards, then all backwards; rounds of ``p`` microbatches go through all stages in turn.

    In :class:`InterleavedGPipe`, all microbatches pass a rank's first stage before its second. Here,
    ``p`` microbatches pass all ranks ``v`` times, then the next ``p``. A round has as many
    microbatches as there are ranks, so no rank waits for a microbatch to come back.

    With ``p`` ranks, ``v`` stages per rank of cost ``f``, ``b``, and ``m`` a multiple of ``p``: idle
    ``(p - 1)(f + b)`` on each rank, ``m v`` microbatch-stages held.

    The forward order of circular pipelining; Xu et al., "GSPMD", 2021,
    https://arxiv.org/abs/2105.04663, section 3.3.

    >>> Circular(4, 2).tasks(3)[0]
    [fwd_0__0, fwd_0__1, fwd_2__0, fwd_2__1, fwd_0__2, fwd_2__2,
     bwd_2__0, bwd_2__1, bwd_0__0, bwd_0__1, bwd_2__2, bwd_0__2]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(Circular(4, 2), 4))
    rank 0 |F0-F1-f0-f1-F2-F3-f2-f3-.........b0====b1====B0====B1====b2====b3====B2====B3====
    rank 1 |...F0-F1-f0-f1-F2-F3-f2-f3-b0====b1====B0====B1====b2====b3====B2====B3====......
    """

    def _round_size(self, num_microbatches: int) -> int:
        return self.num_ranks


class CircularReversed(Circular):
    """:class:`Circular` with the backwards in exactly the reverse order of the forwards.

    The activations of the last microbatch, the newest, are used first. The order of each rank is
    symmetric in time, so the bubble is the same. Memory is freed last-in first-out, which suits
    stacked values (scans, saved activations).

    The reversed-backward form of circular pipelining in Shardy:MPMD.

    >>> CircularReversed(4, 2).tasks(2)[0]
    [fwd_0__0, fwd_0__1, fwd_2__0, fwd_2__1, bwd_2__1, bwd_2__0, bwd_0__1, bwd_0__0]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(CircularReversed(4, 2), 3))
    rank 0 |F0-F1-f0-f1-F2-...f2-.........b2====......B2====b1====b0====B1====B0====
    rank 1 |...F0-F1-f0-f1-F2-...f2-b2====......B2====b1====b0====B1====B0====......
    """

    _newest_first = True


class GPipe1F1BLast(GPipe):
    """:class:`GPipe`, except that the last rank runs each backward directly after its forward.

    The last stage, often the one with the largest activations (the logits), then holds one
    microbatch instead of all. The makespan is that of GPipe; every other stage holds ``m``.

    The schedule is Shardy:MPMD's "GPipe but 1F1B for the last mesh"; Huang et al., "GPipe", 2019,
    https://arxiv.org/abs/1811.06965.

    >>> GPipe1F1BLast(2).tasks(2)
    [[fwd_0__0, fwd_0__1, bwd_0__0, bwd_0__1],
     [FusedTask(fwd_1__0, bwd_1__0), FusedTask(fwd_1__1, bwd_1__1)]]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(GPipe1F1BLast(3), 4))
    rank 0 |F0-F1-F2-F3-.........B0====...B1====...B2====...B3====
    rank 1 |...F0-F1-F2-F3-B0====...B1====...B2====...B3====......
    rank 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............
    """

    fuses_last_stage = True
