"""The bubble and memory formulas of the docstrings, against the simulator."""

import itertools
import math

import pytest

from jaxpp_flax.schedules import (
    ZBV,
    Circular,
    CircularReversed,
    Costs,
    DualPipeV,
    Eager1F1B,
    GPipe,
    GPipe1F1BLast,
    Interleaved1F1B,
    InterleavedGPipe,
    KimiK2,
    Std1F1B,
    ZeroBubble,
    ZeroBubbleH2,
    simulate,
)

# Ranks and microbatches: fewer, as many, more of these than of those, a multiple and none.
COUNTS = [*itertools.product([1, 2, 3, 4], [1, 2, 5, 8]), (7, 16)]
TIMES = [(1.0, 1.0, 1.0), (2.0, 2.25, 1.75)]


def run(schedule, m, times=(1.0, 1.0, 1.0), transfer=None):
    f, i, w = times
    return simulate(schedule, Costs(forward=f, backward_input=i, backward_weight=w), transfer, num_microbatches=m)


def test_one_stage_per_rank_and_whole_backward():
    for (p, m), times in itertools.product(COUNTS, TIMES):
        f, b = times[0], times[1] + times[2]
        bounds = {
            GPipe: lambda s, p=p, m=m: m,
            GPipe1F1BLast: lambda s, p=p, m=m: 1 if s == p - 1 else m,
            Std1F1B: lambda s, p=p, m=m: min(m, p - s),
            Eager1F1B: lambda s, p=p, m=m: min(m, 2 * (p - s) - 1),
        }
        for cls, bound in bounds.items():
            step = run(cls(p), m, times)
            assert step.makespan == pytest.approx((m + p - 1) * (f + b)), cls
            assert step.idle == pytest.approx([(p - 1) * (f + b)] * p), cls
            assert step.peak_memory == tuple(bound(s) for s in range(p)), cls


@pytest.mark.parametrize("v", [1, 3])
def test_interleaved(v):
    for (p, m), times in itertools.product(COUNTS, TIMES):
        f, b = times[0], times[1] + times[2]
        step = run(InterleavedGPipe(p * v, p), m, times)
        assert set(step.peak_memory) == {m * v}
        if m >= p:
            assert step.idle == pytest.approx([(p - 1) * (f + b)] * p)
        for cls in (Circular, CircularReversed):
            step = run(cls(p * v, p), m, times)
            assert set(step.peak_memory) == {m * v}
            if m % p == 0:
                assert step.idle == pytest.approx([(p - 1) * (f + b)] * p)
        step = run(Interleaved1F1B(p * v, p), m, times)
        kimi = run(KimiK2(p * v, p), m, times)
        if m % p == 0:
            assert step.idle == pytest.approx([(p - 1) * (f + b)] * p)
            for extra, held in enumerate((step.peak_memory, kimi.peak_memory)):
                bound = tuple(min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1 + extra) for r in range(p))
                assert held == bound


def test_zero_bubble():
    for (p, m), times in itertools.product(COUNTS, [TIMES[0], (1.0, 1.5, 0.5)]):
        f, i, w = times
        work = m * (f + i + w)
        h1, h2 = run(ZeroBubble(p), m, times), run(ZeroBubbleH2(p), m, times)
        assert all(held <= min(m, p) for held in h1.peak_memory)
        assert all(held <= min(m, 2 * p - 1) for held in h2.peak_memory)
        if m >= p:
            assert h1.makespan == pytest.approx(work + (p - 1) * (f + i - w))
        if m >= 2 * p - 1 and f == i == w:
            assert h2.makespan == pytest.approx(work + (p - 1) * f)
            assert h2.period == pytest.approx(work)
            assert h2.steady_bubble == pytest.approx(0.0)


def test_v_shaped():
    for p, m in COUNTS:
        zbv, dual = run(ZBV(2 * p), m), run(DualPipeV(2 * p), m)
        assert max(zbv.peak_memory) <= 2 * p
        assert max(dual.peak_memory) <= 2 * p + 1
        if m >= 2 * p:
            assert zbv.makespan == 6 * m + p - 1
            assert zbv.period == 6 * m
            assert dual.makespan == 6 * m + max(0, (3 * p + 1) // 2 - 2)


def test_latency_hiding():
    for p, latency in itertools.product([2, 4, 8], [0.0, 0.5, 1.0, 1.5]):
        m = 16 * p
        hidden = run(Eager1F1B(p, latency=latency), m, transfer=latency)
        standard = run(Std1F1B(p), m, transfer=latency)
        assert hidden.makespan == pytest.approx(3 * m + (p - 1) * (3 + 2 * latency))
        assert hidden.peak_memory == tuple((p - 1 - s) * (1 + math.ceil(2 * latency / 3)) + 1 for s in range(p))
        assert hidden.makespan <= standard.makespan
        assert Eager1F1B(p, latency=0.0).tasks(m) == Std1F1B(p).tasks(m)
        assert Eager1F1B(p).tasks(m) == Eager1F1B(p, latency=0.1).tasks(m)
        h2 = run(ZeroBubbleH2(p, latency=latency), m, transfer=latency)
        assert h2.makespan == pytest.approx(3 * m + (p - 1) * (1 + latency))
        assert h2.period == pytest.approx(3 * m)


def test_order_of_merit():
    """The reason for each of them, in one place."""
    steps = {cls: run(cls(4), 16) for cls in (GPipe, Std1F1B, ZeroBubble, ZeroBubbleH2)}
    assert steps[ZeroBubble].bubble < steps[Std1F1B].bubble == steps[GPipe].bubble
    assert steps[ZeroBubbleH2].steady_bubble < steps[ZeroBubble].steady_bubble
    assert max(steps[ZeroBubble].peak_memory) == max(steps[Std1F1B].peak_memory)
