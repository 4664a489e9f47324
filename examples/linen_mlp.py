"""The smallest pipelined Linen program: the names of `jaxpp.api`, four stages on four virtual CPU devices."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_flax.api as jaxpp

STAGES, MICROBATCHES, STEPS = 4, 8, 100
if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
    jax.config.update("jax_num_cpu_devices", STAGES)
devices = jax.devices() if len(jax.devices()) >= STAGES else jax.devices("cpu")
mpmd_mesh = jaxpp.MpmdMesh(
    jax.sharding.Mesh(np.array(devices[:: len(devices) // STAGES][:STAGES]), ("stage",)), "stage"
)


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(STAGES - 1):
            x = jaxpp.mark_stage_end(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(1)(x)


def loss(params, batch):
    return jnp.mean((MLP().apply(params, batch["x"]) - batch["y"]) ** 2) / MICROBATCHES


@partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh)
def train_step(opt_state, params, batch):  # batch: (microbatches, examples of a microbatch, features)
    grad = partial(jax.value_and_grad(loss), params)
    losses, grads = jaxpp.treduce(grad, batch, schedule=jaxpp.Std1F1B(STAGES))
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return opt_state, optax.apply_updates(params, updates), losses.sum()


x = jax.random.uniform(jax.random.key(0), (MICROBATCHES, 32, 2), minval=-1, maxval=1)
batch = {"x": x, "y": jnp.sin(3 * x[..., :1]) * x[..., 1:]}
params = MLP().init(jax.random.key(1), x[0])
optimizer = optax.adam(1e-2)
opt_state = optimizer.init(params)
for _ in range(STEPS):
    opt_state, params, batch_loss = train_step(opt_state, params, batch)
print(f"loss after {STEPS} steps: {float(batch_loss):.4f}")
