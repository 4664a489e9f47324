"""A language model over texts of several lengths: each microbatch is padded to its own length.

    python examples/lengths.py

The texts are the functions of Python's own standard library, by bytes: most are short, a few are long.
`group_by_length` puts functions of similar length into one microbatch, and a step runs microbatches of several lengths;
`benchmarks/lengths.py` compares that with padding to the longest.

At real size: declare few lengths, since each stage is compiled once for each of them, and a budget of tokens that fits
into memory. Attention costs the square of the length, which `cost=` says.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer, group_by_length

STAGES, WIDTH, LENGTHS = 2, 32, (64, 128, 256)


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(4, in_features=WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        # Padding stands behind the tokens: a causal mask hides it from them.
        x = x + self.attention(x, mask=nnx.make_causal_mask(jnp.ones(x.shape[:2])))
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.blocks = nnx.List([PipelineStage(Block(rngs=rngs), name=f"block_{i}") for i in range(STAGES)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: Model, batch: dict[str, jax.Array]):
    """The sum over the tokens, and their number: no padding counts, wherever it stands."""
    logits, targets, mask = model(batch["tokens"])[:, :-1], batch["tokens"][:, 1:], batch["mask"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * mask).sum(), mask.sum()


def read_functions(count: int) -> list[np.ndarray]:
    """The bytes of functions of the standard library, mixed: the same ones in every run of one Python."""
    functions: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-f]*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        functions += ["".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
    order = np.random.default_rng(0).permutation(len(functions))[:count]
    return [np.frombuffer(functions[n].encode(), np.uint8).astype(np.int32) for n in order]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", type=int, default=800)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    if not jax.distributed.is_initialized():  # of several processes, the launcher knows the devices
        jax.config.update("jax_num_cpu_devices", STAGES)  # takes effect on CPU alone
    texts = read_functions(args.functions)
    batches = group_by_length(
        texts, lengths=LENGTHS, tokens=1024, num_microbatches=args.microbatches, too_long="cut",
        cost=lambda length: length * (1 + length / (6 * WIDTH)),
    )  # fmt: skip
    print(f"{len(texts)} functions in microbatches of {', '.join(f'{n} x {length}' for n, length in batches.shapes)}")
    trainer = PipelineTrainer(
        lambda rngs: Model(rngs=rngs), optax.adam(3e-3), loss_fn, num_stages=STAGES, num_microbatches=args.microbatches
    )
    result = trainer.fit(batches, steps=args.steps)
    print(f"loss {float(result['loss']):.2f}")


if __name__ == "__main__":
    main()
