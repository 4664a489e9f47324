"""How far a quote is from measured steps: GPT models on clusters of A100, from a table of another study.

    python benchmarks/quote_errors.py measured_layouts.csv [--fit]

The table has a row for each step: params_billion, gpus, global_batch, micro_batch, hidden, heads, layers, sequence,
tensor, data, pipeline, iteration_ms (public data of vTrain, arXiv 2312.12391, MIT licence). Every layer is recomputed,
and the schedule is 1F1B. `--fit` fits the curves to every second row; the other rows are reported apart.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.planning.quoting.curves import Curves
from jaxpp_flax.planning.quoting.devices import device_named
from jaxpp_flax.planning.quoting.layouts import Layout
from jaxpp_flax.planning.quoting.step import Quoter
from jaxpp_flax.planning.quoting.traced import TracedModel, trace_model

VOCABULARY = 51200
BF16 = jnp.bfloat16


def dense(inputs: int, outputs: int, cut: tuple[Any, ...], rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), cut)
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=BF16, kernel_init=init, rngs=rngs)


class Block(nnx.Module):
    """A layer of GPT, annotated as Megatron cuts it."""

    def __init__(self, hidden: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads, self.size = heads, hidden // heads
        self.norm1, self.norm2 = (nnx.LayerNorm(hidden, dtype=BF16, rngs=rngs) for _ in range(2))
        self.q, self.k, self.v = (dense(hidden, hidden, (None, "tensor"), rngs) for _ in range(3))
        self.out = dense(hidden, hidden, ("tensor", None), rngs)
        self.up = dense(hidden, 4 * hidden, (None, "tensor"), rngs)
        self.down = dense(4 * hidden, hidden, ("tensor", None), rngs)

    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.norm1(x)
        q, k, v = (f(y).reshape(*x.shape[:2], self.heads, self.size) for f in (self.q, self.k, self.v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / self.size**0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e4))
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, hidden: int, heads: int, layers: int, sequence: int, *, rngs: nnx.Rngs) -> None:
        cut = nnx.with_partitioning(nnx.initializers.normal(0.02), ("tensor", None))
        self.embed = nnx.Embed(VOCABULARY, hidden, dtype=BF16, embedding_init=cut, rngs=rngs)
        self.positions = nnx.Embed(sequence, hidden, dtype=BF16, rngs=rngs)
        blocks = (Block(hidden, heads, rngs) for _ in range(layers))
        self.blocks = nnx.List([PipelineStage(block, name=f"block_{i}") for i, block in enumerate(blocks)])
        self.norm = nnx.LayerNorm(hidden, dtype=BF16, rngs=rngs)
        self.head = dense(hidden, VOCABULARY, (None, "tensor"), rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model: GPT, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@cache
def traced(hidden: int, heads: int, whole: int, sequence: int, batch: int) -> TracedModel:
    """Trace an abstract GPT of these sizes."""

    def make(layers: int = whole, **options: Any) -> tuple[PipelineTrainer, Any]:
        ids = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
        trainer = PipelineTrainer(
            lambda rngs: GPT(hidden, heads, layers, sequence, rngs=rngs), optax.adamw(1e-4), loss,
            precision="bfloat16", logging=False, **options,
        )  # fmt: skip
        return trainer, {"tokens": ids, "targets": ids}

    return trace_model(make, "layers")


def model_of(row: dict[str, float]) -> TracedModel:
    return traced(*(int(row[name]) for name in ("hidden", "heads", "layers", "sequence", "global_batch")))


def layout_of(row: dict[str, float]) -> Layout:
    sizes = {name: int(row[name]) for name in ("tensor", "data", "pipeline")}
    return Layout(
        pipeline=sizes["pipeline"],
        data=sizes["data"],
        tensor=sizes["tensor"],
        microbatch=int(row["micro_batch"]),
        stages=sizes["pipeline"],
    )


def predicted(rows: Sequence[dict[str, float]], curves: Curves) -> np.ndarray:
    device = device_named("a100-80")
    return np.array([Quoter(model_of(row), device, curves).quoted(layout_of(row)).seconds for row in rows])


FITTED = [each.name for each in fields(Curves) if each.name not in ("hop", "step", "spread")]


def fitted(rows: Sequence[dict[str, float]]) -> Curves:
    """Return the curves with the least sum of absolute errors of the logarithms, by a simplex search."""
    from scipy.optimize import minimize

    measured = np.array([row["iteration_ms"] / 1e3 for row in rows])
    start, device = Curves(), device_named("a100-80")

    def curves_of(logs: np.ndarray) -> Curves:
        return replace(start, **{name: float(value) for name, value in zip(FITTED, np.exp(logs), strict=True)})

    def error(logs: np.ndarray) -> float:
        curves = curves_of(logs)
        found = [Quoter(model_of(row), device, curves).quick(layout_of(row)) for row in rows]
        shares = [getattr(curves, name) for name in ("product", "memory", "inside", "across")]
        return float(
            np.abs(np.log(np.array(found) / measured)).mean() + sum(max(0.0, share - 0.95) for share in shares)
        )

    first = np.log([getattr(start, name) for name in FITTED])
    found = minimize(error, first, method="Nelder-Mead", options={"maxfev": 400, "xatol": 1e-3, "fatol": 1e-5})
    return curves_of(found.x)


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values))


def report(title: str, rows: Sequence[dict[str, float]], found: np.ndarray, spread: float) -> None:
    measured = np.array([row["iteration_ms"] / 1e3 for row in rows])
    errors = found / measured - 1
    spearman = np.corrcoef(ranks(found), ranks(measured))[0, 1]
    inside = np.abs(np.log(found / measured)) <= spread
    print(f"{title}: {len(rows)} rows, mean absolute error {np.abs(errors).mean():.1%}, Spearman {spearman:.3f}, "
          f"{inside.mean():.0%} inside the 80 % interval")  # fmt: skip
    for i in np.argsort(-np.abs(errors))[:5]:
        print(f"  {rows[i]['params_billion']:g}B, {layout_of(rows[i])}: measured {measured[i]:.2f} s, "
              f"predicted {found[i]:.2f} s ({errors[i]:+.1%})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", help="the CSV file")
    parser.add_argument("--fit", action="store_true", help="fit the curves to every second row")
    options = parser.parse_args()
    with open(options.table, encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    half, rest = rows[::2], rows[1::2]
    curves = Curves()
    if options.fit:
        curves = fitted(half)
        logs = np.abs(np.log(predicted(half, curves) / [row["iteration_ms"] / 1e3 for row in half]))
        curves = replace(curves, spread=float(np.quantile(logs, 0.85, method="higher")))
        print(", ".join(f"{each.name}={getattr(curves, each.name):.4g}" for each in fields(Curves)))
    for title, part in (("fitted rows", half), ("other rows", rest), ("all rows", rows)):
        report(title, part, predicted(part, curves), curves.spread)


if __name__ == "__main__":
    main()
