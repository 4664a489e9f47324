"""Functions of a batch that are means over its examples, and functions that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.trainers.loss.joined_examples import Joins, follow_examples

BATCH, LENGTH, WIDTH = 4, 6, 3
WEIGHT, TEMPERATURE = np.eye(WIDTH, dtype=np.float32), np.float32(0.1)
X = np.ones((BATCH, LENGTH, WIDTH), np.float32)
LABELS = np.zeros(BATCH, np.int32)
MASK = np.ones((BATCH, LENGTH), bool)


def joins_of(function: Callable[..., Any], x: Any = X, labels: Any = LABELS, mask: Any = MASK) -> Joins:
    fixed = WEIGHT, TEMPERATURE, jax.random.key(0)
    graph, consts = from_jaxpr(jax.make_jaxpr(function)(x, labels, mask, *fixed))
    inputs = graph.inputs[len(consts) :][:3]
    (joins,) = follow_examples(graph, inputs, len(x)).joins
    return joins


def attention(x: Any, mask: Any = None) -> Any:
    scores = jnp.einsum("bqd,bkd->bqk", x, x)
    scores = scores if mask is None else jnp.where(mask[:, None, :] & mask[:, :, None], scores, -1e9)
    return jax.nn.softmax(scores) @ x


def entropy(x: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x.mean(1), labels)


def layer_norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


def in_layers(x: Any, w: Any) -> Any:
    return jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(attention(h) @ w), h.mean())), x, jnp.stack([w, w]))


MEANS: dict[str, Callable[..., Any]] = {
    "mean": lambda x, y, m, w, t, k: (x @ w).mean(),
    "sum": lambda x, y, m, w, t, k: ((x @ w) ** 2).sum(),
    "entropy": lambda x, y, m, w, t, k: entropy(x @ w, y).mean(),
    "rows by index": lambda x, y, m, w, t, k: -jax.nn.log_softmax(x[:, 0] @ w)[jnp.arange(BATCH), y].mean(),
    "label smoothing": lambda x, y, m, w, t, k: optax.softmax_cross_entropy(
        x[:, 0], optax.smooth_labels(jax.nn.one_hot(y, WIDTH), 0.1)
    ).mean(),
    "temperature": lambda x, y, m, w, t, k: entropy(x / t, y).mean() / (1 + jnp.exp(t)) + t**2,
    "sum of a mask": lambda x, y, m, w, t, k: (x.mean(-1) * m).sum(),
    "mean of each example's quotient": lambda x, y, m, w, t, k: (
        (x.sum(-1) ** 2 * m).sum(1) / jnp.maximum(m.sum(1), 1)
    ).mean(),
    "mean of each example's root": lambda x, y, m, w, t, k: jnp.sqrt((x**2).mean((1, 2))).mean(),
    "attention": lambda x, y, m, w, t, k: attention(x).mean(),
    "masked attention": lambda x, y, m, w, t, k: (attention(x, m) ** 2).mean(),
    "segments in an example": lambda x, y, m, w, t, k: jnp.where(m[:, None] == m[:, :, None], 1.0, 0.0).mean(),
    "layer norm": lambda x, y, m, w, t, k: jnp.tanh(layer_norm(x) @ w).mean(),
    "dropout": lambda x, y, m, w, t, k: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x / 0.5, 0).mean(),
    "vmap": lambda x, y, m, w, t, k: jax.vmap(lambda x, m: (x.sum(-1) * m).sum() / m.sum())(x, m).mean(),
    "loop over examples": lambda x, y, m, w, t, k: jax.lax.map(lambda xm: xm[0].std() / xm[1].sum(), (x, m)).mean(),
    "scan over layers": lambda x, y, m, w, t, k: in_layers(x, w)[0].mean() + in_layers(x, w)[1].sum(),
    "tokens of all examples": lambda x, y, m, w, t, k: jnp.tanh(x.reshape(-1, WIDTH) @ w).reshape(x.shape).mean(),
    "two terms": lambda x, y, m, w, t, k: x.mean() - jnp.mean(attention(x)) / 3 + (entropy(x, y) + x.sum()).mean(),
    "guards": lambda x, y, m, w, t, k: jnp.nan_to_num(jnp.where(jnp.isfinite(x.mean()), x.mean(), 0.0)),
    "real part": lambda x, y, m, w, t, k: (jnp.abs(jnp.fft.fft(x)) ** 2).mean() + (jnp.fft.fft(x) ** 2).mean().real,
    "decay": lambda x, y, m, w, t, k: x.mean() + jnp.linalg.norm(w) / jnp.sqrt((w**2).sum()),
    "gradient by the input": lambda x, y, m, w, t, k: (
        (jnp.linalg.norm(jax.grad(lambda x: jnp.tanh(x @ w).sum())(x), axis=(1, 2)) - 1) ** 2
    ).mean(),
    "two views in one pass": lambda x, y, m, w, t, k: (
        jnp.tanh(jnp.concatenate([x, 2 * x]) @ w).reshape(2, *x.shape).prod(0).mean()
    ),
    "dense experts": lambda x, y, m, w, t, k: jnp.einsum(
        "bte,bted->btd", jax.nn.softmax(x), jnp.einsum("btd,edf->btef", x, jnp.stack([w] * WIDTH))
    ).mean(),
    "experts by sorted tokens": lambda x, y, m, w, t, k: x.reshape(-1, WIDTH)[
        jnp.argsort(x.argmax(-1).reshape(-1))
    ].mean(),
    "best classes of each token": lambda x, y, m, w, t, k: (
        jax.nn.softmax(jax.lax.top_k(x @ w, 2)[0]) * jax.lax.top_k(x @ w, 2)[1]
    ).mean(),
    "conditions": lambda x, y, m, w, t, k: jax.lax.cond(t > 0, lambda: x.mean(), lambda: x.sum()),
    "metrics": lambda x, y, m, w, t, k: ((x.std(), x / x.sum(), x[:, 0] @ x[:, 0].T, x.max()), x.mean())[1],
}

QUOTIENTS: dict[str, Callable[..., Any]] = {
    "masked mean": lambda x, y, m, w, t, k: ((x @ w).sum(-1) * m).sum() / m.sum(),
    "at least one": lambda x, y, m, w, t, k: ((x @ w).sum(-1) * m).sum() / jnp.maximum(m.sum(), 1),
    "at least one, float": lambda x, y, m, w, t, k: (x[..., 0] * m).sum() / jnp.maximum(m.sum().astype(jnp.float32), 1),
    "inverse": lambda x, y, m, w, t, k: (x.sum(-1) * (m * (1.0 / (m.sum() + 1e-6)))).sum(),
    "where": lambda x, y, m, w, t, k: x.mean(where=m[..., None]),
    "average": lambda x, y, m, w, t, k: 2 * jnp.average(x.sum(-1), weights=m.astype(jnp.float32)) + t,
    "known labels": lambda x, y, m, w, t, k: (entropy(x, y) * (y != 0)).sum() / jnp.count_nonzero(y),
    "rows by index": lambda x, y, m, w, t, k: (x[jnp.arange(BATCH), y, 0] * y).sum() / y.sum(),
    "jit": lambda x, y, m, w, t, k: jax.jit(lambda x, m: jnp.where(m.any(), (x * m).sum() / m.sum(), 0))(x[..., 0], m),
    "behind a condition": lambda x, y, m, w, t, k: jax.lax.cond(
        m.any(), lambda: (x[..., 0] * m).sum() / m.sum(), lambda: 0.0
    ),
    "after a standardization": lambda x, y, m, w, t, k: (
        (((x - x.mean((0, 1))) / x.std((0, 1)) @ w).sum(-1) ** 2 * m).sum() / m.sum()
    ),
}

MIXED: dict[str, Callable[..., Any]] = {
    "similarities": lambda x, y, m, w, t, k: entropy((x[:, 0] @ x[:, 0].T)[:, None], jnp.arange(BATCH)).mean(),
    "two views": lambda x, y, m, w, t, k: jax.nn.logsumexp(
        jnp.concatenate([x[:, 0], x[:, 1] @ w]) @ jnp.concatenate([x[:, 0], x[:, 1]]).T, 1
    ).mean(),
    "pairs": lambda x, y, m, w, t, k: jnp.abs(x[:, None] - x[None]).mean(),
    "equal labels": lambda x, y, m, w, t, k: (y[:, None] == y[None, :]).mean(),
    "pairs by vmap": lambda x, y, m, w, t, k: jax.vmap(lambda a: jax.vmap(lambda b: (a * b).sum())(x))(x).mean(),
    "softmax over the batch": lambda x, y, m, w, t, k: jax.nn.log_softmax(x.mean(1), axis=0).mean(),
    "root of a mean": lambda x, y, m, w, t, k: jnp.sqrt(((x @ w) ** 2).mean()),
    "product of means": lambda x, y, m, w, t, k: (x.mean((0, 1)) * jax.nn.softmax(x).mean((0, 1))).sum(),
    "standardization": lambda x, y, m, w, t, k: jnp.tanh((x - x.mean(0)) / x.std(0)).mean(),
    "covariance": lambda x, y, m, w, t, k: ((jnp.einsum("btd,bte->de", x, x) / BATCH - w) ** 2).sum(),
    "largest": lambda x, y, m, w, t, k: entropy(x, y).max(),
    "hardest examples": lambda x, y, m, w, t, k: jax.lax.top_k(entropy(x, y), 2)[0].mean(),
    "behind a condition": lambda x, y, m, w, t, k: jax.lax.cond(
        t > 0, lambda: jax.nn.log_softmax(x, axis=0).mean(), lambda: x.mean()
    ),
    "median": lambda x, y, m, w, t, k: jnp.median(entropy(x, y)),
    "remat": lambda x, y, m, w, t, k: jax.checkpoint(lambda x: jnp.exp(jnp.mean(x @ w)))(x),
}


def test_a_mean_joins_nothing():
    for name, function in MEANS.items():
        joins = joins_of(function)
        assert (joins.divided, joins.mixed) == (None, None), name


def test_a_quotient_by_a_sum_over_the_examples():
    for name, function in QUOTIENTS.items():
        joins = joins_of(function)
        assert joins.divided is not None, name
        assert joins.divided.startswith("`div` at "), name
        assert __file__ in joins.divided, name
        assert joins.mixed is None or name == "after a standardization"


def test_an_operation_across_examples():
    for name, function in MIXED.items():
        joins = joins_of(function)
        assert joins.divided is None, name
        assert joins.mixed is not None, name
        assert __file__ in joins.mixed, name
