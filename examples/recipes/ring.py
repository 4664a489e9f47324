"""Causal attention over rows that devices share: keys and values go round a ring.

A device holds two chunks of each row, one early and one late (`zigzag`): so all devices
have as much to do (Liu et al., 2023; the order of chunks: Zhu, 2024). The backward goes
round again, and is computed from the queries, keys, values, results and normalizers of
the device's own chunks: nothing of another device's is kept.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

AXIS = "sequence"
# Sums of products that stay in float32, as all does that grows round the ring.
wide = partial(jnp.einsum, preferred_element_type=jnp.float32)


def zigzag(length: int, size: int) -> np.ndarray:
    """The order of a row where each of `size` parts has an early and a late chunk."""
    if length % (2 * size):
        raise ValueError(f"a row of {length} tokens has no {2 * size} equal chunks")
    chunks = np.split(np.arange(length), 2 * size)
    return np.concatenate([x for i in range(size) for x in (chunks[i], chunks[~i])])


def attention(q, k, v, places):
    """Attends over rows in the order of `zigzag`; without the axis, in any order.

    `q`, `k`, `v` are (batch, length, heads, features); heads of `q` may share one of
    `k` and `v`. `places` are each token's document and position, both (batch, length).
    """
    if AXIS not in jax.sharding.get_abstract_mesh().axis_names:  # outside of a pipeline
        weights = jax.nn.softmax(scores(q, k, places, places)).astype(v.dtype)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, for_all_heads(v, q))

    def local(*of_device):
        chunks = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 2, 1)), of_device)
        return jnp.concatenate([*ring(*chunks)], 1)

    parts = P(None, AXIS)
    mapped = jax.shard_map(local, in_specs=parts, out_specs=parts, axis_names={AXIS})
    return mapped(q, k, v, places)


def scores(q, k, mine, theirs):
    """(batch, heads, q, k), float32: a token sees its document, up to itself."""
    (document, place), (of_keys, place_of_keys) = mine, theirs
    sees = document[:, :, None] == of_keys[:, None]
    sees &= place[:, :, None] >= place_of_keys[:, None]
    products = wide("bqhd,bkhd->bhqk", q, for_all_heads(k, q)) / jnp.sqrt(q.shape[-1])
    return jnp.where(sees[:, None], products, -1e30)


def for_all_heads(x, q):
    return jnp.repeat(x, q.shape[2] // x.shape[2], 2)


def tour(visit, carry, keys):
    """Calls `visit` for queries of chunk `i` and each chunk of keys `j` in sight."""
    size, own = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    for i, j in ((0, 0), (1, 0), (1, 1)):
        carry, keys = visit(carry, keys, i, j)

    def turn(both, step):
        carry, keys = both
        keys = pass_on(keys)
        carry, keys = visit(carry, keys, 1, 0)
        late = (step > own).astype(int)  # these keys are of a device behind this one
        return visit(carry, keys, late, late), None

    return jax.lax.scan(turn, (carry, keys), jnp.arange(1, size))[0]


def pass_on(keys):
    size = jax.lax.axis_size(AXIS)
    return jax.lax.ppermute(keys, AXIS, [(i, (i + 1) % size) for i in range(size)])


@jax.custom_vjp
def ring(q, k, v, places):
    """Of chunks: (2, batch, length, heads, features) and (2, batch, length)."""
    return forward(q, k, v, places)[0]


def forward(q, k, v, places):
    def visit(carry, keys, i, j):
        (out, total), (k, v, theirs) = carry, keys
        s = scores(q[i], k[j], [x[i] for x in places], [x[j] for x in theirs])
        new = jnp.logaddexp(total[i], jax.nn.logsumexp(s, -1))
        old = jnp.exp(total[i] - new).swapaxes(1, 2)[..., None]
        weights = jnp.exp(s - new[..., None]).astype(v.dtype)
        add = wide("bhqk,bkhd->bqhd", weights, for_all_heads(v[j], q[i]))
        return (out.at[i].set(out[i] * old + add), total.at[i].set(new)), keys

    zero = 0 * q.astype(jnp.float32)
    empty = zero, zero[..., 0].swapaxes(2, 3) - 1e30
    (out, total), _ = tour(visit, empty, (k, v, places))
    out = out.astype(q.dtype)
    return out, (q, k, v, places, out, total)


def backward(kept, g):
    q, k, v, places, out, total = kept
    delta = wide("cbqhd,cbqhd->cbhq", out, g)

    def visit(dq, keys, i, j):
        k, v, theirs, dk, dv = keys

        def product(q, k, v):  # its gradients are those of attention for this pair
            s = scores(q, k, [x[i] for x in places], [x[j] for x in theirs])
            of_values = wide("bqhd,bkhd->bhqk", g[i], for_all_heads(v, q))
            of_values -= delta[i][..., None]
            return (jnp.exp(s - total[i][..., None]) * of_values).sum()

        add_q, add_k, add_v = jax.grad(product, (0, 1, 2))(q[i], k[j], v[j])
        dk, dv = dk.at[j].add(add_k), dv.at[j].add(add_v)
        return dq.at[i].add(add_q), (k, v, theirs, dk, dv)

    zeros = [0 * x.astype(jnp.float32) for x in (q, k, v)]
    dq, keys = tour(visit, zeros[0], (k, v, places, *zeros[1:]))
    return *(x.astype(q.dtype) for x in (dq, *pass_on(keys[-2:]))), None


ring.defvjp(forward, backward)
