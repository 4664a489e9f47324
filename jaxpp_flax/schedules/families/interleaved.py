"""Schedules with several stages on each rank: stage ``s`` is on rank ``s % p``."""

from __future__ import annotations

from jaxpp_flax.schedules.families.basic import InRounds


class Interleaved1F1B(InRounds):
    """1F1B over ``v`` stages per rank: the bubble shrinks by ``v``, memory and transfers grow.

    Microbatches run in rounds of at least ``p``: all of a round pass through the rank's first stage,
    then through its second, and so on.

    With ``p`` ranks, ``v`` stages per rank of cost ``f``, ``b`` and ``m`` a multiple of ``p``:
    idle ``(p - 1)(f + b)`` on each rank while the work is ``m v (f + b)``; rank ``r`` holds
    ``min(m v, (v - 1) p + 2 (p - 1 - r) + 1)`` microbatch-stages.

    Any number of microbatches is legal. If they do not divide into equal rounds, the last round is
    shorter, and the rank is idle in the place of each missing microbatch.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, https://arxiv.org/abs/2104.04473.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(Interleaved1F1B(4, 2), 4))
    rank 0 |F0-F1-f0-f1-F2-...b0====F3-b1====f2-B0====f3-B1====...b2====...b3====B2====B3====
    rank 1 |...F0-F1-f0-b0====f1-b1====F2-B0====F3-B1====f2-b2====f3-b3====B2====B3====......
    """

    fuses_last_stage = True

    ahead: int = 0
    """The number of forwards added to the warm-up of every rank."""

    def round_size(self, num_microbatches: int) -> int:
        count = max(1, num_microbatches // self.num_ranks)
        return self.num_ranks if num_microbatches % count else num_microbatches // count

    def warmup(self, rank: int, num_microbatches: int) -> int:
        before = (self.stages_per_rank - 1) * self.round_size(num_microbatches)
        return before + 2 * (self.num_ranks - 1 - rank) + self.ahead


class KimiK2(Interleaved1F1B):
    """Interleaved 1F1B with one more forward in the warm-up of every rank.

    The added forward gives each rank something to run while an expert layer's all-to-all or a
    transfer is under way. Without such waits its makespan is that of :class:`Interleaved1F1B`, and
    rank ``r`` holds one microbatch-stage more. The last stage runs one forward ahead, so it is not fused.

    Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, https://arxiv.org/abs/2507.20534.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(KimiK2(4, 2), 4))
    rank 0 |F0-F1-f0-f1-F2-F3-...b0====f2-b1====f3-B0====...B1====...b2====b3====B2====B3====
    rank 1 |...F0-F1-f0-f1-b0====F2-b1====F3-B0====f2-B1====f3-b2====b3====B2====B3====......
    """

    fuses_last_stage = False
    ahead = 1


class InterleavedGPipe(InRounds):
    """All forwards, then all backwards, over several stages per rank, breadth first.

    All microbatches pass through a rank's first stage before the first one enters its second stage.
    So the weights of a stage are gathered, and its gradients reduced, once per step.

    With ``p`` ranks, ``v`` stages per rank of cost ``f``, ``b``, and ``m >= p``: idle
    ``(p - 1)(f + b)`` on each rank, ``m v`` microbatch-stages held.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022, https://arxiv.org/abs/2211.05953.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(InterleavedGPipe(4, 2), 3))
    rank 0 |F0-F1-F2-f0-f1-f2-.........b0====b1====b2====B0====B1====B2====
    rank 1 |...F0-F1-F2-f0-f1-f2-b0====b1====b2====B0====B1====B2====......
    """


class Circular(InterleavedGPipe):
    """All forwards, then all backwards; rounds of ``p`` microbatches go through all stages in turn.

    In :class:`InterleavedGPipe`, all microbatches pass a rank's first stage before its second. Here,
    ``p`` microbatches pass all ranks ``v`` times, then the next ``p``. A round has as many
    microbatches as there are ranks, so no rank waits for a microbatch to come back.

    With ``p`` ranks, ``v`` stages per rank of cost ``f``, ``b``, and ``m`` a multiple of ``p``: idle
    ``(p - 1)(f + b)`` on each rank, ``m v`` microbatch-stages held.

    The forward order of circular pipelining; Xu et al., "GSPMD", 2021,
    https://arxiv.org/abs/2105.04663, section 3.3.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(Circular(4, 2), 4))
    rank 0 |F0-F1-f0-f1-F2-F3-f2-f3-.........b0====b1====B0====B1====b2====b3====B2====B3====
    rank 1 |...F0-F1-f0-f1-F2-F3-f2-f3-b0====b1====B0====B1====b2====b3====B2====B3====......
    """

    def round_size(self, num_microbatches: int) -> int:
        return self.num_ranks


class CircularReversed(Circular):
    """:class:`Circular` with the backwards in exactly the reverse order of the forwards.

    The activations of the last microbatch, the newest, are used first. The order of each rank is
    symmetric in time, so the bubble is the same. Memory is freed last-in first-out, which suits
    stacked values (scans, saved activations).

    The reversed-backward form of circular pipelining in Shardy:MPMD.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(CircularReversed(4, 2), 3))
    rank 0 |F0-F1-f0-f1-F2-...f2-.........b2====......B2====b1====b0====B1====B0====
    rank 1 |...F0-F1-f0-f1-F2-...f2-b2====......B2====b1====b0====B1====B0====......
    """

    newest_first = True
