"""From a plain train step to a pipeline, one change at a time, and what the pipeline looks like inside.

A Linen transformer with rematerialised blocks, a `TrainState`, FSDP inside each stage; then Interleaved 1F1B with one
stage on each of 4 ranks, and with two.

Usage: python examples/jaxpp/tutorial.py
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp

NUM_MB, BATCH_SIZE, SEQ_LEN, D_MODEL, NUM_LAYERS, NUM_STAGES = 4, 8, 8, 16, 8, 4


class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)(x))
        mlp = nn.Dense(D_MODEL)(nn.gelu(nn.Dense(4 * D_MODEL)(x)))
        return nn.LayerNorm()(x + mlp)


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
        return x


class AnnotatedTransformer(nn.Module):
    num_stages: int

    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
            if (i + 1) % (NUM_LAYERS // self.num_stages) == 0:
                x = jaxpp.pipeline_enter_stage(x)  # new: the end of a stage
        return x


def init_state(model):
    params = model.init(jax.random.key(0), jnp.ones((BATCH_SIZE, SEQ_LEN, D_MODEL)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def loss_fn(state, params, x, targets):
    x, targets = jax.lax.with_sharding_constraint((x, targets), P("fsdp"))
    return jnp.mean((state.apply_fn({"params": params}, x) - targets) ** 2)


def microbatches(xs):
    return xs.reshape(NUM_MB, -1, *xs.shape[1:])


def train_step(state, xs, targets):
    """The plain step: a scan over the microbatches."""
    grad_fn = jax.value_and_grad(partial(loss_fn, state))

    def body(carry, in_):
        return jax.tree.map(jnp.add, carry, grad_fn(state.params, *in_)), ()

    zeros = jax.tree.map(jnp.zeros_like, (0.0, state.params))
    (loss, grads), _ = jax.lax.scan(body, zeros, (microbatches(xs), microbatches(targets)))
    return state.apply_gradients(grads=grads), loss


def pp_train_step(state, xs, targets, schedule):
    """The pipelined step: `treduce` in place of the scan."""
    grad_fn = jax.value_and_grad(partial(loss_fn, state))
    loss, grads = jaxpp.treduce(
        lambda in_: grad_fn(state.params, *in_),
        (microbatches(xs), microbatches(targets)),
        schedule=schedule,
        operation=jaxpp.Add,
    )
    return state.apply_gradients(grads=grads), loss


def fsdp_shardings(state, mesh):
    """Every array's first axis over `fsdp`; scalars replicated."""

    def of(leaf):
        return jax.NamedSharding(mesh, P("fsdp") if len(getattr(leaf, "shape", ())) > 0 else P())

    return jax.tree.map(of, state), jax.NamedSharding(mesh, P("fsdp")), jax.NamedSharding(mesh, P("fsdp"))


def train(step, inputs, num_steps=4):
    state, xs, targets = inputs
    losses = []
    for i in range(num_steps):
        state, loss = step(state, xs, targets)
        losses.append(float(loss))
        print(f"  loss of step {i + 1}: {loss:.6f}")
    return state, losses


def main():
    xs = jax.random.normal(jax.random.key(1), (BATCH_SIZE, SEQ_LEN, D_MODEL))
    targets = jnp.roll(xs, 1, axis=1)

    print("Plain JAX, FSDP over 2 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    state = init_state(Transformer())
    inputs = (state, xs, targets)
    in_shardings = fsdp_shardings(state, mesh)
    with jax.set_mesh(mesh):
        compiled = jax.jit(train_step, in_shardings=in_shardings, out_shardings=(in_shardings[0], None))
        plain, plain_losses = train(compiled, jax.device_put(inputs, in_shardings))

    mesh = jax.sharding.Mesh(np.array(jax.devices()[: 2 * NUM_STAGES]).reshape(NUM_STAGES, -1), ("stage", "fsdp"))
    mpmd_mesh = jaxpp.MpmdMesh(mesh, "stage")
    for submesh in mpmd_mesh.unstack:
        print(submesh)

    model = AnnotatedTransformer(num_stages=NUM_STAGES)
    inputs = (init_state(model), xs, targets)
    specs = jax.tree.map(lambda sharding: sharding.spec, fsdp_shardings(inputs[0], mesh))

    def compiled_step(num_stages):
        schedule = jaxpp.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_STAGES)
        return jaxpp.mpmd_jit_with_loop(
            partial(pp_train_step, schedule=schedule),
            in_specs=specs,
            out_specs=(specs[0], P()),
            mpmd_mesh=mpmd_mesh,
        ).compile(*inputs)

    print("One stage on each of 4 ranks")
    step = compiled_step(NUM_STAGES)
    updated, losses = train(step, inputs)
    for i in range(NUM_LAYERS):
        print(f"layer_{i}", updated.params[f"block_{i}"]["Dense_0"]["kernel"])

    # Each rank's tasks in order; the last stage's forward and backward are fused.
    schedule = jaxpp.Interleaved1F1B(num_stages=NUM_STAGES, mpmd_dim=NUM_STAGES)
    for rank in (2, 3):
        print([str(task) for task in schedule.tasks(NUM_MB)[rank]])
    lines = str(step.closed_jaxpr).splitlines()
    first = next(number for number, line in enumerate(lines) if " = fwd_0__0(" in line)
    print("\n".join(lines[first : first + 20]))

    print("Two stages on each of 4 ranks")
    schedule = jaxpp.Interleaved1F1B(num_stages=NUM_LAYERS, mpmd_dim=NUM_STAGES)
    for rank in (0, 3):
        print([str(task) for task in schedule.tasks(NUM_MB)[rank]])
    model.num_stages = NUM_LAYERS
    interleaved, interleaved_losses = train(compiled_step(NUM_LAYERS), inputs)
    for i in range(NUM_LAYERS):
        print(f"layer_{i}", interleaved.params[f"block_{i}"]["Dense_0"]["kernel"])
    # Adam's counter lives on every rank, because each of them reads it.
    count = interleaved.opt_state[0].count
    print(count)
    print(count._partially_addressable_arrays)
    print([a.sharding.mesh.devices for a in count._partially_addressable_arrays.values()])
    return (plain, plain_losses), (updated, losses), (interleaved, interleaved_losses)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
