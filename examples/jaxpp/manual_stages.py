"""Stages marked by hand in a BERT-like Linen model, with the names of `jaxpp.api`.

The model runs alone too: outside of a pipeline a mark does nothing. Both placements of marks in JaxPP's history work:
between the stages (`--final-mark no`), and at the end of every stage, the last one included (`--final-mark yes`).

Usage: python examples/jaxpp/manual_stages.py [--stages 2] [--final-mark yes|no]
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_flax.api as jaxpp

HIDDEN, LAYERS, MICROBATCHES, BATCH, LENGTH = 16, 4, 4, 2, 8


class BertLayer(nn.Module):
    """Attention and two dense layers, each with a residual and a norm behind it."""

    @nn.compact
    def __call__(self, hidden):
        # Without biases: the gradient of the keys' one is zero but for rounding, and not worth comparing.
        attended = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)(hidden)
        hidden = nn.LayerNorm()(hidden + attended)
        inner = nn.gelu(nn.Dense(3 * HIDDEN)(hidden))
        return nn.LayerNorm()(hidden + nn.Dense(HIDDEN)(inner))


class ManualStagesModel(nn.Module):
    stages: int
    final_mark: bool

    def setup(self):
        self.layers = [BertLayer() for _ in range(LAYERS)]

    def __call__(self, hidden):
        per_stage = LAYERS // self.stages
        for number, layer in enumerate(self.layers, start=1):
            hidden = layer(hidden)
            if number % per_stage == 0 and (self.final_mark or number < LAYERS):
                hidden = jaxpp.pipeline_enter_stage(hidden)
        return hidden


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2, choices=[1, 2, 4])
    parser.add_argument("--final-mark", default="no", choices=["yes", "no"])
    args = parser.parse_args(arguments)

    model = ManualStagesModel(args.stages, args.final_mark == "yes")
    devices = np.array(jax.devices()[: 2 * args.stages]).reshape(args.stages, 1, 2)
    mpmd_mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("mpmd", "data", "model")), "mpmd")
    print(dict(mpmd_mesh.lowering_mesh().shape))  # {'mpmd': 1, 'data': 1, 'model': 2}
    # Momentum and not Adam, which divides by the gradients' size and would blow the rounding of zeros up.
    optimizer = optax.sgd(0.05, momentum=0.9)

    def loss_fn(params, batch):
        result = model.apply(params, batch)
        return jnp.mean((result - batch) ** 2) / MICROBATCHES, (result, 4)

    @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mpmd_mesh)
    def pp_train_step(opt_state, params, batch):
        mubatch_grad = partial(jax.value_and_grad(loss_fn, has_aux=True), params)
        (losses, (pred, _)), grad = jaxpp.treduce(
            mubatch_grad, batch, schedule=jaxpp.Std1F1B(mpmd_mesh.mpmd_dim)
        )  # fmt: skip
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return opt_state, optax.apply_updates(params, updates), losses, pred

    @jax.jit
    def train_step(opt_state, params, batch):
        grad, losses, preds = None, [], []
        for one in batch:
            (loss, (pred, _)), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, one)
            grad = gradient if grad is None else jax.tree.map(jnp.add, grad, gradient)
            losses.append(loss)
            preds.append(pred)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return opt_state, optax.apply_updates(params, updates), jnp.stack(losses), jnp.stack(preds)

    batch = jax.random.uniform(jax.random.key(0), (MICROBATCHES, BATCH, LENGTH, HIDDEN))
    params = model.init(jax.random.key(1), batch[0])
    state = pipelined = (optimizer.init(params), params)
    for step in range(3):
        *state, losses, preds = train_step(*state, batch)
        *pipelined, pp_losses, pp_preds = pp_train_step(*pipelined, batch)
        print(f"step {step}: loss {float(losses.sum()):.6f}, in {args.stages} stages {float(pp_losses.sum()):.6f}")
    return (*state, losses, preds), (*pipelined, pp_losses, pp_preds)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
