"""Schedules with two stages per rank in a V: the rank of the first stage has the last one too."""

from __future__ import annotations

import abc
from collections.abc import Iterator

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.schedule import Schedule, StreamedSchedule
from jaxpp_flax.schedules.task import Task, backward, backward_input, backward_weight, forward


class VShaped(StreamedSchedule):
    """Base: rank ``r`` of ``p`` runs stages ``r`` and ``2p - 1 - r``; the backward is split."""

    splits_backward = True

    def __init__(self, num_stages: int, num_ranks: int | None = None) -> None:
        if num_ranks is None and isinstance(num_stages, int):
            num_ranks = -(-num_stages // 2)
        super().__init__(num_stages, num_ranks)

    def _check_ranks(self) -> None:
        if self.num_stages != 2 * self.num_ranks:
            raise ScheduleError(
                f"{type(self).__name__} runs two stages on each rank, got num_stages={self.num_stages} and "
                f"num_ranks={self.num_ranks}. Use {2 * self.num_ranks} stages"
            )

    def rank_of(self, stage: int) -> int:
        return stage if stage < self.num_ranks else self.num_stages - 1 - stage

    @abc.abstractmethod
    def order(self, rank: int, num_microbatches: int) -> Iterator[Task]: ...

    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        # The orders are written for two microbatches for each rank or more. With fewer, the order is made for
        # more, and tasks that do not exist are left out: a legal schedule without some microbatches is legal.
        full = max(num_microbatches, 2 * self.num_ranks)
        return (t for t in self.order(rank, full) if t.microbatch < num_microbatches)


class _Writer:
    """Writes one rank's order, numbering the microbatches of each pass of its two stages.

    Stage 0 has no split backward. Its weight gradient is run with its input gradient, and where an
    order asks for it later, nothing is written.
    """

    def __init__(self, schedule: Schedule, rank: int, num_microbatches: int) -> None:
        self.stages = (rank, schedule.num_stages - 1 - rank)
        self.count = num_microbatches
        self.done = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def _next(self, kind: str, chunk: int) -> int:
        m = self.done[kind, chunk]
        self.done[kind, chunk] = m + 1
        return m

    def f(self, chunk: int) -> Iterator[Task]:
        if self.done["F", chunk] < self.count:
            yield forward(self.stages[chunk], self._next("F", chunk))

    def i(self, chunk: int) -> Iterator[Task]:
        if self.done["I", chunk] < self.count:
            m = self._next("I", chunk)
            stage = self.stages[chunk]
            yield backward_input(stage, m) if stage else backward(stage, m)

    def w(self, chunk: int) -> Iterator[Task]:
        if self.done["W", chunk] < self.done["I", chunk]:
            m = self._next("W", chunk)
            if self.stages[chunk]:
                yield backward_weight(self.stages[chunk], m)

    def iw(self, chunk: int) -> Iterator[Task]:
        yield from self.i(chunk)
        yield from self.w(chunk)

    def rest(self) -> Iterator[Task]:
        """The weight gradients still owed, oldest first."""
        while any(self.done["W", c] < self.done["I", c] for c in (0, 1)):
            chunk = min((0, 1), key=lambda c: (self.done["W", c] >= self.done["I", c], self.done["W", c]))
            yield from self.w(chunk)


class ZBV(VShaped):
    """ZB-V: no idle time between a rank's first task and its last, with the memory of 1F1B.

    A microbatch passes through the ranks from the first to the last and back, so rank 0 also starts
    its backward. Let ``a`` be the first stage of a rank and ``b`` its second. Rank ``r`` runs
    ``2(p - r) - 1`` forwards of ``a``; then ``r`` pairs of a forward of ``b`` and one of ``a``; then
    ``p - r`` triples ``F``, ``I``, ``W`` of ``b``; then ``F``, ``I``, ``W`` of ``a`` and of ``b`` in
    turn; last, the remaining input gradients and weight gradients.

    With ``p`` ranks, stage costs ``f = i = w`` and ``m >= 2p``: makespan ``6 m f + (p - 1) f``,
    of which each rank takes ``6 m f`` from its first task to its last. Every rank holds at most
    ``2p`` microbatch-stages: the memory of ``p`` microbatches in 1F1B, whose stages are twice as long.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241, and
    "Pipeline Parallelism with Controllable Memory", 2024, https://arxiv.org/abs/2405.15362.

    >>> ZBV(4).rank_of(3), ZBV(4).tasks(1)[1]
    (0, [fwd_1__0, fwd_2__0, bwd_i_2__0, bwd_w_2__0, bwd_i_1__0, bwd_w_1__0])
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(ZBV(4), 5))
    rank 0 |F0-F1-F2-f0-i0~w0:f1-i1~w1:F3-B0====f2-i2~w2:F4-B1====f3-i3~w3:B2====f4-i4~w4:B3====B4====...
    rank 1 |...F0-f0-F1-f1-i0~w0:F2-I0~W0:f2-i1~w1:F3-I1~W1:f3-i2~w2:F4-I2~W2:f4-i3~w3:I3~i4~I4~W3:W4:w4:
    """

    def order(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        write = _Writer(self, rank, num_microbatches)
        below = self.num_ranks - rank
        for _ in range(2 * below - 1):
            yield from write.f(0)
        for _ in range(rank):
            yield from write.f(1)
            yield from write.f(0)
        for _ in range(below):
            yield from write.f(1)
            yield from write.iw(1)
        while write.done["F", 1] < num_microbatches or write.done["F", 0] < num_microbatches:
            yield from write.f(0)
            yield from write.iw(0)
            yield from write.f(1)
            yield from write.iw(1)
        for _ in range(rank):
            yield from write.i(0)
            yield from write.i(1)
        for _ in range(below):
            yield from write.i(0)
            yield from write.w(0)
        yield from write.rest()


class DualPipeV(VShaped):
    """One half of DualPipe: each rank runs forwards and backwards of its two stages in turn.

    In the main part, each rank alternates between a forward of one of its stages and a backward of
    the other. If the two run at the same time, the computation of one hides the communication of
    the other, such as the all-to-all of an expert layer.

    With ``p`` ranks, stage costs ``f = i = w`` and ``m >= 2p``, if no two tasks run at the same time:
    makespan ``6 m f + max(0, ceil(3p / 2) - 2) f``; every rank holds at most ``2p + 1``
    microbatch-stages. Any number of microbatches is legal; ``2p`` or more fill the pipeline.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, https://arxiv.org/abs/2412.19437; the V
    shape is that of Qi et al., "Pipeline Parallelism with Controllable Memory", 2024,
    https://arxiv.org/abs/2405.15362.

    >>> DualPipeV(2, 1).tasks(2)[0][:4]
    [fwd_0__0, fwd_1__0, fwd_0__1, bwd_i_1__0]
    >>> from jaxpp_flax.schedules.tools.drawing import sketch
    >>> print(sketch(DualPipeV(4), 5))
    rank 0 |F0-F1-F2-f0-i0~w0:f1-F3-i1~w1:f2-B0====F4-i2~w2:f3-B1====i3~w3:f4-B2====i4~w4:B3====...B4====
    rank 1 |...F0-f0-F1-f1-F2-i0~w0:f2-I0~W0:F3-i1~w1:f3-I1~W1:F4-i2~w2:f4-I2~W2:i3~w3:I3~W3:i4~I4~W4:w4:
    """

    def order(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        write = _Writer(self, rank, num_microbatches)
        below = self.num_ranks - rank - 1
        for _ in range(2 * below):
            yield from write.f(0)
        for _ in range(rank + 1):
            yield from write.f(0)
            yield from write.f(1)
        for _ in range(below):
            yield from write.iw(1)
            yield from write.f(1)
        for _ in range(num_microbatches - 2 * self.num_ranks + rank + 1):
            yield from write.f(0)
            yield from write.iw(1)
            yield from write.f(1)
            yield from write.iw(0)
        for _ in range(below):
            yield from write.iw(1)
            yield from write.f(1)
            yield from write.iw(0)
        # From the middle of the way up, weight gradients are kept back to fill the end.
        late = (rank + 1) // 2
        for k in range(rank + 1):
            held = (k >= late, rank % 2)
            yield from write.i(1) if held == (True, 1) else write.iw(1)
            yield from write.i(0) if held == (True, 0) else write.iw(0)
        for _ in range(below):
            yield from write.w(1) if write.done["W", 1] < write.done["I", 1] else write.w(0)
            yield from write.i(0)
        yield from write.rest()
