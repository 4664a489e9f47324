"""Schedules as JaxPP's programs write, print and subclass them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp_flax.api as jaxpp
from jaxpp_flax.api.schedules import own_schedule
from jaxpp_flax.schedules import CustomSchedule, ScheduleError
from tests.engine.toys import chain, chain_loss, mesh_of
from tests.helpers import tree_allclose

FWD, BWD, BWD_I, BWD_W = jaxpp.TaskType
MICROBATCHES = 4


def printed(schedule: Any, microbatches: int) -> list[list[str]]:
    return [[str(task) for task in tasks] for tasks in schedule.tasks(microbatches)]


@dataclasses.dataclass(eq=True, frozen=True)
class SkewedGPipe(jaxpp.BaseSchedule):
    """In clock cycles, with None where a stage idles."""

    def tasks(self, n_mubatches: int) -> jaxpp.ScheduleTasks:
        half = n_mubatches + self.num_stages - 1
        rows: jaxpp.ScheduleTasks = [[None] * (2 * half) for _ in range(self.num_stages)]
        for stage, row in enumerate(rows):
            for m in range(n_mubatches):
                row[stage + m] = jaxpp.Task.make(stage, m, FWD)
                row[half + self.num_stages - 1 - stage + m] = jaxpp.Task.make(stage, m, BWD, latency=3)
        return rows


@dataclasses.dataclass(eq=True, frozen=True)
class Folded(jaxpp.InterleavedBaseSchedule):
    """Two stages on each rank, there and back again, with tasks fused across microbatches and a split backward."""

    def get_mpmd_idx(self, stage_id: int) -> int:
        return min(stage_id, self.num_stages - 1 - stage_id)

    def tasks(self, n_mubatches: int) -> jaxpp.ScheduleTasks:
        rows: jaxpp.ScheduleTasks = []
        for rank in range(self.mpmd_dim):
            near, far = rank, self.num_stages - 1 - rank
            row: list[Any] = []
            for m in range(n_mubatches):
                row += [jaxpp.Task.make(near, m, FWD), jaxpp.Task.make(far, m, FWD)]
                halves = (jaxpp.Task.make(stage, m, kind) for stage in (far, near) for kind in (BWD_I, BWD_W))
                row.append(jaxpp.FusedTask(halves))
            rows.append(row)
        return rows


class LateBackward(jaxpp.BaseSchedule):
    """Two stages; the second one runs the forward of the next microbatch with each backward, as one task."""

    def tasks(self, n_mubatches: int) -> jaxpp.ScheduleTasks:
        task = jaxpp.Task.make
        first: list[Any] = [task(0, m, FWD) for m in range(n_mubatches)] + [task(0, m, BWD) for m in range(n_mubatches)]
        pairs = [jaxpp.FusedTask((task(1, m + 1, FWD), task(1, m, BWD))) for m in range(n_mubatches - 1)]
        return [first, [task(1, 0, FWD), *pairs, task(1, n_mubatches - 1, BWD)]]


def test_printed_forms():
    task = jaxpp.Task.make(2, 5, BWD_I)
    assert (task.stage_id, task.mubatch_idx, task.fwd_or_bwd, task.latency) == (2, 5, BWD_I, 1)
    assert str(task) == "bwdA_2__5"
    assert str(jaxpp.Task.make(0, 1, BWD_W)) == "bwdW_0__1"
    assert repr(task) == "Task(stage_id=2, mubatch_idx=5, fwd_or_bwd=TaskType.BWD_I, latency=1)"
    assert jaxpp.Task.make(2, 5, BWD_I, latency=7) == task  # the latency is no part of its identity
    assert [kind.default_latency for kind in jaxpp.TaskType] == [1, 2, 1, 1]
    assert jaxpp.FusedTask((task, task)).latency == 2
    assert printed(jaxpp.Interleaved1F1B(num_stages=4, mpmd_dim=4), 4)[2:] == [
        ["fwd_2__0", "fwd_2__1", "fwd_2__2", "bwd_2__0", "fwd_2__3", "bwd_2__1", "bwd_2__2", "bwd_2__3"],
        [f"FusedTask(fwd_3__{m}, bwd_3__{m})" for m in range(4)],
    ]
    assert printed(jaxpp.Eager1F1B(2), 2)[1] == ["fwd_1__0", "bwd_1__0", "fwd_1__1", "bwd_1__1"]
    assert printed(jaxpp.KimiK2(num_stages=4, mpmd_dim=2), 2)[1] == [
        "fwd_1__0", "fwd_1__1", "fwd_3__0", "FusedTask(fwd_3__1, bwd_3__0)", "bwd_3__1", "bwd_1__0", "bwd_1__1",
    ]  # fmt: skip
    assert printed(jaxpp.ZeroBubble(2), 2)[0][-2:] == ["bwdA_0__1", "bwdW_0__1"]


@pytest.mark.parametrize("fuse", [False, True])
def test_a_fused_steady_state_is_only_listed_differently(fuse: bool):
    schedule = jaxpp.Interleaved1F1B(4, 2, fuse)
    (rank, _) = schedule.tasks(4)
    assert any(isinstance(task, jaxpp.FusedTask) for task in rank) == fuse
    assert own_schedule(schedule, 4).tasks(4) == own_schedule(jaxpp.Interleaved1F1B(4, 2), 4).tasks(4)


def test_fields_are_those_of_jaxpp():
    fields = {field.name: field.init for field in dataclasses.fields(jaxpp.BaseSchedule)}
    assert fields == {"num_stages": True, "is_partial_bwd": False}
    assert SkewedGPipe(3) == SkewedGPipe(num_stages=3) != SkewedGPipe(2)
    assert len({SkewedGPipe(3), SkewedGPipe(3), jaxpp.GPipe(3)}) == 2
    assert not jaxpp.Std1F1B(2).is_partial_bwd
    for splits in (jaxpp.ZeroBubble(2), jaxpp.DualPipeV(4, 2)):
        assert splits.is_partial_bwd
    assert [jaxpp.DualPipeV(4, 2).get_mpmd_idx(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert issubclass(jaxpp.KimiK2, jaxpp.InterleavedBaseSchedule)
    assert not isinstance(jaxpp.GPipe(2), jaxpp.InterleavedBaseSchedule)


@pytest.mark.parametrize(
    "schedule",
    [SkewedGPipe(2), Folded(4, 2), LateBackward(2), jaxpp.ZeroBubble(2)],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_schedule_written_for_jaxpp_runs(schedule: Any):
    params = chain(schedule.num_stages)
    batch = {
        name: jnp.asarray(np.random.default_rng(seed).normal(size=(MICROBATCHES, 2, params[0]["b"].size)), jnp.float32)
        for seed, name in enumerate("xy")
    }

    def step(params: Any, batch: Any) -> Any:
        return jaxpp.treduce(lambda data: jax.value_and_grad(chain_loss)(params, data), batch, schedule=schedule)

    plain = jax.jit(step)(params, batch)
    piped = jaxpp.mpmd_jit_with_loop(step, mesh_of(2))(params, batch)
    # One microbatch's gradient is the same computation; the sums over four of them may be in another order.
    tree_allclose(jax.tree.map(np.asarray, piped), plain, rtol=1e-6)


def test_treduce_i_takes_them_too():
    def step(xs: jax.Array) -> Any:
        return jaxpp.treduce_i(lambda i: xs[i], MICROBATCHES, SkewedGPipe(1), operation=jaxpp.Add)

    assert float(jaxpp.mpmd_jit_with_loop(step, mesh_of(1))(jnp.arange(4.0))) == 6.0


class WrongRank(LateBackward):
    def get_mpmd_idx(self, stage_id: int) -> int:
        return 1 - stage_id


class Strings(LateBackward):
    def tasks(self, n_mubatches: int) -> Any:
        return [["fwd_0__0"], []]


def test_what_is_refused():
    with pytest.raises(
        ScheduleError, match=r"WrongRank.tasks lists stage 0 on rank 0, but WrongRank.get_mpmd_idx\(0\)"
    ):
        own_schedule(WrongRank(2), 2)
    with pytest.raises(ScheduleError, match=r"Strings.tasks lists 'fwd_0__0' for rank 0\. Its items are `Task`s"):
        own_schedule(Strings(2), 2)
    with pytest.raises(ScheduleError, match="num_stages must be at least 1, got -1"):
        jaxpp.Std1F1B(-1)
    with pytest.raises(ScheduleError, match="mpmd_dim must be at least 1, got -1"):
        jaxpp.Interleaved1F1B(2, -1)
    with pytest.raises(ScheduleError, match="num_stages=2 can not be evenly divided by mpmd_dim=3"):
        Folded(2, 3)
    with pytest.raises(ScheduleError, match="DualPipeV"):
        jaxpp.DualPipeV(num_stages=4, mpmd_dim=4)
    with pytest.raises(ScheduleError, match="DualPipeV requires n_mubatches=5 >= num_stages=6"):
        own_schedule(jaxpp.DualPipeV(num_stages=6, mpmd_dim=3), 5)


def test_this_packages_schedules_stay_as_they_are():
    mine = CustomSchedule(own_schedule(jaxpp.GPipe(2), 2).tasks(2))
    assert own_schedule(mine, 2) is mine
    assert own_schedule(None, 2) is None
