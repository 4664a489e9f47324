r"""A GPT-2 as a pipeline, with SPMD data parallelism, and with SPMD tensor parallelism, on the same devices.

One train step is written once and compiled three times. Each system prints its losses and step times; the last lines
compare the medians. The flags are those of the example in ROCm's fork of JaxPP.

Usage: python examples/jaxpp/gpt2.py [--system all] [--pp 2] [--dp 2] [--tp 2] [--train-steps 40]
On eight GPUs, in the fork's sizes:
  python examples/jaxpp/gpt2.py --pp 8 --dp 1 --tp 1 --global-batch 32 --seq-len 1024 --vocab-size 32000 \
    --d-model 512 --n-heads 8 --mlp-dim 2048
"""

import argparse
import datetime
import statistics
import time
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp

SYSTEMS = {"all": ("spmd_dp", "spmd_tp", "jaxpp"), "both": ("spmd_dp", "jaxpp")}
SYSTEMS |= {name: (name,) for name in SYSTEMS["all"]}
HELP = {
    "global-batch": "examples in each microbatch, over all devices",
    "num-ubatches": "microbatches in each step",
    "profile-start": "the first step in the profile; the first of all is step 0",
    "profile-stop": "the first step after the profile; from it on steps are compared, with or without --profile-dir",
}


def localize(x):
    """A NumPy array from an array of either kind."""
    return np.array(x.to_mpmd_local_array if hasattr(x, "to_mpmd_local_array") else x)


class Block(nn.Module):
    heads: int
    mlp_dim: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        batch, length, width = x.shape
        y = nn.LayerNorm(dtype=self.dtype, name="ln1")(x)
        qkv = nn.DenseGeneral(
            (3, self.heads, width // self.heads), use_bias=False, dtype=self.dtype, name="qkv"
        )(y)  # fmt: skip
        mask = nn.make_causal_mask(jnp.ones((batch, length)))
        y = nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], mask=mask)
        x = x + nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype, name="out")(y)
        y = nn.LayerNorm(dtype=self.dtype, name="ln2")(x)
        y = nn.gelu(nn.Dense(self.mlp_dim, dtype=self.dtype, name="up")(y))
        return x + nn.Dense(width, dtype=self.dtype, name="down")(y)


class GPT2(nn.Module):
    vocabulary: int
    length: int
    width: int
    stages: int
    layers_per_stage: int
    heads: int
    mlp_dim: int
    dtype: jnp.dtype

    def setup(self):
        self.tokens = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        self.positions = self.param("positions", nn.initializers.normal(0.02), (self.length, self.width))
        layers = self.stages * self.layers_per_stage
        self.blocks = [Block(self.heads, self.mlp_dim, self.dtype) for _ in range(layers)]
        self.norm = nn.LayerNorm(dtype=self.dtype)
        self.head = nn.Dense(self.vocabulary, dtype=self.dtype)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]].astype(self.dtype)
        for number, block in enumerate(self.blocks, start=1):
            x = block(x)
            if number % self.layers_per_stage == 0:
                x = jaxpp.mark_stage_end(x)  # one mark for each stage; without a pipeline it changes nothing
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


def make_step(model, optimizer, args):
    """The train step of all systems: under plain `jax.jit`, `treduce` is an ordinary loop over the microbatches."""

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens)[:, :-1].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(losses) / args.num_ubatches

    def step(opt_state, params, batch):
        gradient = partial(jax.value_and_grad(loss_fn), params)
        losses, grads = jaxpp.treduce(gradient, batch, schedule=jaxpp.Std1F1B(args.pp))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return opt_state, optax.apply_updates(params, updates), losses

    return step


def compile_step(system, step, state, args):
    """The step of one system, and the state in the layout that it takes."""
    devices = np.array(jax.devices()[: args.pp * args.dp * args.tp])
    replicated, split = jax.tree.map(lambda _: P(), state), jax.tree_util.tree_map_with_path(tensor_parallel, state)
    if system == "jaxpp":
        mesh = Mesh(devices.reshape(args.pp, args.dp, args.tp), ("stages", "data", "model"))
        step = partial(jaxpp.mpmd_jit_with_loop, step, jaxpp.MpmdMesh(mesh, "stages"))
        specs = (*split, P(None, "data"))
        return step(in_specs=specs, out_specs=(*split, P()), donate_argnums=(0, 1)), jax.tree.map(jnp.copy, state)
    data = system == "spmd_dp"
    mesh = Mesh(devices, ("data",) if data else ("model",))
    layout = jax.tree.map(lambda spec: NamedSharding(mesh, spec), replicated if data else split)
    batch = NamedSharding(mesh, P(None, "data") if data else P())
    shardings = {"in_shardings": (*layout, batch), "out_shardings": (*layout, NamedSharding(mesh, P()))}
    # A copy, since the step donates it.
    return jax.jit(step, donate_argnums=(0, 1), **shardings), jax.device_put(jax.tree.map(jnp.copy, state), layout)


def run(system, step, state, tokens, args):
    """Train; return the last state, the sum of the losses of each step, and each step's seconds after the profile."""
    print(f"=== {system} on {args.pp * args.dp * args.tp} devices ===", flush=True)
    seconds, sums = [], []
    for number in range(args.train_steps + 1):  # the first one, which compiles, is the warm-up
        if args.profile_dir and number == args.profile_start + 1:
            print(f"{datetime.datetime.now()}: start profile ({system})")
            jax.profiler.start_trace(f"{args.profile_dir}/{system}")
        start = time.perf_counter()
        *state, losses = step(*state, tokens)
        jax.block_until_ready((state, losses))
        seconds.append(time.perf_counter() - start)
        sums.append(float(localize(losses).sum()))
        if args.profile_dir and number == args.profile_stop:
            jax.profiler.stop_trace()
            print(f"{datetime.datetime.now()}: stop profile ({system})")
        if number == 0:
            print(f"[{system} warmup] loss_sum={sums[0]:.6f}")
        elif number % args.log_every == 0:
            milliseconds = 1000 * seconds[-1]
            print(f"[{system} {number:04}/{args.train_steps:04}] loss_sum={sums[-1]:.6f} step={milliseconds:.3f} ms")
    after = seconds[args.profile_stop + 1 :]
    print(
        f"[{system}] avg step time per step after profiling (steps {args.profile_stop}..{args.train_steps - 1}): "
        f"{1000 * statistics.mean(after):.3f} ms",
        flush=True,
    )
    return state, sums, after


def print_ratios(medians, tokens):
    """A line for each system: its median, its tokens in a second, and its time in units of each system's time."""
    print(f"{'system':8} {'median ms':>10} {'tokens/s':>10}" + "".join(f" {'/ ' + name:>10}" for name in medians))
    for name, median in medians.items():
        ratios = "".join(f" {median / other:>10.3f}" for other in medians.values())
        print(f"{name:8} {1000 * median:>10.3f} {tokens / median:>10.0f}{ratios}")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=list(SYSTEMS), default="all", help="both: spmd_dp and jaxpp")
    numbers = {
        "pp": 2, "dp": 2, "tp": 2, "layers-per-stage": 2, "global-batch": 8, "num-ubatches": 4, "seq-len": 128,
        "vocab-size": 512, "d-model": 128, "n-heads": 8, "mlp-dim": 512, "train-steps": 40, "log-every": 5,
        "profile-start": 10, "profile-stop": 20,
    }  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=HELP.get(name))
    parser.add_argument("--profile-dir", help="write the profile of each system here; default: none")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args(arguments)
    devices = args.pp * args.dp * args.tp
    if devices > jax.device_count():
        parser.error(f"--pp x --dp x --tp is {devices}, but there are {jax.device_count()} devices")
    divided = {"global-batch": devices if "spmd_dp" in SYSTEMS[args.system] else args.dp}
    divided |= dict.fromkeys(("n-heads", "mlp-dim"), devices if "spmd_tp" in SYSTEMS[args.system] else args.tp)
    for name, count in divided.items():
        value = getattr(args, name.replace("-", "_"))
        if value % count:
            parser.error(f"--{name} {value} cannot be divided by {count}, the devices that share it")
    if args.d_model % args.n_heads:
        parser.error(f"--d-model {args.d_model} cannot be divided by --n-heads {args.n_heads}")
    if not 0 <= args.profile_start < args.profile_stop < args.train_steps:
        window = f"--profile-start {args.profile_start}, --profile-stop {args.profile_stop}"
        parser.error(f"{window}, --train-steps {args.train_steps} must grow in this order, from 0 on")
    return args


def main(arguments=None):
    args = parse(arguments)
    dtype = jnp.dtype(args.dtype)
    model = GPT2(
        args.vocab_size, args.seq_len, args.d_model, args.pp, args.layers_per_stage, args.n_heads, args.mlp_dim, dtype
    )
    tokens = jax.random.randint(
        jax.random.key(0), (args.num_ubatches, args.global_batch, args.seq_len), 0, args.vocab_size
    )
    optimizer = optax.adam(args.lr)
    params = jax.jit(model.init)(jax.random.key(42), tokens[0])
    state = jax.jit(optimizer.init)(params), params
    step = make_step(model, optimizer, args)
    results = {}
    for system in SYSTEMS[args.system]:
        results[system] = run(system, *compile_step(system, step, state, args), tokens, args)
    print("[final] " + " | ".join(f"{name} loss_sum={sums[-1]:.6f}" for name, (_, sums, _) in results.items()))
    print_ratios({name: statistics.median(after) for name, (_, _, after) in results.items()}, tokens.size)
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
