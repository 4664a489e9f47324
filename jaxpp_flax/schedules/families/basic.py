"""The order that all families without a V share, and the schedules with one stage on each rank."""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Iterator
from itertools import chain, islice

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.schedule import StreamedSchedule
from jaxpp_flax.schedules.task import Task, TaskKind, backward, backward_input, backward_weight, forward, fused


class InRounds(StreamedSchedule):
    """Base: all microbatches of a round pass through a rank's first stage, then through its second, and so on.

    A rank runs forwards to warm up; then a forward and a backward in turn; then the remaining backwards. If nothing
    else is said, one round has all microbatches, and all forwards come before the first backward.
    """

    newest_first: bool = False
    """True if the backwards are in the reverse order of the forwards."""

    def round_size(self, num_microbatches: int) -> int:
        """Return the number of microbatches that go through one stage of a rank before the next stage's turn."""
        return num_microbatches

    def warmup(self, rank: int, num_microbatches: int) -> int:
        """Return the number of forwards that ``rank`` runs before its first pair of a forward and a backward."""
        return sys.maxsize

    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        # A last round which is not full is filled up, and the tasks of the microbatches that do not
        # exist are then left out: without them, a legal schedule is still legal.
        size = self.round_size(num_microbatches)
        rounds = [range(first, first + size) for first in range(0, num_microbatches, size)]
        stages = range(rank, self.num_stages, self.num_ranks)
        forwards = (forward(stage, m) for ms in rounds for stage in stages for m in ms)
        ordered = [ms[::-1] for ms in rounds[::-1]] if self.newest_first else rounds
        backwards = (backward(stage, m) for ms in ordered for stage in stages[::-1] for m in ms)
        warmup = islice(forwards, self.warmup(rank, num_microbatches))
        pairs = chain.from_iterable(zip(forwards, backwards, strict=False))
        last = self.num_stages - 1 if self.fuses_last_stage else -1
        for task in chain(warmup, pairs, backwards):
            if task.microbatch >= num_microbatches:
                continue
            if task.stage != last:
                yield task
            elif task.kind is TaskKind.FORWARD:  # and its backward comes next
                yield fused(last, task.microbatch)


class OneStagePerRank(InRounds):
    """Base of the schedules in which rank ``r`` runs stage ``r`` and no other."""

    def _check_ranks(self) -> None:
        if self.num_ranks != self.num_stages:
            raise ScheduleError(
                f"{type(self).__name__} runs one stage on each rank, got num_stages={self.num_stages} and "
                f"num_ranks={self.num_ranks}. Use {self.num_ranks} stages, or Interleaved1F1B"
            )


class ForLatency(OneStagePerRank):
    """Base: a warm-up that hides transfers of a known time."""

    latency: float

    def __init__(self, num_stages: int, num_ranks: int | None = None, *, latency: float = 0.0) -> None:
        super().__init__(num_stages, num_ranks)
        if not (math.isfinite(latency) and latency >= 0):
            raise ScheduleError(f"latency is a fraction of a forward's time, 0 or more, got {latency!r}")
        vars(self).update(latency=float(latency))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_stages={self.num_stages}, latency={self.latency})"


class LateWeightGradients(OneStagePerRank):
    """Base: the backward is split, and each input gradient is followed by an older weight gradient."""

    splits_backward = True

    @abc.abstractmethod
    def lag(self, stage: int) -> int:
        """Return the number of input gradients between a microbatch's input gradient and its weight gradient."""

    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        tasks, lag = super().rank_tasks(rank, num_microbatches), self.lag(rank)
        if rank == 0:  # stage 0 has no split backward
            yield from tasks
            return
        for task in tasks:
            if task.kind is TaskKind.FORWARD:
                yield task
                continue
            yield backward_input(rank, task.microbatch)
            if task.microbatch >= lag:
                yield backward_weight(rank, task.microbatch - lag)
        yield from (backward_weight(rank, m) for m in range(max(0, num_microbatches - lag), num_microbatches))


class GPipe(OneStagePerRank):
    """All forwards, then all backwards: a simple order, in which a stage holds the activations of all microbatches.

    With ``p`` stages, ``m`` microbatches and costs ``f``, ``b``: makespan ``(m + p - 1)(f + b)``,
    idle ``(p - 1)(f + b)`` on each rank, ``m`` microbatches held by each stage.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism",
    2019, https://arxiv.org/abs/1811.06965.

    >>> GPipe(2).tasks(2)[1]
    [fwd_1__0, fwd_1__1, bwd_1__0, bwd_1__1]
    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(GPipe(3), 4))
    rank 0 |F0-F1-F2-F3-..................B0====B1====B2====B3====
    rank 1 |...F0-F1-F2-F3-.........B0====B1====B2====B3====......
    rank 2 |......F0-F1-F2-F3-B0====B1====B2====B3====............
    """


class GPipe1F1BLast(GPipe):
    """:class:`GPipe`, except that the last rank runs each backward directly after its forward.

    The last stage, often the one with the largest activations (the logits), then holds one
    microbatch instead of all. The makespan is that of GPipe; every other stage holds ``m``.

    The schedule is Shardy:MPMD's "GPipe but 1F1B for the last mesh"; Huang et al., "GPipe", 2019,
    https://arxiv.org/abs/1811.06965.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(GPipe1F1BLast(3), 4))
    rank 0 |F0-F1-F2-F3-.........B0====...B1====...B2====...B3====
    rank 1 |...F0-F1-F2-F3-B0====...B1====...B2====...B3====......
    rank 2 |......F0-B0====F1-B1====F2-B2====F3-B3====............
    """

    fuses_last_stage = True


class Std1F1B(OneStagePerRank):
    """One forward, one backward: the bubble of GPipe, with memory that does not grow with ``m``.

    With ``p`` stages, ``m`` microbatches and costs ``f``, ``b``: makespan ``(m + p - 1)(f + b)``,
    idle ``(p - 1)(f + b)`` on each rank, ``min(m, p - s)`` microbatches held by stage ``s``.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush), 2021,
    https://arxiv.org/abs/2006.09503.

    >>> Std1F1B(2).tasks(3)
    [[fwd_0__0, fwd_0__1, bwd_0__0, fwd_0__2, bwd_0__1, bwd_0__2],
     [FusedTask(fwd_1__0, bwd_1__0), FusedTask(fwd_1__1, bwd_1__1), FusedTask(fwd_1__2, bwd_1__2)]]
    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(Std1F1B(4), 5))
    rank 0 |F0-F1-F2-F3-..................B0====F4-B1====...B2====...B3====...B4====
    rank 1 |...F0-F1-F2-............B0====F3-B1====F4-B2====...B3====...B4====......
    rank 2 |......F0-F1-......B0====F2-B1====F3-B2====F4-B3====...B4====............
    rank 3 |.........F0-B0====F1-B1====F2-B2====F3-B3====F4-B4====..................
    """

    fuses_last_stage = True

    def warmup(self, rank: int, num_microbatches: int) -> int:
        return self.num_stages - 1 - rank


class Eager1F1B(ForLatency):
    """1F1B with more forwards in the warm-up: they hide the transfers, and take more memory.

    Between two neighbouring stages, a microbatch makes a round trip: a forward and a backward on each
    stage, and two transfers. Other microbatches hide the transfers if stage ``s`` runs
    ``1 + ceil(2 latency / 3)`` forwards more in its warm-up than stage ``s + 1``; here a backward
    takes as long as two forwards. For transfers of up to 1.5 forwards, this is twice the warm-up of
    :class:`Std1F1B`. Stage ``s`` of ``p`` holds
    ``min(m, (p - 1 - s)(1 + ceil(2 latency / 3)) + 1)`` microbatches; with ``m`` large
    the makespan is ``3 m + (p - 1)(3 + 2 latency)`` forwards.

    Zhuang et al., "On Optimizing the Communication of Model Parallelism", 2023,
    https://arxiv.org/abs/2211.05322. Here ``latency`` sets the number of forwards.

    Args:
        latency: the longest transfer to hide, as a fraction of the time of a stage's forward, 0 or more.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(Eager1F1B(3), 5))
    rank 0 |F0-F1-F2-F3-F4-......B0====...B1====...B2====...B3====...B4====
    rank 1 |...F0-F1-F2-...B0====F3-B1====F4-B2====...B3====...B4====......
    rank 2 |......F0-B0====F1-B1====F2-B2====F3-B3====F4-B4====............
    """

    fuses_last_stage = True

    def __init__(self, num_stages: int, num_ranks: int | None = None, *, latency: float = 1.5) -> None:
        super().__init__(num_stages, num_ranks, latency=latency)

    def warmup(self, rank: int, num_microbatches: int) -> int:
        return (self.num_stages - 1 - rank) * (1 + math.ceil(2 * self.latency / 3))


class ZeroBubble(LateWeightGradients):
    """ZB-H1: 1F1B in which weight gradients fill a part of the bubble, with the memory of 1F1B.

    With ``p`` stages, (nearly) equal costs ``f``, ``i``, ``w``, and ``m >= p``: makespan
    ``m (f + i + w) + (p - 1)(f + i - w)``; every stage holds at most ``min(m, p)`` microbatches.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(ZeroBubble(4), 5))
    rank 0 |F0-F1-F2-F3-.........B0====F4-B1====B2====B3====B4====
    rank 1 |...F0-F1-F2-......I0~F3-I1~W0:F4-I2~W1:I3~W2:I4~W3:W4:
    rank 2 |......F0-F1-...I0~F2-I1~F3-I2~W0:F4-I3~W1:I4~W2:W3:W4:
    rank 3 |.........F0-I0~F1-I1~F2-I2~F3-I3~W0:F4-I4~W1:W2:W3:W4:
    """

    def warmup(self, rank: int, num_microbatches: int) -> int:
        return self.num_stages - 1 - rank

    def lag(self, stage: int) -> int:
        return stage


class ZeroBubbleH2(ForLatency, LateWeightGradients):
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
        latency: time of a transfer as a fraction of a stage's forward, 0 or more.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(ZeroBubbleH2(3), 6))
    rank 0 |F0-F1-F2-F3-F4-B0====F5-B1====B2====B3====B4====B5====......
    rank 1 |...F0-F1-F2-I0~F3-I1~F4-I2~W0:F5-I3~W1:I4~W2:I5~W3:W4:W5:...
    rank 2 |......F0-I0~F1-I1~F2-I2~F3-I3~F4-I4~W0:F5-I5~W1:W2:W3:W4:W5:
    """

    def warmup(self, rank: int, num_microbatches: int) -> int:
        hops = self.num_stages - 1 - rank
        return math.floor(2 * hops + 2 * hops * self.latency)

    def lag(self, stage: int) -> int:
        return self.warmup(self.num_stages - 1 - stage, 0)
