"""`treduce` under plain `jax.jit` and eagerly: a loop over microbatches, written out by hand for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max, Op, treduce, treduce_i
from jaxpp_flax.schedules import Std1F1B

XS = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (Add, XS[0] + XS[1] + XS[2]),
        (Max, XS.max(0)),
        (Last, XS[2]),
        (Concat(), XS),
        (Concat(1), XS.T),
        (Concat(-1), XS.T),
    ],
    ids=str,
)
def test_operations(way: Any, operation: Op, expected: np.ndarray):
    result = way(lambda xs: treduce(lambda x: x, xs, operation=operation))(XS)
    np.testing.assert_array_equal(result, expected)


_FLOATS = ["float32", "bfloat16", *(name for name in dir(jnp) if name.startswith(("float8", "float4")))]
_OTHERS = ["bool", "int8", "uint8", "int4", "uint4", "complex64"]


@pytest.mark.parametrize("name", [*_FLOATS, *_OTHERS])
def test_max_starts_below_every_value(name: str):
    """Some small floats have no infinity, and one has no number below zero."""
    dtype = jnp.dtype(name)
    # XLA on CPU takes the smallest float8_e8m0fnu, 2**-127, for zero.
    lowest = {"bool": 0, "complex64": -np.inf, "float8_e8m0fnu": 2.0**-126}.get(name)
    if lowest is None:
        lowest = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else float(jnp.finfo(dtype).min)
    for values in ([lowest, lowest], [1, lowest], [lowest, 1], [1, 2]):
        if name == "bool":
            values = [bool(value) for value in values]
        xs = jnp.asarray(np.array(values).astype(dtype)[:, None])
        result = treduce(lambda x: x, xs, operation=Max)
        assert result.dtype == dtype
        assert result[0] == xs[np.argmax(values), 0], values  # `jnp.max` of float8_e8m0fnu is NaN


def test_max_keeps_infinities_and_nan():
    xs = jnp.array([[-np.inf, np.nan], [-np.inf, 1]])
    np.testing.assert_array_equal(treduce(lambda x: x, xs, operation=Max), jnp.max(xs, 0))


@pytest.mark.parametrize("ndim", [0, 1, 2])
def test_concat_takes_the_axes_of_stack(ndim: int):
    value = jnp.arange(2**ndim, dtype=jnp.float32).reshape((2,) * ndim)
    for axis in range(-ndim - 1, ndim + 1):
        found = treduce_i(lambda i: value + i, 3, operation=Concat(axis))
        np.testing.assert_array_equal(found, jnp.stack([value, value + 1, value + 2], axis))
    for axis in (-ndim - 2, ndim + 1, ndim + 5):
        with pytest.raises(ValueError, match="out of bounds"):
            jnp.stack([value, value], axis)
        text = rf"cannot stack its result\['a'\], float32.* axis {axis} is out of range.*from {-ndim - 1} to {ndim}\."
        with pytest.raises(ValueError, match=text):
            treduce_i(lambda i: {"a": value}, 3, operation={"a": Concat(axis)})
        with pytest.raises(ValueError, match="is out of range"):
            treduce_i(lambda i: (value, i), 3, axis=axis)
    with pytest.raises(TypeError, match=r"Concat\(1\.0\): the axis must be a whole number"):
        treduce_i(lambda i: value, 3, operation=Concat(1.0))  # type: ignore[arg-type]


def test_a_prefix_tree_of_operations():
    results = treduce(lambda x: {"a": (x, x), "b": x}, XS, operation={"a": Add, "b": Last})
    np.testing.assert_array_equal(results["a"][0], results["a"][1])
    np.testing.assert_array_equal(results["b"], XS[2])


@dataclass(frozen=True)
class Weighted:
    def state(self, num_microbatches: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.full(value.shape, num_microbatches, jnp.float32)

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return state / 2 + index * value


def test_an_operation_of_ones_own():
    assert isinstance(Weighted(), Op)
    result = treduce(lambda x: x.sum(), XS, operation=Weighted())
    state = np.float32(3)
    for i in range(3):
        state = state / 2 + i * XS[i].sum()
    np.testing.assert_allclose(result, state, rtol=1e-6)  # sums of four in another order


def test_the_default_suits_value_and_grad():
    loss = lambda w, x: (w * x).sum() ** 2  # noqa: E731
    values, grads = treduce(lambda x: jax.value_and_grad(loss)(jnp.ones(4), x), XS)
    np.testing.assert_allclose(values, [XS[i].sum() ** 2 for i in range(3)], rtol=1e-6)
    np.testing.assert_allclose(grads, sum(2 * XS[i].sum() * XS[i] for i in range(3)), rtol=1e-5)


def test_the_carry_goes_from_one_to_the_next():
    def body(carry: Any, x: jax.Array) -> Any:
        return {"n": carry["n"] + 1, "last": x}, carry["last"]

    carry, seen = treduce(body, XS, operation=Concat(), init={"n": jnp.int32(0), "last": jnp.zeros(4)})
    assert int(carry["n"]) == 3
    np.testing.assert_array_equal(carry["last"], XS[2])
    np.testing.assert_array_equal(seen, [np.zeros(4), XS[0], XS[1]])


def test_another_axis_and_an_index():
    np.testing.assert_array_equal(treduce(lambda x: x, XS.T, axis=1, operation=Concat()), XS)
    np.testing.assert_array_equal(treduce(lambda x: x, XS.T, axis=-1, operation=Concat()), XS)
    assert int(treduce_i(lambda i: i * i, 4, operation=Add)) == 0 + 1 + 4 + 9


def test_the_schedule_does_not_matter_to_plain_jax():
    with_schedule = jax.jit(lambda xs: treduce(lambda x: x, xs, Std1F1B(2), operation=Add))(XS)
    np.testing.assert_array_equal(with_schedule, treduce(lambda x: x, XS, operation=Add))


def test_side_effects_are_kept(capfd: pytest.CaptureFixture[str]):
    def body(x: jax.Array) -> jax.Array:
        jax.debug.print("saw {}", x.shape[0])
        return x

    jax.jit(lambda xs: treduce(body, xs, operation=Add))(XS)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("saw 4") == 3


def test_a_carry_must_keep_its_type():
    with pytest.raises(TypeError, match=r"changes its type at carry\['n'\]: float32\[4\] goes in, float32\[\] comes"):
        treduce(lambda carry, x: ({"n": x.sum()}, x), XS, init={"n": jnp.zeros(4)})
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(AxisType.Explicit,))
    cut = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh), pytest.raises(TypeError, match=r"at carry: float32\[4\] as P\('data',?\) goes in"):
        treduce(lambda carry, x: (jax.reshard(carry, P(None)), x), XS, init=cut)
