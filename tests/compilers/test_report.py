"""What real compilers say of a step is read: their bytes, collectives, seconds, and their refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.engine.runtime.refusals import TaskMemoryError
from jaxpp_flax.planning import compiler_report
from tests.compilers.machines import ONE_HOST, TWO_HOSTS, mesh_of

pytestmark = pytest.mark.compilers

WIDTH, LAYERS = 256, 4


def compiled(machine: str, axes: dict[str, int], width: int = WIDTH) -> Any:
    def linear(rngs: nnx.Rngs) -> nnx.Linear:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("fsdp", "tensor"))
        return nnx.Linear(width, width, use_bias=False, kernel_init=init, rngs=rngs)

    def model(rngs: nnx.Rngs) -> nnx.Sequential:
        return nnx.Sequential(*[PipelineStage(nnx.Sequential(linear(rngs), jnp.tanh)) for _ in range(LAYERS)])

    trainer = PipelineTrainer(
        model, optax.adam(1e-3), lambda model, x: jnp.mean(model(x) ** 2), num_stages=axes["stage"],
        num_microbatches=4, mesh=mesh_of(machine, axes), logging=False,
    )  # fmt: skip
    return trainer.compile(jax.ShapeDtypeStruct((512, width), jnp.float32))


@pytest.mark.parametrize("machine", [ONE_HOST[0], ONE_HOST[1]])
def test_one_host(machine: str):
    report = compiler_report(compiled(machine, {"stage": 2, "fsdp": 2, "tensor": 1}))
    of_a_rank = LAYERS // 2 * WIDTH * WIDTH * 4 // 2
    assert report.fits is True
    for rank in report.ranks:
        assert rank.kinds["parameters"] == of_a_rank
        # Adam's two moments, and its count in a tile; the sums of gradients, and of the loss.
        assert 0 <= rank.kinds["optimizer state"] - 2 * of_a_rank <= 1024
        assert 0 <= rank.kinds["accumulators"] - of_a_rank <= 4096
        assert rank.kinds["workspace"] > 0
    gathers = [of for task in report.tasks for of in task.exchanges if of.kind == "all-gather"]
    assert gathers
    assert {of.axes for of in gathers} == {("fsdp",)}
    # An update gives its parameters, its moments and its gradients away, and copies nothing.
    updates = [task for task in report.tasks if task.aliased_bytes >= 3 * of_a_rank]
    assert {rank for task in updates for rank in task.ranks} == {0, 1}
    # The compiler of NVIDIA copies the sum of the loss, one number, in front of its all-reduce.
    assert not [copy for task in updates for copy in task.copies if copy.nbytes > 4]
    if machine.startswith("tpu"):
        assert report.seconds is not None
        assert 1e-6 < report.seconds < 1e-1
        assert all(task.code_bytes > 0 for task in report.tasks)


@pytest.mark.parametrize("machine", [TWO_HOSTS[0], TWO_HOSTS[1]])
def test_two_hosts_and_three_axes(machine: str):
    report = compiler_report(compiled(machine, {"stage": 1, "data": 2, "fsdp": 2, "tensor": 2}))
    joined = {(of.kind, of.axes) for task in report.tasks for of in task.exchanges}
    assert ("all-gather", ("fsdp",)) in joined
    assert any("data" in axes for _, axes in joined)
    assert any("tensor" in axes for _, axes in joined)
    assert all(axes for _, axes in joined)


def test_a_refusal_of_libtpu_names_rank_and_task():
    with pytest.raises(TaskMemoryError, match=r"^rank \d: the compiler refuses task \w+, .* TPU v5 lite: it needs"):
        compiled(ONE_HOST[0], {"stage": 4, "fsdp": 1, "tensor": 1}, width=65536)
