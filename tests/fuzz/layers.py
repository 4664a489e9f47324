"""The layers of random programs: what each carries from stage to stage, and how it computes.

A layer maps what the stages hand on, a dict, to the same dict: `x` of (ROWS, DIM) float32 always, and those of `KINDS`
that the program carries. Whole numbers and booleans are made of whole numbers alone, and narrow floats of the batch
alone, so that no rounding can flip them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

ROWS, DIM, IDS = 8, 8, 7
Carried = dict[str, jax.Array]


class Around(NamedTuple):
    """What a layer sees beside its parameters and what is carried."""

    example: dict[str, jax.Array]  # one microbatch
    shared: jax.Array  # (DIM,) parameters that several layers use
    key: jax.Array  # of this microbatch and layer
    axis: str | None  # of the submesh, for collectives
    rows: str | None  # the axis that shards the batch


Apply = Callable[[dict[str, jax.Array], Carried, Around], Carried]


@dataclass(frozen=True)
class Layer:
    """One kind of layer."""

    apply: Apply
    shapes: dict[str, tuple[int, ...]]  # of its parameters
    needs: str = ""  # what must be carried
    on_explicit: bool = False  # whether an Explicit mesh needs no more words than an Auto one
    collective: bool = False  # whether it needs an axis of the submesh


# What else may be carried: the first value of each, of one microbatch.
KINDS: dict[str, Callable[[dict[str, jax.Array]], jax.Array]] = {
    "flags": lambda e: e["ids"] % 2 == 0,
    "count": lambda e: e["ids"].astype(jnp.int32),
    "level": lambda e: e["ids"].astype(jnp.uint8),
    "wave": lambda e: lax.complex(e["x"], jnp.cos(e["x"])),
    "code": lambda e: e["x"].astype(jnp.float8_e4m3fn),
    "half": lambda e: e["x"].astype(jnp.float16),
}


def _in_x(f: Callable[[Any, jax.Array, Around], jax.Array]) -> Apply:
    return lambda p, c, a: c | {"x": f(p, c["x"], a)}


def _dense(p: Any, x: jax.Array, a: Around) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"])


def _mlp(p: Any, x: jax.Array, a: Around) -> jax.Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def _norm(p: Any, x: jax.Array, a: Around) -> jax.Array:
    centered = x - x.mean(-1, keepdims=True)
    return p["scale"] * centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 0.1)


def _attention(p: Any, x: jax.Array, a: Around) -> jax.Array:
    scores = (x @ p["q"]) @ (x @ p["k"]).T / DIM**0.5
    return x + jax.nn.softmax(scores) @ (x @ p["v"])


def _convolution(p: Any, x: jax.Array, a: Around) -> jax.Array:
    kernel = p["kernel"].astype(x.dtype)  # JAX promotes the operands of a product, not those of a convolution
    return jnp.tanh(lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")[:, 0])


def _scan(p: Any, x: jax.Array, a: Around) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["stack"])[0]


def _within(transform: Callable[[Any], Any]) -> Callable[[Any, jax.Array, Around], jax.Array]:
    return lambda p, x, a: transform(lambda p, x: _dense(p, x, a))(p, x)


def _bfloat16(p: Any, x: jax.Array, a: Around) -> jax.Array:
    return (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)


def _switch(p: Any, c: Carried, a: Around) -> Carried:
    branches = [lambda x: x @ p["w"], jnp.sin, lambda x: -x]
    return c | {"x": lax.switch(a.example["ids"][0] % 3, branches, c["x"])}


@jax.custom_vjp
def _halved(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


_halved.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) / 2,))


def _gate(p: Any, c: Carried, a: Around) -> Carried:
    flags = c["flags"]
    return c | {"x": jnp.where(flags[:, None], c["x"] @ p["w"], c["x"]), "flags": flags ^ (a.example["ids"] % 3 == 0)}


def _counting(p: Any, c: Carried, a: Around) -> Carried:
    count = c["count"] * 1_000_003 + 7  # wraps around
    steps, _ = lax.while_loop(lambda s: s[1] > 0, lambda s: (s[0] + 1, s[1] // 2), (0, jnp.abs(count[0]) % 64))
    return c | {"x": c["x"] * (1 + 0.1 * (count % 3)[:, None]) + 0.01 * steps, "count": count}


def _levels(p: Any, c: Carried, a: Around) -> Carried:
    level = c["level"] * jnp.uint8(37) + jnp.uint8(200)
    return c | {"x": c["x"] + p["b"] * level[:, None].astype(jnp.float32) / 256, "level": level}


def _wave(p: Any, c: Carried, a: Around) -> Carried:
    wave = c["wave"] * jnp.exp(1j * p["phase"])
    return c | {"x": jnp.tanh(c["x"] + wave.real + 0.1 * jnp.abs(wave)), "wave": wave + c["x"]}


def _statistics(p: Any, c: Carried, a: Around) -> Carried:
    return c | {"x": c["x"] - c["x"].mean(0) * 0.5}


def _dropout(p: Any, x: jax.Array, a: Around) -> jax.Array:
    return jnp.where(jax.random.bernoulli(a.key, 0.7, x.shape), x / 0.7, 0)


def _constrained(p: Any, x: jax.Array, a: Around) -> jax.Array:
    return _mlp(p, x, a) if a.axis is None else lax.with_sharding_constraint(_mlp(p, x, a), P(a.axis))


# Functions of one device's shard: `x` is this device's rows where the batch is sharded.
def _psum(p: Any, x: jax.Array, axis: str) -> jax.Array:
    return x + lax.psum(jnp.tanh(x @ p["up"]) @ p["down"], axis)


def _gather(p: Any, x: jax.Array, axis: str) -> jax.Array:
    every = lax.all_gather(jnp.tanh(x @ p["up"]), axis, axis=0, tiled=True)
    return x + lax.pmean(every.mean(0) @ p["down"], axis)


def _permute(p: Any, x: jax.Array, axis: str) -> jax.Array:
    """Once around the ring, as ring attention goes."""
    size = lax.axis_size(axis)
    ring = [(i, (i + 1) % size) for i in range(size)]
    mixed = jnp.tanh(x @ p["up"]) @ p["down"]
    for _ in range(size - 1):
        x = x + 0.5 * lax.ppermute(mixed, axis, ring) * (1.0 + lax.axis_index(axis))
    return x + mixed


def _to_all(p: Any, x: jax.Array, axis: str) -> jax.Array:
    y = lax.all_to_all(jnp.tanh(x @ p["up"]) @ p["down"], axis, split_axis=1, concat_axis=0, tiled=True)
    y = y * (1.0 + lax.axis_index(axis))
    return x + lax.all_to_all(y, axis, split_axis=0, concat_axis=1, tiled=True)


def _scattered(p: Any, x: jax.Array, axis: str) -> jax.Array:
    y = lax.psum_scatter(jnp.tanh(x @ p["up"]) @ p["down"], axis, scatter_dimension=1, tiled=True)
    return x + lax.all_gather(y * (1.0 + lax.axis_index(axis)), axis, axis=1, tiled=True)


def _max_of_all(p: Any, x: jax.Array, axis: str) -> jax.Array:
    largest = lax.pmax(lax.stop_gradient(x.max()), axis)
    return jnp.tanh(_psum(p, x, axis) / (1 + jnp.abs(largest)))


# Plain `jax.jit` of JAX 0.12 refuses the maximum of all entries on an Explicit mesh.
SHARDS: dict[str, Callable[[Any, jax.Array, str], jax.Array]] = {
    "psum": _psum, "gather": _gather, "permute": _permute, "to_all": _to_all, "scattered": _scattered,
    "max_of_all": _max_of_all,
}  # fmt: skip


def _mapped(shard: Callable[[Any, jax.Array, str], jax.Array], wrap: str, p: Any, x: jax.Array, a: Around) -> jax.Array:
    """`jax.shard_map` of `shard`, manual over all axes; the result differs along the axis of the collective."""
    assert a.axis is not None
    over = tuple(dict.fromkeys(name for name in (a.rows, a.axis) if name))
    # What shards return may differ along the axis: where it does not shard the rows, their mean is the same everywhere.
    whole = a.axis != a.rows

    def one(p: Any, x: jax.Array) -> jax.Array:
        y = shard(p, x, a.axis or "")
        return lax.pmean(y, a.axis) if whole else y

    function = jax.shard_map(one, in_specs=(P(), P(a.rows)), out_specs=P(a.rows), axis_names=set(over))
    if wrap == "rematted":
        function = jax.checkpoint(function)
    if wrap == "scanned":
        return lax.scan(lambda x, _: (0.5 * function(p, x), None), x, None, length=2)[0]
    return function(p, x)


_W, _B = {"w": (DIM, DIM)}, {"b": (DIM,)}
_MLP = {"up": (DIM, 2 * DIM), "down": (2 * DIM, DIM)}

LAYERS: dict[str, Layer] = {
    "dense": Layer(_in_x(_dense), _W | _B, on_explicit=True),
    "mlp": Layer(_in_x(_mlp), _MLP, on_explicit=True),
    "norm": Layer(_in_x(_norm), {"scale": (DIM,)}, on_explicit=True),
    "attention": Layer(_in_x(_attention), {"q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM)}),
    "convolution": Layer(_in_x(_convolution), {"kernel": (1, 1, 3)}),
    "scan": Layer(_in_x(_scan), {"stack": (3, DIM, DIM)}, on_explicit=True),
    "rematted": Layer(_in_x(_within(jax.checkpoint)), _W | _B, on_explicit=True),
    "jitted": Layer(_in_x(_within(jax.jit)), _W | _B, on_explicit=True),
    "switch": Layer(_switch, _W),
    "custom_vjp": Layer(_in_x(lambda p, x, a: _halved(x @ p["w"])), _W, on_explicit=True),
    "embed": Layer(_in_x(lambda p, x, a: x + p["table"][a.example["ids"]]), {"table": (IDS, DIM)}),
    "scatter": Layer(_in_x(lambda p, x, a: x.at[a.example["ids"] % ROWS].add(p["b"])), _B),
    "cumulative": Layer(_in_x(lambda p, x, a: jnp.tanh(jnp.cumsum(x, 1) * p["b"])), _B),
    "tied": Layer(_in_x(lambda p, x, a: x * (1 + a.shared)), {}, on_explicit=True),
    "gate": Layer(_gate, _W, needs="flags"),
    "counting": Layer(_counting, {}, needs="count"),
    "levels": Layer(_levels, _B, needs="level", on_explicit=True),
    "wave": Layer(_wave, {"phase": (DIM,)}, needs="wave"),
    "code": Layer(lambda p, c, a: c | {"x": c["x"] + c["code"].astype(jnp.float32) * p["b"]}, _B, needs="code"),
    "half": Layer(lambda p, c, a: c | {"x": c["x"] + c["half"].astype(jnp.float32) * p["b"]}, _B, needs="half"),
    "statistics": Layer(_statistics, {}),
    "dropout": Layer(_in_x(_dropout), {}),
    "constrained": Layer(_in_x(_constrained), _MLP),
    "bfloat16": Layer(_in_x(_bfloat16), _W),
    **{
        f"{name}_{wrap}".rstrip("_"): Layer(
            _in_x(partial(_mapped, shard, wrap)), _MLP, on_explicit=name != "max_of_all", collective=True
        )
        for name, shard in SHARDS.items() for wrap in ("", "rematted", "scanned")
    },
}  # fmt: skip


def parameters(layer: Layer, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Small enough that no depth of layers blows up."""
    return {name: (rng.normal(size=s) / (2 * s[0] ** 0.5)).astype(np.float32) for name, s in layer.shapes.items()}
