"""`precision="bfloat16"` on described machines: products read bfloat16 alone; what is summed up stays float32."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from jaxpp_flax._compat_xla.programs import ProgramText
from jaxpp_flax.planning.compilers.tasks import read_task
from tests.compilers.machines import ONE_HOST
from tests.compilers.small import PARAMETER_BYTES, around_loop, compiled_for, moved, told

pytestmark = pytest.mark.compilers


def operands_of_products(text: ProgramText) -> Iterator[list[str]]:
    """Yield the types of what each product reads; a library's product has a target that names it."""
    for operations in text.computations.values():
        types = {op.name: op.type for op in operations}
        for op in operations:
            if op.opcode in ("dot", "convolution") or "$matmul" in op.rest or "$gemm" in op.rest:
                yield [types[name] for name in op.operands[:2]]


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
    assert moved(around_loop(told(compiled))) == {("all-reduce", ("data",)): 2 * PARAMETER_BYTES}  # in float32
