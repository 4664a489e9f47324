"""Schedules with two stages per rank in a V: the rank of the first stage has the last one too."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterator

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.schedule import StreamedSchedule
from jaxpp_flax.schedules.task import Task, TaskKind, backward


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
    def order(self, rank: int, num_microbatches: int) -> str:
        """Return the passes of a rank in their order, with a space after each: ``F0 F0 F1 I1 W1``.

        The number is 0 for the rank's first stage and 1 for its second one. Each pass is of the next microbatch. The
        weight gradients that are not there follow at the end, oldest first.
        """

    def rank_tasks(self, rank: int, num_microbatches: int) -> Iterator[Task]:
        # The orders are written for two microbatches for each rank or more. With fewer, the order is made for
        # more, and tasks that do not exist are left out: a legal schedule without some microbatches is legal.
        stages, count = (rank, self.num_stages - 1 - rank), max(num_microbatches, 2 * self.num_ranks)
        passes = self.order(rank, count).split()
        late = sorted((m, name) for name in ("W0", "W1") for m in range(passes.count(name), count))
        done: Counter[str] = Counter()
        for name in (*passes, *(name for _, name in late)):
            kind, stage, m = TaskKind(name[0]), stages[int(name[1])], done[name]
            done[name] += 1
            if m >= num_microbatches:
                continue
            if stage or kind is TaskKind.FORWARD:
                yield Task(kind, stage, m)
            elif kind is TaskKind.BACKWARD_INPUT:  # stage 0 has no split backward
                yield backward(stage, m)


class ZBV(VShaped):
    """ZB-V: no idle time between a rank's first task and its last, with the memory of 1F1B.

    A microbatch passes through the ranks from the first to the last and back, so rank 0 also starts
    its backward.

    With ``p`` ranks, stage costs ``f = i = w`` and ``m >= 2p``: makespan ``6 m f + (p - 1) f``,
    of which each rank takes ``6 m f`` from its first task to its last. Every rank holds at most
    ``2p`` microbatch-stages: the memory of ``p`` microbatches in 1F1B, whose stages are twice as long.

    Qi et al., "Zero Bubble Pipeline Parallelism", 2023, https://arxiv.org/abs/2401.10241, and
    "Pipeline Parallelism with Controllable Memory", 2024, https://arxiv.org/abs/2405.15362.

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(ZBV(4), 4))
    rank 0 |F0-F1-F2-f0-i0~w0:f1-i1~w1:F3-B0====f2-i2~w2:B1====f3-i3~w3:B2====B3====...
    rank 1 |...F0-f0-F1-f1-i0~w0:F2-I0~W0:f2-i1~w1:F3-I1~W1:f3-i2~w2:I2~i3~I3~W2:W3:w3:
    """

    def order(self, rank: int, num_microbatches: int) -> str:
        below = self.num_ranks - rank
        return (
            "F0 " * (2 * below - 1)
            + "F1 F0 " * rank
            + "F1 I1 W1 " * below
            + "F0 I0 W0 F1 I1 W1 " * (num_microbatches - self.num_ranks - below + 1)
            + "I0 W0 F1 I1 W1 " * (below - 1)
            + "I0 I1 " * rank
            + "I0 W0 " * below
        )


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

    >>> from jaxpp_flax.schedules import sketch
    >>> print(sketch(DualPipeV(4), 4))
    rank 0 |F0-F1-F2-f0-i0~w0:f1-F3-i1~w1:f2-B0====i2~w2:f3-B1====i3~w3:B2====...B3====
    rank 1 |...F0-f0-F1-f1-F2-i0~w0:f2-I0~W0:F3-i1~w1:f3-I1~W1:i2~w2:I2~W2:i3~I3~W3:w3:
    """

    def order(self, rank: int, num_microbatches: int) -> str:
        below = self.num_ranks - rank - 1
        # From the middle of the way up, weight gradients of one stage are kept back to fill the end.
        middle = (rank + 1) // 2
        kept_back = ["W1"] * middle if rank % 2 else []
        end = (kept_back + ["W0"] * below)[:below]
        return (
            "F0 " * (2 * below)
            + "F0 F1 " * (rank + 1)
            + "I1 W1 F1 " * below
            + "F0 I1 W1 F1 I0 W0 " * (num_microbatches - 2 * self.num_ranks + rank + 1)
            + "I1 W1 F1 I0 W0 " * below
            + "I1 W1 I0 W0 " * middle
            + ("I1 I0 W0 " if rank % 2 else "I1 W1 I0 ") * (rank + 1 - middle)
            + "".join(f"{weight} I0 " for weight in end)
        )
