"""What is compiled, and how often: counts that must not grow with the microbatches or be repeated by a second step."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxpp_flax._compat_executables import Original, compile_original
from jaxpp_flax.engine.arrays.mesh import canonical
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.pipeline import CompiledPipeline
from jaxpp_flax.engine.program.program import Run
from jaxpp_flax.engine.runtime import executables as compile_module
from jaxpp_flax.engine.runtime import task_compiler
from jaxpp_flax.engine.tracing.treduce import treduce
from jaxpp_flax.schedules import Schedule, Std1F1B
from tests.engine.toys import chain, chain_loss, gradients, mesh_of, sgd_step
from tests.helpers import batch_of, cache_on_disk, slow, tree_allclose


def compiled_loop(num_stages: int, num_microbatches: int) -> CompiledPipeline:
    """Losses and gradients, with nothing around the loop."""
    return compiled_for(chain(num_stages), batch_of(num_microbatches))


def compiled_for(params: Any, batch: Any) -> CompiledPipeline:
    """The same, where making the arguments shall not count."""
    num_stages = len(params)

    return mpmd_jit_with_loop(gradients(Std1F1B(num_stages)), mesh_of(num_stages)).compile(params, batch)


@pytest.fixture(scope="module")
def three_of_four() -> CompiledPipeline:
    return compiled_loop(3, 4)


def test_each_distinct_task_is_lowered_and_compiled_once(
    three_of_four: CompiledPipeline, monkeypatch: pytest.MonkeyPatch
):
    """First, middle and last stage differ in forward and backward (the last one's are fused), and in accumulators."""
    forward, backward, initial, ranks = 3, 2, 2, 3
    counts = three_of_four.compiler
    assert counts.compilations == counts.lowerings == forward + backward + initial
    # For each rank accumulators, forward and backward; the last stage is fused. Copies for other devices are included.
    assert counts.executables == 3 * ranks - 1 == len(three_of_four.program.tasks)
    assert compiled_loop(4, 4).compiler.lowerings == counts.lowerings, "identical middle stages share their lowering"
    monkeypatch.setattr(Original, "_copy_for", lambda *_: None)  # as where executables cannot be copied
    compiled = compiled_loop(3, 4)
    assert compiled.compiler.compilations == compiled.compiler.executables == counts.executables


def test_nothing_but_the_tasks_is_compiled():
    """No second compilation of the whole program to find shardings: XLA sees each task once, and nothing larger."""
    names: list[str] = []

    def listen(event: str, seconds: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(more.get("fun_name", ""))

    compiled_loop(2, 5)  # what placing indices takes of JAX is compiled by then
    arguments = chain(2), batch_of(5)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        compiled = compiled_for(*arguments)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(names) == compiled.compiler.compilations, names


@pytest.fixture
def persistent_cache(tmp_path: Path) -> Iterator[None]:
    """JAX's cache on disk, new and empty, for quick compilations too."""
    with cache_on_disk(tmp_path):
        yield


@pytest.mark.usefixtures("persistent_cache")
def test_a_second_start_finds_every_executable_in_the_persistent_cache():
    events: Counter[str] = Counter()

    def listen(event: str, **more: Any) -> None:
        events[event.rpartition("/")[2]] += 1

    arguments = chain(2), batch_of(6)
    jax.monitoring.register_event_listener(listen)
    try:
        jax.clear_caches()  # what earlier tests compiled is not on disk
        first = compiled_for(*arguments)
        assert events["cache_misses"] >= first.compiler.compilations
        events.clear()
        jax.clear_caches()  # whatever is traced and lowered again must come out the same
        second = compiled_for(*arguments)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert second.compiler.compilations == first.compiler.compilations
    assert (events["cache_misses"], events["cache_hits"] >= second.compiler.compilations) == (0, True)


def test_nothing_grows_with_the_microbatches(three_of_four: CompiledPipeline, monkeypatch: pytest.MonkeyPatch):
    """Nor what is found out for values before the first step: all microbatches share that."""
    looked_at: list[Any] = []

    def counted(spec: Any) -> Any:
        looked_at.append(spec)
        return canonical(spec)

    monkeypatch.setattr(compile_module, "canonical", counted)
    found = []
    for microbatches in (8, 24):
        looked_at.clear()
        more = compiled_loop(3, microbatches)
        found.append([len(looked_at), len({id(held) for held in more.executables.held.values()})])
    assert found[0] == found[1]
    for name in ("lowerings", "executables"):
        assert getattr(more.compiler, name) == getattr(three_of_four.compiler, name)
    assert len(more.program.tasks) == len(three_of_four.program.tasks)
    runs = [sum(isinstance(i, Run) for i in c.program.instructions) for c in (three_of_four, more)]
    assert runs == [3 + 4 * 5, 3 + 24 * 5]  # accumulators once, five tasks for each microbatch


@pytest.mark.parametrize(
    ("kind", "context"),
    [(None, lambda: jax.default_matmul_precision("float32")), (AxisType.Explicit, nullcontext)],
    ids=["one device, in a context", "explicit"],
)
def test_distinct_tasks_compile_side_by_side(kind: AxisType | None, context: Any, monkeypatch: pytest.MonkeyPatch):
    """The first forward does not end before the update and a backward have begun, where XLA chooses no shardings.

    Also inside of a context of this thread alone, which is a part of what was traced.
    """
    mesh = mesh_of(3, data=1) if kind is None else mesh_of(3, kind, data=2)
    wanted = {"outer_0", "bwd_0"}  # the update comes after the loop
    begun, all_begun = list[str](), threading.Event()

    def compile_later(lowered: Any, *more: Any) -> Any:
        name = lowered.as_text().partition("\n")[0]
        begun.append(name)
        if all(any(part in each for each in begun) for part in wanted):
            all_begun.set()
        if "fwd_0" in name:
            assert all_begun.wait(60), f"the forward waits for {wanted}, but only these are compiled: {begun}"
        return compile_original(lowered, *more)

    monkeypatch.setattr(task_compiler, "compile_original", compile_later)
    for name in ("cpu_count", "process_cpu_count"):  # threads
        monkeypatch.setattr(os, name, lambda: 8, raising=False)

    params, batch = chain(3), batch_of(4)
    batched = {name: PartitionSpec(None, "data") for name in batch}
    pipelined = mpmd_jit_with_loop(sgd_step(Std1F1B(3)), mesh, in_specs=(None, batched))
    with context():
        compiled = pipelined.compile(params, batch)
    assert compiled.compiler.compilations == compiled.compiler.lowerings == len(begun)
    # float32, and sums over two devices in another order
    tree_allclose(compiled(params, batch), jax.jit(sgd_step(None))(params, batch), rtol=1e-5, atol=1e-6)


def test_a_leaf_of_the_state_takes_few_calls_of_python():
    """Beside the tasks, a step looks at each array of its state: two or three hundred in an optimizer's state."""

    def step(state: Any, batch: Any) -> Any:
        params, more = state
        params, losses, _ = sgd_step(Std1F1B(2))(params, batch)
        return (params, [x + 1 for x in more]), losses

    def calls(num_leaves: int) -> int:
        pipelined = mpmd_jit_with_loop(step, mesh_of(2))
        state, batch = (chain(2), [jnp.ones(2)] * num_leaves), batch_of(2)
        for _ in range(3):  # the third has seen the second one's results
            state, _losses = pipelined(state, batch)
        count = 0

        def counting(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(counting)
        try:
            pipelined(state, batch)
        finally:
            sys.setprofile(None)
        return count

    # The call's key has its type and layout; it is placed, and made anew as a result: some microseconds.
    assert calls(50) - calls(10) <= 40 * 20


class Counting:
    """A step that counts how often Python runs it: once for each trace."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.traces = schedule, 0

    def __call__(self, params: Any, count: Any, batch: Any) -> Any:
        self.traces += 1
        losses, grads = gradients(self.schedule)(params, batch)
        rate = 0.1 / (1 + count)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), count + 1, losses


@pytest.mark.parametrize("count", [0, slow(np.int32(0)), jnp.int32(0)], ids=["int", "numpy", "jax"])
def test_the_second_step_compiles_nothing(count: Any):
    """A Python int is weakly typed; what the step returns for it is an array, and must fit the same executables."""
    counting = Counting(Std1F1B(2))
    step = mpmd_jit_with_loop(counting, mesh_of(2))
    params, batch = chain(2), batch_of(2)
    compiled = step.compile(params, count, batch)
    executables = compiled.compiler.executables
    for number in range(1, 4):
        params, count, _ = step(params, count, batch)
        assert int(count) == number
        assert step.compile(params, count, batch) is compiled
    assert counting.traces == 1
    assert compiled.compiler.executables == executables


def test_a_new_signature_traces_again_and_reuses_equal_tasks():
    """Another number of microbatches changes only the tasks that read the batch."""
    counting = Counting(Std1F1B(3))
    step = mpmd_jit_with_loop(counting, mesh_of(3))
    compiled = step.compile(chain(3), 0, batch_of(2))
    lowerings, executables = compiled.compiler.lowerings, compiled.compiler.executables
    step.compile(chain(3), 0, batch_of(3))
    assert counting.traces == 2
    # The first stage's two tasks read its inputs, the last one's the targets, whose accumulator stacks the losses.
    assert compiled.compiler.lowerings - lowerings == 4
    assert compiled.compiler.executables - executables == 4


def test_static_arguments_are_part_of_the_signature():
    traces = []

    def step(params: Any, batch: Any, scale: float) -> Any:
        traces.append(scale)
        return treduce(lambda mb: (chain_loss(params, mb) * scale, jnp.int32(1)), batch, Std1F1B(2))

    pipelined = mpmd_jit_with_loop(step, mesh_of(2), static_argnums=2)
    for scale in (1.0, 2.0, 1.0):
        pipelined(chain(2), batch_of(2), scale)
    assert traces == [1.0, 2.0]
