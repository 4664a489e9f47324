"""One train step, compiled by `jax.jit` and as a pipeline, compared: results of the first step, then losses.

Usage: python examples/jaxpp/basic.py [--pp 2] [--num_ubatches 8] [--train_steps 20] [--dtype float32|float16]
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_flax.api as jaxpp

# How far a pipelined step may be from the plain one, relative to the largest entry of an array. In float32 only the
# order of sums differs. In float16, XLA keeps wider intermediate values inside one program, while those that cross
# from stage to stage are rounded: two units in the last place (2 ** -11) for each of the four layers.
TOLERANCE = {"float32": 1e-5, "float16": 2.0**-8}


class Layer(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden):
        width = hidden.shape[-1]
        # Without biases: the gradient of the keys' one is zero but for rounding, and not worth comparing.
        attended = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False, dtype=self.dtype)(hidden)
        hidden = nn.LayerNorm(dtype=self.dtype)(hidden + attended)
        inner = nn.gelu(nn.Dense(3 * width, dtype=self.dtype)(hidden))
        return nn.LayerNorm(dtype=self.dtype)(hidden + nn.Dense(width, dtype=self.dtype)(inner))


class Model(nn.Module):
    layers: int
    dtype: jnp.dtype

    def setup(self):
        self.stack = [Layer(self.dtype) for _ in range(self.layers)]

    def __call__(self, hidden):
        for layer in self.stack:
            hidden = layer(hidden)
        return hidden


class PipelinedModel(Model):
    """The same parameters; a mark behind every stage."""

    pp: int = 1

    def __call__(self, hidden):
        for number, layer in enumerate(self.stack, start=1):
            hidden = layer(hidden)
            if number % (self.layers // self.pp) == 0:
                hidden = jaxpp.pipeline_enter_stage(hidden)
        return hidden


def build_train_step(loss_fn, optimizer, num_ubatches, mpmd_mesh=None):
    decorator = jax.jit if mpmd_mesh is None else partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh)

    @decorator
    def train_step(opt_state, params, batch):
        ubatch_grad = partial(jax.value_and_grad(loss_fn, has_aux=True), params)
        if mpmd_mesh is not None:
            (losses, (preds, _)), grad = jaxpp.treduce(ubatch_grad, batch, schedule=jaxpp.Std1F1B(mpmd_mesh.mpmd_dim))
        else:
            grad, losses, preds = None, [], []
            for i in range(num_ubatches):
                (loss, (pred, _)), one = ubatch_grad(batch[i])
                losses.append(loss)
                preds.append(pred)
                grad = one if grad is None else jax.tree.map(jnp.add, grad, one)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        params = optax.apply_updates(params, updates)
        return opt_state, params, jnp.asarray(losses), jnp.asarray(preds)

    return train_step


def worst(pipelined, plain):
    """The largest difference, relative to the largest entry of each array."""

    def one(ours, theirs):
        if isinstance(ours, jaxpp.MpmdArray) and not ours.is_partially_addressable:
            return 0.0  # of another process
        replicas = ours.to_mpmd_local_array
        ours = np.asarray(replicas[0] if isinstance(replicas, list) else replicas, np.float64)
        theirs = np.asarray(theirs, np.float64)
        return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))

    return max(jax.tree.leaves(jax.tree.map(one, pipelined, plain)))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks, each of two layers")
    parser.add_argument("--num_ubatches", type=int, default=8, help="microbatches")
    parser.add_argument("--train_steps", type=int, default=20)
    parser.add_argument("--dtype", default="float32", choices=list(TOLERANCE))
    args = parser.parse_args(arguments)
    dtype, tolerance = jnp.dtype(args.dtype), TOLERANCE[args.dtype]

    devices = np.array(jax.devices()[: args.pp]).reshape(args.pp, 1, 1)
    mpmd_mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stages", "data", "model")), "stages")
    model = Model(2 * args.pp, dtype)
    pipelined_model = PipelinedModel(2 * args.pp, dtype, pp=args.pp)
    # Momentum and not Adam, which divides by the gradients' size and would blow the rounding of zeros up.
    optimizer = optax.sgd(0.05, momentum=0.9)
    batch = jax.random.uniform(jax.random.key(0), (args.num_ubatches, 2, 8, 24), dtype)
    params = model.init(jax.random.key(1), batch[0])

    def loss_of(model):
        def loss_fn(params, batch):
            result = model.apply(params, batch)
            return jnp.mean((result - batch).astype(jnp.float32) ** 2) / args.num_ubatches, (result, 4)

        return loss_fn

    plain_step = build_train_step(loss_of(model), optimizer, args.num_ubatches)
    pipelined_step = build_train_step(loss_of(pipelined_model), optimizer, args.num_ubatches, mpmd_mesh)

    *plain, loss, preds = plain_step(optimizer.init(params), params, batch)
    *pipelined, pp_loss, pp_preds = pipelined_step(optimizer.init(params), params, batch=batch)
    for what, ours, theirs in [
        ("optimizer state", pipelined[0], plain[0]),
        ("parameters", pipelined[1], plain[1]),
        ("losses", pp_loss, loss),
        ("predictions", pp_preds, preds),
    ]:
        difference = worst(ours, theirs)
        print(f"{what:>16}: {difference:.1e}")
        if not difference <= tolerance:
            raise SystemExit(f"{what} of the first step differ by {difference:.2g}, more than {tolerance:.2g}")

    for step in range(1, args.train_steps + 1):
        *plain, loss, _ = plain_step(*plain, batch)
        *pipelined, pp_loss, _ = pipelined_step(*pipelined, batch=batch)
        if step == 1 or step % 10 == 0:
            print(
                f"[{step:04}/{args.train_steps:04}] plain {float(loss.sum()):.6f} pipelined {float(pp_loss.sum()):.6f}"
            )
    return worst(pp_loss, loss), tolerance


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
