"""Every operation of `jax.lax` that can follow a sum over the batch, for the table of deferred reductions.

`ROWS` maps a name to a function of the sum and of an operand that does not depend on the batch, both (4, 4) and of one
dtype; a second sum is there for operations on two. `applicable` tells in which dtypes JAX traces an operation,
`compilable` in which of them plain `jax.jit` compiles it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex_core
from jax.extend.core import primitives
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SIDE = 4
# (sum, fixed operand, another sum) -> the result
Operation = Callable[[jax.Array, jax.Array, jax.Array], Any]

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COMPLEX = ("complex64", "complex128")
WIDE = ("int64", "uint64", "float64", "complex128")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX, *NARROW)

# Primitives that no row can hold, with the reason.
WITHOUT_ROW = {
    "all_gather": "a collective", "all_to_all": "a collective", "axis_index": "a collective", "pmax": "a collective",
    "pmin": "a collective", "ppermute": "a collective", "psum": "a collective", "ragged_all_to_all": "a collective",
    "after_all": "takes tokens", "create_token": "takes nothing",
    "empty2": "takes nothing",
    "get": "takes a reference", "swap": "takes a reference",
    "call": "no public function binds it", "closed_call": "no public function binds it",
    "eval_jaxpr": "no public function binds it", "custom_lin": "lives inside a transformation",
    "dce_sink": "returns nothing", "stage": "no public function binds it", "device_put": "refused in a step",
    "rng_uniform": "its numbers differ between runs", "sharding_constraint": "needs a mesh of its own",
    "select_and_scatter": "no public function binds it", "polynomial": "no public function binds it",
}  # fmt: skip


def _small(s: jax.Array) -> jax.Array:
    """Within (-1, 1), where inverse functions have their domain; exact where the sum is."""
    return s * jnp.asarray(2.0**-5, s.dtype)


def _positive(s: jax.Array) -> jax.Array:
    return s * s + jnp.asarray(1, s.dtype)


def _seed(s: jax.Array) -> jax.Array:
    return jnp.abs(s[0, 0]).astype(jnp.uint32)


def _definite(s: jax.Array) -> jax.Array:
    """Symmetric and positive definite."""
    return s @ s.T.conj() + jnp.eye(SIDE, dtype=s.dtype)


def _dot(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), **options)


def _conv(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.conv(a[None, None], b[None, None, :2, :2], (1, 1), "SAME")


def _window(kind: Callable[..., Any], init: Any) -> Operation:
    return lambda s, c, t: lax.reduce_window(s, np.asarray(init, s.dtype), kind, (2, 2), (2, 2), "VALID")


def _max_pool(s: jax.Array) -> jax.Array:
    return lax.reduce_window(s, np.asarray(-np.inf, s.dtype), lax.max, (2, 2), (2, 2), "VALID")


def _scatter(kind: Callable[..., Any], *, updates: bool) -> Operation:
    def run(s: jax.Array, c: jax.Array, t: jax.Array) -> jax.Array:
        into, values = (c, s[:2]) if updates else (s, c[:2])
        numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        return kind(into, jnp.array([[0], [2]]), values, numbers)

    return run


def _while(s: jax.Array, c: jax.Array, t: jax.Array) -> jax.Array:
    return lax.while_loop(lambda a: (a < 100).all(), lambda a: a + jnp.abs(a) + 1, _small(s))


def _solve(s: jax.Array, c: jax.Array, t: jax.Array) -> jax.Array:
    matrix = jnp.eye(SIDE, dtype=s.dtype) * 2
    return lax.custom_linear_solve(lambda x: matrix @ x, s[0], lambda _, b: jnp.round(b / 2))


@jax.custom_vjp
def _ceiling(x: jax.Array) -> jax.Array:
    return jnp.ceil(x)


_ceiling.defvjp(lambda x: (jnp.ceil(x), None), lambda _, g: (g,))

_ALIKE: dict[str, Operation] = {
    name: partial(lambda f, s, c, t: f(s), getattr(lax, name))
    for name in (
        "abs", "asinh", "atan", "bessel_i0e", "bessel_i1e", "bitwise_not", "cbrt", "ceil", "clz", "conj", "cos", "erf",
        "erfc", "exp2", "floor", "imag", "is_finite", "logistic", "neg", "population_count", "real", "sign", "sin",
        "square", "tan", "tanh",
    )
}  # fmt: skip
_SMALL: dict[str, Operation] = {
    name: partial(lambda f, s, c, t: f(_small(s)), getattr(lax, name))
    for name in ("acos", "asin", "atanh", "cosh", "erf_inv", "exp", "expm1", "log1p", "sinh")
}
_POSITIVE: dict[str, Operation] = {
    name: partial(lambda f, s, c, t: f(_positive(s)), getattr(lax, name))
    for name in ("acosh", "digamma", "lgamma", "log", "rsqrt", "sqrt")
}
_WITH_FIXED: dict[str, Operation] = {
    name: partial(lambda f, s, c, t: f(s, c), getattr(lax, name))
    for name in (
        "add", "atan2", "bitwise_and", "bitwise_or", "bitwise_xor", "div", "eq", "ge", "gt", "le", "lt", "max", "min",
        "mul", "ne", "nextafter", "rem", "sub",
    )
}  # fmt: skip
# Those without a public function, or not in every version of JAX.
_BOUND: dict[str, Operation] = {
    name: partial(lambda p, f, s, c, t: p.bind(*f(s, c)), getattr(primitives, f"{name}_p"), operands)
    for name, operands in {
        "eq_to": lambda s, c: (s, c), "le_to": lambda s, c: (s, c), "lt_to": lambda s, c: (s, c),
        "log2": lambda s, c: (_positive(s),), "one_minus_square": lambda s, c: (s,),
    }.items()
    if hasattr(primitives, f"{name}_p")
}  # fmt: skip
_CUMULATIVE: dict[str, Operation] = {
    name: partial(lambda f, s, c, t: f(s, 0), getattr(lax, name))
    for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
}
_REDUCED: dict[str, Operation] = {
    name: partial(lambda p, s, c, t: p(s), getattr(jnp, f))
    for name, f in {
        "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod", "reduce_and": "all", "reduce_or": "any",
    }.items()
}  # fmt: skip

STRUCTURE: dict[str, Operation] = {
    "nothing": lambda s, c, t: s,
    "broadcast": lambda s, c, t: lax.broadcast(s, (2,)),
    "copy": lambda s, c, t: lax.copy_p.bind(s),
    "name": lambda s, c, t: checkpoint_name(s, "kept"),
    "pad": lambda s, c, t: lax.pad(s, jnp.asarray(0, s.dtype), ((1, 0, 1), (-1, 2, 0))),
    "pad_with_one": lambda s, c, t: lax.pad(s, jnp.asarray(1, s.dtype), ((1, 0, 1), (-1, 2, 0))),
    "reshape": lambda s, c, t: lax.reshape(s, (2, 8)),
    "slice": lambda s, c, t: s[1:3, ::2],
    "squeeze": lambda s, c, t: lax.squeeze(s[:1], (0,)),
    "stop_gradient": lambda s, c, t: lax.stop_gradient(s),
    "transpose": lambda s, c, t: s.T,
    "reduce_sum": lambda s, c, t: lax.reduce_sum(s, (1,)),
    "barrier": lambda s, c, t: lax.optimization_barrier(s),
    "concatenate": lambda s, c, t: lax.concatenate((s, c), 1),
    "dynamic_slice": lambda s, c, t: lax.dynamic_slice(s, (jnp.abs(c[0, 0]).astype(jnp.int32), 0), (2, 2)),
    "dynamic_update_slice": lambda s, c, t: lax.dynamic_update_slice(s, c[:2], (1, 0)),
    "gather": lambda s, c, t: s[jnp.array([2, 0, 2])],
    "rev": lambda s, c, t: lax.rev(s, (0,)),
    "split": lambda s, c, t: lax.split(s, (1, 3))[1],
    "stack": lambda s, c, t: jnp.stack([s, c]),
    "tile": lambda s, c, t: jnp.tile(s, (1, 2)),
    "unstack": lambda s, c, t: jnp.unstack(s)[1],
}

ARITHMETIC: dict[str, Operation] = {
    **_ALIKE, **_SMALL, **_POSITIVE, **_WITH_FIXED, **_BOUND,
    "add_sums": lambda s, c, t: s + t,
    "add_cotangents": lambda s, c, t: jax.vjp(lambda a: (a, a), c)[1]((s, t))[0],
    "sub_sums": lambda s, c, t: s - t,
    "mul_sums": lambda s, c, t: s * t,
    "div_sums": lambda s, c, t: lax.div(s, _positive(t)),
    "div_by": lambda s, c, t: lax.div(c, _positive(s)),
    "dot": lambda s, c, t: _dot(s, c),
    "dot_from_left": lambda s, c, t: _dot(c, s),
    "dot_sums": lambda s, c, t: _dot(s, t),
    "dot_in_int32": lambda s, c, t: _dot(s, c, preferred_element_type=jnp.int32),
    "dot_in_float32": lambda s, c, t: _dot(s, c, preferred_element_type=jnp.float32),
    "dot_by_algorithm": lambda s, c, t: _dot(s, c, precision=lax.DotAlgorithmPreset.F32_F32_F32),
    "mul_by_itself": lambda s, c, t: s * s,
    "affine": lambda s, c, t: s * c + c,
    "scaled": lambda s, c, t: -s * c / jnp.asarray(4, s.dtype),
    "clamp": lambda s, c, t: lax.clamp(jnp.zeros_like(c), s, jnp.ones_like(c)),
    "complex": lambda s, c, t: lax.complex(s, c),
    "igamma": lambda s, c, t: lax.igamma(_positive(c), _positive(s)),
    "igammac": lambda s, c, t: lax.igammac(_positive(c), _positive(s)),
    "igamma_grad_a": lambda s, c, t: lax.igamma_grad_a(_positive(c), _positive(s)),
    "betainc": lambda s, c, t: lax.betainc(_positive(c), _positive(c), lax.logistic(_small(s))),
    "integer_pow": lambda s, c, t: lax.integer_pow(s, 3),
    "polygamma": lambda s, c, t: lax.polygamma(jnp.ones_like(c), _positive(s)),
    "pow": lambda s, c, t: lax.pow(_positive(s), _small(c)),
    "zeta": lambda s, c, t: lax.zeta(_positive(s), _positive(c)),
    "reduce_precision": lambda s, c, t: lax.reduce_precision(s * 1.37, 5, 2),
    "round": lambda s, c, t: lax.round(s, lax.RoundingMethod.TO_NEAREST_EVEN),
    "select_by_sum": lambda s, c, t: jnp.where(s > t, c, 0),
    "select_of_sum": lambda s, c, t: lax.select_n(c > 0, s, c),
    "shift_left": lambda s, c, t: lax.shift_left(s, jnp.full_like(s, 2)),
    "shift_right_logical": lambda s, c, t: lax.shift_right_logical(s, jnp.full_like(s, 2)),
    "shift_right_arithmetic": lambda s, c, t: lax.shift_right_arithmetic(s, jnp.full_like(s, 2)),
    "mulhi": lambda s, c, t: lax.mulhi(s, c),
    "softmax": lambda s, c, t: jax.nn.softmax(jnp.abs(s).astype(jnp.float32)),
    "norm": lambda s, c, t: jnp.linalg.norm(s),
}  # fmt: skip

REDUCTIONS: dict[str, Operation] = {
    **_CUMULATIVE, **_REDUCED,
    "approx_top_k": lambda s, c, t: lax.approx_max_k(s, 2)[0],
    "argmax": lambda s, c, t: jnp.argmax(s, 1),
    "argmin": lambda s, c, t: jnp.argmin(s, 1),
    "conv": lambda s, c, t: _conv(s, c),
    "fft": lambda s, c, t: jnp.abs(jnp.fft.fft(s)),
    "max_pool": lambda s, c, t: _max_pool(s),
    "max_pool_jvp": lambda s, c, t: jax.jvp(_max_pool, (s,), (c,))[1],
    "max_pool_vjp": lambda s, c, t: jax.vjp(_max_pool, s)[1](c[:2, :2])[0],
    "reduce": lambda s, c, t: lax.reduce(s, jnp.asarray(0, s.dtype), lambda a, b: a + b * b, (0,)),
    "reduce_xor": lambda s, c, t: lax.reduce_xor(s, (0,)),
    "reduce_window": _window(lambda a, b: a + b * b, 0),
    "reduce_window_min": _window(lax.min, np.inf),
    "reduce_window_sum": _window(lax.add, 0),
    "sort": lambda s, c, t: lax.sort(s, 1),
    "sort_floats": lambda s, c, t: jnp.unique(s, size=4),
    "top_k": lambda s, c, t: lax.top_k(s, 2)[0],
    "searchsorted": lambda s, c, t: jnp.searchsorted(jnp.sort(c[0]), s[0]),
}  # fmt: skip
for _name in ("add", "sub", "mul", "min", "max"):
    if hasattr(lax, f"scatter_{_name}"):
        REDUCTIONS[f"scatter_{_name}_into_sum"] = _scatter(getattr(lax, f"scatter_{_name}"), updates=False)
        REDUCTIONS[f"scatter_{_name}_of_sum"] = _scatter(getattr(lax, f"scatter_{_name}"), updates=True)
REDUCTIONS["scatter_of_sum"] = _scatter(lax.scatter, updates=True)

CALLS: dict[str, Operation] = {
    "cond_on_sum": lambda s, c, t: lax.cond(s[0, 0] > 0, lambda a: a, lambda a: -a, c),
    "cond_of_sum": lambda s, c, t: lax.cond(c[0, 0] > 0, lambda a: a * a, lambda a: -a, s),
    "custom_jvp": lambda s, c, t: jax.nn.relu(s),
    "custom_vjp": lambda s, c, t: _ceiling(s),
    "jit": lambda s, c, t: jax.jit(lambda a: jnp.round(a * a))(s),
    "jit_linear": lambda s, c, t: jax.jit(lambda a: a * c)(s),
    "linear_solve": _solve,
    "remat": lambda s, c, t: jax.checkpoint(lambda a: a * a)(s),
    "scan_of_sum": lambda s, c, t: lax.scan(lambda a, row: (a + row * row, a * row), c[0], s)[1],
    "while": _while,
}

RANDOM: dict[str, Operation] = {
    "random_seed": lambda s, c, t: jax.random.bits(jax.random.key(_seed(s)), (2,)),
    "random_split": lambda s, c, t: jax.random.key_data(jax.random.split(jax.random.key(_seed(s)))),
    "random_fold_in": lambda s, c, t: jax.random.key_data(jax.random.fold_in(jax.random.key(0), _seed(s))),
    "threefry": lambda s, c, t: primitives.threefry2x32_p.bind(*(row.astype(jnp.uint32) for row in jnp.abs(s)))[0],
    "random_gamma": lambda s, c, t: jax.random.gamma(jax.random.key(0), jnp.abs(_positive(s))),
    "rng_bit_generator": lambda s, c, t: lax.rng_bit_generator(jnp.abs(s[0]).astype(jnp.uint32), (2,))[1],
}

# What LAPACK computes, in its four dtypes.
LINEAR_ALGEBRA: dict[str, Operation] = {
    "cholesky": lambda s, c, t: lax.linalg.cholesky(_definite(s)),
    "eig": lambda s, c, t: jnp.sort(jnp.abs(lax.linalg.eig(s)[0])),
    "eigh": lambda s, c, t: lax.linalg.eigh(_definite(s))[1],
    "hessenberg": lambda s, c, t: jnp.abs(lax.linalg.hessenberg(s)[0]),
    "householder_product": lambda s, c, t: lax.linalg.householder_product(s, t[0]),
    "lu": lambda s, c, t: lax.linalg.lu(s)[0],
    "qr": lambda s, c, t: jnp.abs(lax.linalg.qr(s)[1]),
    "schur": lambda s, c, t: jnp.abs(jnp.diagonal(lax.linalg.schur(_definite(s))[0])),
    "svd": lambda s, c, t: lax.linalg.svd(s, compute_uv=False),
    "triangular_solve": lambda s, c, t: lax.linalg.triangular_solve(_definite(c), s, left_side=True, lower=True),
    "triangular_solve_by_sum": lambda s, c, t: lax.linalg.triangular_solve(_definite(s), c, left_side=True, lower=True),
    "tridiagonal": lambda s, c, t: lax.linalg.tridiagonal(_definite(s))[1],
    "tridiagonal_solve": lambda s, c, t: lax.linalg.tridiagonal_solve(s[0], _positive(s[1]) * 9, s[2], c),
}  # fmt: skip

# To and fro: what a dtype cannot hold is lost on the way.
CONVERSIONS: dict[str, Operation] = {
    **{f"to_{d}": partial(lambda d, s, c, t: s.astype(d), d) for d in DTYPES},
    **{f"by_{d}": partial(lambda d, s, c, t: s.astype(d).astype(s.dtype), d) for d in DTYPES if d not in COMPLEX},
    "bitcast": lambda s, c, t: lax.bitcast_convert_type(s, jnp.uint8),
    "weak": lambda s, c, t: lax.convert_element_type(s, s.dtype),
}

ROWS: dict[str, Operation] = {
    **STRUCTURE, **ARITHMETIC, **REDUCTIONS, **CALLS, **RANDOM, **LINEAR_ALGEBRA, **CONVERSIONS,
}  # fmt: skip


def applicable(name: str, dtype: str) -> bool:
    """Whether JAX can trace the operation, and can add its results up, in a dtype."""
    if name in LINEAR_ALGEBRA and dtype not in ("float32", "float64", *COMPLEX):
        return False
    target = name.partition("_")[2] if name in CONVERSIONS else dtype
    if not {dtype, target}.isdisjoint(WIDE) and not jax.config.read("jax_enable_x64"):
        return False
    if dtype in COMPLEX and target not in COMPLEX and target in DTYPES:
        return False  # JAX warns of a part that is lost
    try:
        result = jax.eval_shape(*_alone(name, dtype))
    except _NOT_THERE:
        return False
    # A compiled function of JAX 0.10 takes no 4-bit arguments on CPU, and an accumulator is one.
    return "int4" not in result.dtype.name


def compilable(name: str, dtype: str) -> bool:
    """Whether plain `jax.jit` has the operation on a sharded sum in a dtype: some can be traced and no more."""
    return applicable(name, dtype) and _compiles(name, dtype, jax.config.read("jax_enable_x64"))


@functools.cache
def _compiles(name: str, dtype: str, x64: bool) -> bool:
    function, *operands = _alone(name, dtype)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data"))
    try:
        jax.jit(function, in_shardings=sharding).lower(*operands).compile()
    except _NOT_THERE:
        return False
    return True


# What JAX and XLA say of a dtype that they do not take.
_NOT_THERE = (TypeError, ValueError, NotImplementedError, OverflowError, jax.errors.JaxRuntimeError)


def _alone(name: str, dtype: str) -> tuple[Any, ...]:
    """A row as a function, and what it takes; 4-bit integers are narrowed inside."""

    def summed(*xs: jax.Array) -> Any:
        result = ROWS[name](*(lax.reduce_sum(x.astype(dtype), (0,)) for x in xs))
        return result + result

    outside = "int8" if "int4" in dtype else dtype
    return summed, *[jax.ShapeDtypeStruct((2, SIDE, SIDE), jnp.dtype(outside))] * 3


def primitives_in(jaxpr: Any) -> Iterator[Any]:
    """The primitives of a jaxpr and of those inside it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation.primitive
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from primitives_in(inner)


def all_primitives() -> dict[Any, str]:
    """The primitives that JAX publishes, with their names."""
    modules = (lax, primitives)
    found = {getattr(m, n) for m in modules for n in dir(m) if n.endswith("_p")}
    return {primitive: primitive.name for primitive in found}


def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Numbers whose sums are exact in a dtype, or wrap around in it: quarters up to two, small and large integers."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(jnp.dtype(dtype))
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in NARROW:
        # No sum leaves 4 bits: XLA's CPU backend wraps such integers around only where it stores them.
        return rng.integers(0 if dtype == "uint4" else -1, 2, shape).astype(kind)
    if jnp.issubdtype(kind, jnp.integer):
        info = jnp.iinfo(kind)
        large = rng.integers(0, 2, shape) * (int(info.max) // 3)
        return (large + rng.integers(1, 4, shape)).astype(kind)
    values = rng.integers(-8, 9, shape) / 4
    if jnp.issubdtype(kind, jnp.complexfloating):
        return (values + 1j * rng.integers(-8, 9, shape) / 4).astype(kind)
    return values.astype(kind)
