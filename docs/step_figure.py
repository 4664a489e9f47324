"""The drawing of a step's way through the compiler: `docs/figures.py` writes it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpp_flax
from jaxpp_flax import mark_stage_end, treduce
from jaxpp_flax.engine.analyses.batch_dimensions import ShardCounts
from jaxpp_flax.engine.passes import PASSES
from jaxpp_flax.engine.passes.runner import Choices, Pass
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.schedules import Std1F1B

__all__ = ["svg_of_passes", "text"]

_WIDTH, _ROW, _LEFT, _NAMES, _TOP = 900, 20, 12, 190, 34
_LINE = 105  # characters
_FILLS = ("#cfe3f3", "#d9ead3", "#fff2cc", "#f4d7c8", "#e3d7ee", "#dddddd")


def svg_of_passes() -> str:
    """Draw the passes in order, each with what it ensures, beside the structure that it leaves."""
    out: list[str] = []
    y = 8.0
    made = groupby(_structures(), key=lambda pair: pair[1])
    for fill, (kind, pairs) in zip(_FILLS, made, strict=False):
        passes = [each for each, _ in pairs]
        file = (
            Path(inspect.getfile(kind))
            .relative_to(Path(jaxpp_flax.__file__).parent)
            .as_posix()
        )
        lines = [wrap(each.ensures, _LINE) for each in passes]
        height = _TOP + _ROW * sum(map(len, lines))
        out.append(
            f'<rect x="4" y="{y:g}" width="{_WIDTH - 8}" height="{height - 6}" rx="4" fill="{fill}"/>'
        )
        out.append(text(_LEFT, y + 18, f"{kind.__name__}, in {file}", "bold"))
        at = y + _TOP + 4
        for each, ensured in zip(passes, lines, strict=True):
            out.append(text(_LEFT + 12, at, each.name))
            for line in ensured:
                out.append(text(_NAMES, at, line))
                at += _ROW
        y += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y + 4:g}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(out)}</svg>\n'
    )


def _structures() -> Iterator[tuple[Pass[Any, Any], type]]:
    """Run the passes on a small step; yield each with the type of the structure that it makes."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean((mark_stage_end(jnp.tanh(x @ weights[0])) @ weights[1]) ** 2)

    def step(weights: list[jax.Array], batch: jax.Array) -> list[jax.Array]:
        _, gradients = treduce(
            lambda x: jax.value_and_grad(loss)(weights, x), batch, schedule=Std1F1B(2)
        )
        return [
            weight - 0.1 * gradient
            for weight, gradient in zip(weights, gradients, strict=True)
        ]

    graph, _ = from_jaxpr(
        jax.jit(step).trace([jnp.ones((4, 4))] * 2, jnp.ones((2, 8, 4))).jaxpr
    )
    nothing = [PartitionSpec()] * len(graph.inputs)
    settings = Choices(
        num_ranks=2,
        donated=[False] * len(nothing),
        specs=nothing,
        shards=ShardCounts({}),
        choose_cuts=lambda loop: [0],
    )
    return (
        (each, type(structure)) for each, structure in PASSES.steps(graph, settings)
    )


def text(x: float, y: float, words: str, weight: str = "normal") -> str:
    """Return one line of text in SVG."""
    return f'<text x="{x:g}" y="{y:g}" font-size="12" font-weight="{weight}" fill="#111111">{escape(words)}</text>'
