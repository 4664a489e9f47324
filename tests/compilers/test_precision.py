"""`precision="bfloat16"` on described machines: products read bfloat16 alone; what is summed up stays float32."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from jaxpp_flax.planning.compilers.tasks import read_task
from tests.compilers.machines import ONE_HOST
from tests.compilers.small import PARAMETER_BYTES, around_loop, compiled_for, moved, operands_of_products, told

pytestmark = pytest.mark.compilers


@pytest.mark.parametrize("machine", ONE_HOST)
def test_products_in_bfloat16_and_sums_in_float32(machine: str):
    compiled = compiled_for(machine, {"data": 2}, precision="bfloat16")
    products = 0
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        read = list(operands_of_products(read_task(executable).text))
        assert all(kind.startswith("bf16") for operands in read for kind in operands), task.name
        products += len(read)
        pinned = [task.graph.outputs[output].aval.dtype for output, _ in task.pins]
        assert set(pinned) <= {jnp.dtype(jnp.float32)}, "accumulators, the loss among them"
    # Of each of two blocks: two forwards, their two for the weights; the last needs, and the first lacks, the input's.
    assert products >= 8
    loss = 4
    assert moved(around_loop(told(compiled))) == {("all-reduce", ("data",)): 2 * PARAMETER_BYTES + loss}  # in float32
