"""Processes that are asked to stop at moments of their own agree on one step."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp_flax.processes import ProcessGroup
from jaxpp_flax.trainers.callbacks.stop import CommonStop, StopReason
from tests.engine.stores import MemoryStore


@given(seed=st.integers(0, 2**32 - 1), processes=st.integers(2, 4), asked=st.integers(1, 4))
@settings(max_examples=200)
def test_all_processes_stop_after_the_same_step(seed: int, processes: int, asked: int):
    """Processes up to three steps apart, some of them asked to stop, at moments of their own."""
    rng = random.Random(seed)
    store = MemoryStore()
    stops = [CommonStop(ProcessGroup(store, index, processes)) for index in range(processes)]
    signals = {rng.randrange(processes): rng.randrange(6) for _ in range(asked)}  # process -> step
    steps, ended = [0] * processes, [False] * processes
    while not all(ended):
        slowest = min(step for step, end in zip(steps, ended, strict=True) if not end)
        able = [i for i in range(processes) if not ended[i] and steps[i] < slowest + 3]
        index = rng.choice(able)
        steps[index] += 1
        requested = StopReason("preempted") if steps[index] >= signals.get(index, 1000) else None
        ended[index] = stops[index].after(steps[index], requested) is not None
        assert steps[index] < 100
    assert len(set(steps)) == 1
    assert steps[0] <= min(signals.values()) + 8
