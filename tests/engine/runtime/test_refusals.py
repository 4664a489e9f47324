"""A task that is too large for a compiler is named, with its rank and what is large in it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.runtime import task_compiler
from jaxpp_flax.engine.runtime.refusals import TaskMemoryError
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from tests.engine.toys import mesh_of

SHORT = (
    "Ran out of memory on HBM, the total memory required for HLO temporaries (18.00G) exceeds available HBM (15.75G)."
)
LONG = """Ran out of memory in memory space hbm. Used 18.00G of 15.75G hbm. Exceeded hbm capacity by 2.25G.

  Largest program allocations in hbm:

  1. Size: 4.00G
     Shape: f32[32768,32768]{1,0:T(8,128)}
"""


def compile_two_stages() -> None:
    def forward(w, x):
        return mark_stage_end(x @ w[0]) @ w[1]

    mpmd_jit(forward, mesh_of(2)).compile([jnp.eye(2), jnp.zeros((2, 512))], jnp.ones((1, 2)))


def refuse_with(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    compile_original = task_compiler.compile_original

    def refuse(lowered, devices, options):
        if "fwd_1" in lowered.as_text():
            raise jax.errors.JaxRuntimeError(message)
        return compile_original(lowered, devices, options)

    monkeypatch.setattr(task_compiler, "compile_original", refuse)


@pytest.mark.parametrize(
    ("message", "largest"),
    [
        (SHORT, r"4\.1 kB float32\[2, 512\], an input; 8 B float32\[1, 2\], an input"),
        (LONG, r"4\.29 GB f32\[32768,32768\]\{1,0:T\(8,128\)\}"),
    ],
)
def test_the_rank_and_the_task_are_named(monkeypatch: pytest.MonkeyPatch, message: str, largest: str):
    refuse_with(monkeypatch, f"RESOURCE_EXHAUSTED: {message}")
    needed = r"it needs 19\.3 GB of 16\.9 GB, 2\.42 GB too much"
    text = rf"^rank 1: the compiler refuses task fwd_1, .* one cpu: {needed}\. Its largest buffers: {largest}\. Use"
    with pytest.raises(TaskMemoryError, match=text) as caught:
        compile_two_stages()
    assert (caught.value.rank, caught.value.task, caught.value.excess) == (1, "fwd_1", 2.25 * 2**30)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_errors_of_a_compiler_stay(monkeypatch: pytest.MonkeyPatch):
    refuse_with(monkeypatch, "INTERNAL: no such instruction")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL: no such instruction$"):
        compile_two_stages()
