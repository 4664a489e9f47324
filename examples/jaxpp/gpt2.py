"""A GPT-2 with pipeline x data x tensor parallelism on 8 devices, beside data parallelism on the same 8.

Usage: python examples/jaxpp/gpt2.py [--pp 2] [--dp 2] [--tp 2] [--train_steps 10]
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp

VOCABULARY, WIDTH, HEADS, LENGTH, MICROBATCHES, BATCH = 64, 32, 4, 16, 4, 8


def localize(x):
    """A NumPy array from an array of either kind."""
    return np.array(x.to_mpmd_local_array if hasattr(x, "to_mpmd_local_array") else x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        y = nn.LayerNorm(name="ln1")(x)
        qkv = nn.DenseGeneral((3, HEADS, width // HEADS), use_bias=False, name="qkv")(y)
        mask = nn.make_causal_mask(jnp.ones((batch, length)))
        y = nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], mask=mask)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), name="out")(y)
        y = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm(name="ln2")(x)))
        return x + nn.Dense(width, name="down")(y)


class GPT2(nn.Module):
    layers: int

    def setup(self):
        self.tokens = nn.Embed(VOCABULARY, WIDTH)
        self.positions = self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        self.blocks = [Block() for _ in range(self.layers)]
        self.norm = nn.LayerNorm()
        self.head = nn.Dense(VOCABULARY)

    def __call__(self, tokens, *, pp=0):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if pp and number % (self.layers // pp) == 0:
                x = jaxpp.pipeline_enter_stage(x)  # one mark for each stage, the last one included
        return self.head(self.norm(x))


def tensor_parallel(path, leaf):
    """Heads and the inner width of the MLP over `model`, as in Megatron-LM; the rest replicated."""
    name = jax.tree_util.keystr(path)
    for part, spec in {
        "['qkv']['kernel']": P(None, None, "model"),
        "['out']['kernel']": P("model"),
        "['up']['kernel']": P(None, "model"),
        "['up']['bias']": P("model"),
        "['down']['kernel']": P("model"),
    }.items():
        if name.endswith(part):
            return spec
    return P()


def make_loss_fn(model, **options):
    def loss_fn(params, tokens):
        logits = model.apply(params, tokens, **options)[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses) / MICROBATCHES, logits

    return loss_fn


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in ("pp", "dp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    parser.add_argument("--train_steps", type=int, default=10)
    args = parser.parse_args(arguments)
    count = args.pp * args.dp * args.tp
    devices = np.array(jax.devices()[:count])

    model = GPT2(layers=2 * args.pp)
    tokens = jax.random.randint(jax.random.key(0), (MICROBATCHES, BATCH, LENGTH), 0, VOCABULARY)
    params = model.init(jax.random.key(1), tokens[0])
    # Momentum and not Adam, which divides by the gradients' size and would blow the rounding of zeros up.
    optimizer = optax.sgd(0.1, momentum=0.9)

    data_mesh = jax.sharding.Mesh(devices, ("data",))

    @partial(jax.jit, in_shardings=(None, None, NamedSharding(data_mesh, P(None, "data"))))
    def base_step(opt_state, params, batch):
        grad, losses = None, []
        for tokens in batch:
            (loss, _), one = jax.value_and_grad(make_loss_fn(model), has_aux=True)(params, tokens)
            grad = one if grad is None else jax.tree.map(jnp.add, grad, one)
            losses.append(loss)
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return opt_state, optax.apply_updates(params, updates), jnp.stack(losses)

    mesh = jax.sharding.Mesh(devices.reshape(args.pp, args.dp, args.tp), ("stages", "data", "model"))
    mpmd_mesh = jaxpp.MpmdMesh(mesh, "stages")
    state = optimizer.init(params), params
    specs = tuple(jax.tree_util.tree_map_with_path(tensor_parallel, tree) for tree in state)

    @partial(
        jaxpp.mpmd_jit_with_loop,
        mpmd_mesh=mpmd_mesh,
        in_specs=(*specs, P(None, "data")),
        out_specs=(*specs, P(), P()),
        donate_argnums=(0, 1),
    )
    def pp_step(opt_state, params, batch):
        grad = partial(jax.value_and_grad(make_loss_fn(model, pp=args.pp), has_aux=True), params)
        (losses, logits), grad = jaxpp.treduce(grad, batch, schedule=jaxpp.Std1F1B(args.pp))
        updates, opt_state = optimizer.update(grad, opt_state, params)
        return opt_state, optax.apply_updates(params, updates), losses, logits

    plain, pipelined = state, jax.tree.map(jnp.copy, state)
    for step in range(args.train_steps):
        *plain, losses = base_step(*plain, tokens)
        *pipelined, pp_losses, _ = pp_step(*pipelined, tokens)
        if step == 0 or (step + 1) % 5 == 0:
            print(
                f"[{step + 1:04}/{args.train_steps:04}] data parallel {localize(losses).sum():.6f} "
                f"pipeline x data x tensor {localize(pp_losses).sum():.6f}"
            )
    kernel = pipelined[1]["params"]["blocks_0"]["up"]["kernel"]
    shard = kernel.sharding.shard_shape(kernel.shape)
    print(f"a kernel of the first stage: ranks {kernel.mpmd_idxs}, {kernel.spec}, {kernel.shape} in shards of {shard}")
    return (*plain, losses), (*pipelined, pp_losses)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
