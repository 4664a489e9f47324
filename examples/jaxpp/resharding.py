"""Weights initialised over all devices, moved to the ranks that use them, and gradients moved back.

Initialising under plain JAX, sharded over the stage axis too, needs the memory of a share of the weights on each
device; `spmd_to_mpmd_reshard` then gives each weight to its stage.

Usage: python examples/jaxpp/resharding.py
"""

import functools

import jax

import jaxpp_flax.api as jaxpp
import jaxpp_flax.api.distributed_utils as jppdu


def main():
    # Of itself, `jax.make_mesh` makes Explicit axes, on which plain JAX too wants `hidden @ w2` told how to be sharded.
    auto = (jax.sharding.AxisType.Auto,) * 3
    spmd_mesh = jax.make_mesh((2, 2, 2), ("stage", "fsdp", "tensor"), axis_types=auto)
    mpmd_mesh = jaxpp.MpmdMesh(spmd_mesh, "stage")
    width = 32
    shardings = [
        jax.sharding.NamedSharding(spmd_mesh, jax.sharding.PartitionSpec(("stage", "fsdp"), "tensor")),
        jax.sharding.NamedSharding(spmd_mesh, jax.sharding.PartitionSpec("tensor", ("stage", "fsdp"))),
        jax.sharding.NamedSharding(spmd_mesh, jax.sharding.PartitionSpec("fsdp", None, None)),
    ]

    @functools.partial(jax.jit, out_shardings=shardings)
    def init_fn(key):
        keys = jax.random.split(key, 3)
        shapes = [(width, 4 * width), (4 * width, width), (4, 8, width)]
        return [jax.random.normal(k, shape) / width for k, shape in zip(keys, shapes, strict=True)]

    w1, w2, x = init_fn(jax.random.key(0))
    before = jax.device_get([w1, w2, x])

    @jax.grad
    def forward_fn(weights, x):
        w1, w2 = weights
        hidden = jaxpp.pipeline_enter_stage(x @ w1)
        result = jaxpp.pipeline_enter_stage(hidden @ w2)
        return ((x - result) ** 2).sum()

    @functools.partial(
        jaxpp.mpmd_jit_with_loop,
        mpmd_mesh=mpmd_mesh,
        in_shardings=(*(s.spec for s in shardings), shardings[-1].spec),
        out_shardings=tuple(s.spec for s in shardings[:2]),
    )
    def accumulation_loop(w1, w2, x, unused):
        return jaxpp.treduce(
            functools.partial(forward_fn, (w1, w2)),
            x,
            schedule=jaxpp.Std1F1B(mpmd_mesh.mpmd_dim),
            operation=jaxpp.Add,
        )

    compiled = accumulation_loop.compile(w1, w2, x, x)
    args_shardings, kwargs_shardings = compiled.in_shardings
    print(args_shardings, kwargs_shardings)

    moved = jaxpp.spmd_to_mpmd_reshard(mpmd_mesh, [w1, w2, x, x], list(args_shardings))
    print(f"{w1.is_deleted()=} {w2.is_deleted()=} {x.is_deleted()=}")
    for name, array in zip(("w1", "w2"), moved[:2], strict=True):
        if array.is_partially_addressable:
            print(f"{name} on rank {array.mpmd_idxs}: {array.first_mpmd_replica.sharding}")

    gradients = list(compiled(*moved))
    gradients = jaxpp.mpmd_to_spmd_reshard(mpmd_mesh, gradients, shardings[:2])
    print(*(f"{gradient.sharding}" for gradient in gradients), sep="\n")
    return before, forward_fn, gradients


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jppdu.distributed_main(main)
