"""Kernels written by hand inside a stage, mapped over mesh axes: for TPUs by Mosaic, for GPUs by Triton."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec as P

from jaxpp_flax import PipelineStage, PipelineTrainer
from tests.compilers.machines import TWO_HOSTS, mesh_of
from tests.trainers.models import Chain, squared_error

pytestmark = pytest.mark.compilers

LENGTH, WIDTH, HEADS = 256, 512, 4


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    causal = splash_attention_mask.CausalMask((LENGTH, LENGTH))
    mask = splash_attention_mask.MultiHeadMask([causal] * q.shape[1])
    return jax.vmap(splash_attention_kernel.make_splash_mha_single_device(mask))(q, k, v)


def triton(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # JAX 0.12 points to another package
        from jax.experimental.pallas.ops.gpu import attention

    def swapped(x: jax.Array) -> jax.Array:  # heads and positions
        return jnp.swapaxes(x, 1, 2).astype(jnp.bfloat16)

    blocks = attention.BlockSizes(
        block_q=32, block_k=32, block_q_dkv=32, block_kv_dkv=32, block_q_dq=32, block_kv_dq=32
    )
    found: Any = attention.mha(swapped(q), swapped(k), swapped(v), None, causal=True, block_sizes=blocks)
    return jnp.swapaxes(found, 1, 2).astype(q.dtype)


# The kernel of a machine, and the target of its calls.
KERNELS: dict[str, tuple[Callable[..., jax.Array], str]] = {
    "tpu": (splash, "tpu_custom_call"),
    "h100": (triton, "__gpu$xla.gpu.triton"),
}


class Attention(nnx.Module):
    def __init__(self, kernel: Callable[..., jax.Array], rngs: nnx.Rngs):
        self.kernel = kernel
        self.project = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.project(x).reshape(*x.shape[:2], 3, HEADS, -1)
        q, k, v = (jnp.swapaxes(heads[:, :, i], 1, 2) for i in range(3))
        spec = P("data", "tensor")
        found = jax.shard_map(self.kernel, in_specs=spec, out_specs=spec, check_vma=False)(q, k, v)
        return x + jnp.swapaxes(found, 1, 2).reshape(x.shape)


@pytest.mark.filterwarnings("ignore:.*Triton backend is deprecated:DeprecationWarning")  # of JAX 0.12
@pytest.mark.parametrize("machine", TWO_HOSTS)
def test_a_kernel_over_data_and_heads(machine: str):
    kernel, target = KERNELS[machine.partition("-")[0]]
    x: Any = jax.ShapeDtypeStruct((16, LENGTH, WIDTH), np.float32)
    trainer = PipelineTrainer(
        lambda rngs: Chain(PipelineStage(Attention(kernel, rngs)) for _ in range(2)), optax.sgd(0.1), squared_error,
        num_stages=2, num_microbatches=4, mesh=mesh_of(machine, {"stage": 2, "data": 2, "tensor": 2}),
        assignment="even", logging=False,
    )  # fmt: skip
    compiled = trainer.compile({"x": x, "y": x})
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        if task.stage is not None:
            assert f'custom_call_target="{target}"' in executable.as_text(), task.name
