"""Sums over a data axis and what follows them: operation by operation, in every dtype, equal to plain `jax.jit`.

Many rows share one compiled step: each row is one result of the loop's body. The sums are exact or wrap around in their
dtype, so a sum that is deferred past an operation wrongly gives another number, not another rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.passes.loop.defer_reductions import defer_reductions
from jaxpp_flax.engine.tracing.inline import inline
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.engine.tracing.primitives import facts_of
from jaxpp_flax.engine.tracing.treduce import Add, Concat, Last, Max, treduce
from jaxpp_flax.schedules import Schedule, Std1F1B
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly
from tests.engine.toys import indexless
from tests.helpers import tree_allclose
from tests.matrix.operations import (
    DTYPES,
    ROWS,
    SIDE,
    WIDE,
    WITHOUT_ROW,
    all_primitives,
    applicable,
    compilable,
    numbers,
    primitives_in,
)  # fmt: skip

MICROBATCHES, EXAMPLES, STAGES, SHARDS = 2, 4, 2, 2
SUMMED = tuple(d for d in DTYPES if d != "bool")
# Linear in float32, and found so: the sum of the shards' parts is taken after the loop.
DEFERRED = {
    "add_cotangents", "add_sums", "broadcast", "by_float32", "copy", "div", "div_sums", "dot", "dot_from_left",
    "dot_in_float32", "jit_linear", "mul", "name", "neg", "nothing", "pad", "reduce_sum", "reshape", "scaled",
    "slice", "squeeze", "stop_gradient", "sub_sums", "to_complex64", "to_float32", "transpose", "weak",
}  # fmt: skip
# Linear in the first sum, if the second one is whole.
BY_WHOLE = {"div_sums"}
# Linear as well, and reduced in every microbatch all the same: nothing that gradients are made of.
LEFT_ALONE = {
    "barrier", "bitcast", "conj", "conv", "cumsum", "dot_by_algorithm", "dynamic_slice", "gather", "imag",
    "max_pool_jvp", "max_pool_vjp", "real", "reduce_window_sum", "rev", "scatter_add_of_sum", "scatter_mul_into_sum",
    "scatter_sub_of_sum", "select_of_sum", "split", "tile", "triangular_solve", "tridiagonal_solve",
    "unstack",
}  # fmt: skip
# Not linear, but these numbers need not show it: nearly always true, exact in the narrower dtype, drawn from a seed, or
# apart by less than `rounding`.
INDIFFERENT = {
    "by_bfloat16", "by_float16", "is_finite", "ne", "nextafter", "random_fold_in", "random_gamma", "random_seed",
    "random_split", "reduce_and", "reduce_or", "rng_bit_generator", "to_bfloat16", "to_bool", "to_float16",
    "to_float8_e4m3fn", "to_float8_e5m2",
}  # fmt: skip
# The function that solves is traced under the mesh of all stages, which JAX compares with a stage's.
ON_AUTO_ONLY = {"linear_solve"}

# (operation, dtype of the sum)
Row = tuple[str, str]


def mesh_of(axis_type: AxisType) -> MpmdMesh:
    devices = np.array(jax.devices()[: STAGES * SHARDS]).reshape(STAGES, SHARDS)
    return MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data"), axis_types=(axis_type,) * 2), "stage")


def arguments(rows: Iterable[Row]) -> tuple[Any, Any]:
    """The operands that all shards share, and the batch: two arrays to sum for each dtype."""
    dtypes = sorted({dtype for _, dtype in rows})
    fixed = {d: numbers((SIDE, SIDE), d, seed=1) for d in dtypes}
    fixed = {d: np.where(x == 0, np.ones_like(x), x) for d, x in fixed.items()}
    batch = {d: numbers((MICROBATCHES, EXAMPLES, 2, SIDE, SIDE), d, seed=2) for d in dtypes}
    # A compiled function of JAX 0.10 takes no 4-bit arguments on CPU: these are narrowed inside.
    fixed, batch = ({d: x.astype(np.int8) if "int4" in d else x for d, x in xs.items()} for xs in (fixed, batch))
    rng = np.random.default_rng(3)
    fixed["weight"] = rng.normal(size=(SIDE, SIDE)).astype(np.float32)
    batch["x"] = rng.normal(size=(MICROBATCHES, EXAMPLES, SIDE)).astype(np.float32)
    return fixed, batch


def results_of(rows: Iterable[Row], fixed: Any, b: Any, whole: Any = None) -> dict[Row, Any]:
    """Each row on sums of its own: a sum that any equation needs whole is never deferred."""

    def sum_of(b: Any, dtype: str, index: int) -> jax.Array:
        return lax.reduce_sum(lax.index_in_dim(b[dtype].astype(dtype), index, 1, keepdims=False), (0,))

    second = {f: whole if whole is not None and f in BY_WHOLE else b for f, _ in rows}
    return {(f, d): ROWS[f](sum_of(b, d, 0), fixed[d].astype(d), sum_of(second[f], d, 1)) for f, d in rows}


def looped(rows: Iterable[Row], fixed: Any, batch: Any, schedule: Schedule | None) -> tuple[dict[Row, Any], Any]:
    def body(b: Any) -> Any:
        hidden = mark_stage_end(b["x"] @ fixed["weight"])
        return results_of(rows, fixed, b), (hidden @ fixed["weight"]).sum()

    return treduce(body, batch, schedule, operation=Add)


def parts(rows: Iterable[Row], fixed: Any, batch: Any) -> dict[Row, Any]:
    """What deferring would give: each operation on the shards' parts, and the sum of that."""
    size = EXAMPLES // SHARDS
    microbatches = [{k: v[m] for k, v in batch.items()} for m in range(MICROBATCHES)]
    shards = [({k: v[i : i + size] for k, v in b.items()}, b) for b in microbatches for i in (0, size)]
    first, *others = [results_of(rows, fixed, shard, b) for shard, b in shards]
    for other in others:
        first = jax.tree.map(jnp.add, first, other)
    return first


def rounding(dtype: Any) -> float:
    """How far two orders of the same sum and two compilations of the same function may differ, relative."""
    return max(1e-5, 8 * float(jnp.finfo(dtype).eps)) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def equal(actual: Any, expected: Any) -> bool:
    try:
        tree_allclose(actual, expected, rtol=rounding(expected.dtype))
    except AssertionError:
        return False
    return True


@functools.cache
def reference(rows: tuple[Row, ...]) -> Any:
    """Under plain `jax.jit`: what the loop returns, and what deferring everything would give."""
    both = jax.jit(lambda f, b: (looped(rows, f, b, None)[0], parts(rows, f, b)))(*arguments(rows))
    return jax.tree.map(np.asarray, both)


def check(rows: list[Row], axis_type: AxisType) -> tuple[set[Row], dict[Row, Any], dict[Row, Any]]:
    """Compare a table with plain `jax.jit`; gives the rows deferred, the expected values and the sums of parts."""
    left_out = ON_AUTO_ONLY if axis_type is AxisType.Explicit else set()
    keyed = tuple(sorted(row for row in rows if row[0] not in left_out))
    assert keyed, "a table without rows compares nothing"
    expected, parted = reference(keyed)
    fixed, batch = arguments(keyed)
    step = mpmd_jit_with_loop(
        lambda f, b: looped(keyed, f, b, ForwardOnly(Std1F1B(STAGES))),
        mesh_of(axis_type),
        in_specs=(P(), P(None, "data")),
    )
    actual, _ = step(fixed, batch)
    wrong = [row for row in keyed if not equal(actual[row], expected[row])]
    told = {row: (np.asarray(actual[row]).ravel()[:4], expected[row].ravel()[:4]) for row in wrong}
    assert not wrong, f"{len(wrong)} rows are not those of plain jit (found, expected): {told}"
    (loop,) = step.compile(fixed, batch).placed.loops
    deferred = {row for row, axes in zip(keyed, loop.batch_dims, strict=False) if axes is not None}
    lossy = [row for row in deferred if not equal(parted[row], expected[row])]
    assert not lossy, f"deferred past what is not linear: {lossy}"
    return deferred, expected, parted


def table(dtypes: Iterable[str], there: Callable[[str, str], bool] = applicable) -> list[Row]:
    return [(name, dtype) for dtype in dtypes for name in ROWS if there(name, dtype)]


def test_what_is_deferred_past():
    """Every operation on a float32 sum, traced and not compiled: the others are left as they are."""
    rows = tuple(sorted(table(["float32"])))
    fixed, batch = arguments(rows)
    example = jax.tree.map(lambda x: x[0], batch)
    graph, consts = from_jaxpr(jax.make_jaxpr(lambda b: list(results_of(rows, fixed, b).values()))(example))
    graph = inline(graph, flatten=True)
    known = dict.fromkeys(graph.inputs[len(consts) :], (0, "data"))
    deferred = defer_reductions(indexless(graph, [Add] * len(rows)), known, lambda axes: SHARDS)
    assert {name for (name, _), axes in zip(rows, deferred.axes, strict=True) if axes is not None} == DEFERRED


@pytest.mark.soak
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_every_operation_in_float32(axis_type: AxisType):
    """Which of them are deferred past is known, and each of the others would give another number if it were."""
    deferred, expected, parted = check(table(["float32"], compilable), axis_type)
    assert {name for name, _ in deferred} == DEFERRED
    indifferent = [r for r in expected if r not in deferred and equal(parted[r], expected[r])]
    assert {name for name, _ in indifferent} <= LEFT_ALONE | INDIFFERENT, "these rows do not tell right from wrong"


# A row of each kind in each dtype where it differs: what was deferred wrongly once, and what must be deferred.
REPRESENTATIVE: list[Row] = [
    *[(f"{way}_{to}", "float32") for way in ("to", "by") for to in ("bool", "int32", "uint8", "uint32")],
    ("by_int4", "float32"),
    *[(f"{way}_{to}", "float32") for way in ("to", "by") for to in ("float16", "bfloat16", "float8_e4m3fn")],
    *[(f"to_{to}", source) for source in ("uint8", "int8", "int32", "uint32") for to in ("float32", "int16", "bool")],
    *[("to_float32", source) for source in ("float16", "bfloat16", "int4", "float8_e4m3fn")],
    *[(name, dtype) for name in ("div", "rem", "mul", "nothing") for dtype in ("int32", "uint8", "float32", "float16")],
    *[(name, "float32") for name in ("dot", "dot_sums", "dot_in_int32", "pad", "pad_with_one", "scaled", "affine")],
    *[(name, "bfloat16") for name in ("nothing", "by_float32", "reduce_sum", "scaled", "round", "sign")],
    *[(name, "complex64") for name in ("nothing", "mul", "real", "conj", "abs")],
]
REPRESENTATIVE_DEFERRED: set[Row] = {
    *[("to_float32", source) for source in ("float16", "bfloat16")],
    *[(name, "float32") for name in ("div", "dot", "mul", "nothing", "pad", "scaled")],
    *[(name, "bfloat16") for name in ("nothing", "reduce_sum", "scaled")],
    *[(name, "complex64") for name in ("nothing", "mul")],
}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.slow
def test_a_row_of_each_kind(axis_type: AxisType):
    deferred, _, _ = check(REPRESENTATIVE, axis_type)
    assert deferred == REPRESENTATIVE_DEFERRED


def gradients_and_carries(params: Any, batch: Any, schedule: Schedule | None) -> Any:
    """A product for each way to keep a gradient, in the first stage, and a scan for each dtype of what it adds up."""

    def loss(p: Any, b: Any) -> jax.Array:
        x = b["x"]
        h = x @ p["float32"] + x @ p["int32"] + x @ p["float16"]
        h += (x.astype(jnp.bfloat16) @ p["bfloat16"].astype(jnp.bfloat16)).astype(jnp.float32)
        narrow = x.astype(jnp.bfloat16), p["narrow"].astype(jnp.bfloat16)
        h += jnp.matmul(*narrow, preferred_element_type=jnp.float32)
        return (mark_stage_end(h) @ p["last"] * b["y"]).sum()

    def added_up(b: Any, dtype: Any) -> Any:
        def add(total: jax.Array, row: jax.Array) -> Any:
            return total + (b["x"] * row).sum(0).astype(dtype), (b["x"] * row[::-1]).sum(0).astype(dtype)

        return lax.scan(add, jnp.zeros(SIDE, dtype), params["last"])

    def body(b: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, b)
        for name in ("int32", "float16"):
            gradients[name] = gradients[name].astype(name)
        return value, gradients, {d: added_up(b, d) for d in ("float16", "float32", "int32")}

    return treduce(body, batch, schedule, operation=Add)


def test_gradients_and_carries():
    """Float32 and bfloat16 gradients wait for the end of the loop; what is cut off or rounded in between does not."""
    names = ("float32", "int32", "float16", "bfloat16", "narrow", "last")
    rng = np.random.default_rng(0)
    # Ones and halves: every sum is exact in bfloat16, so the order of sums does not show.
    params = {name: rng.integers(-1, 2, (SIDE, SIDE)).astype(np.float32) for name in names}
    shape = (MICROBATCHES, EXAMPLES, SIDE)
    batch = {name: rng.integers(-1, 2, shape).astype(np.float32) / half for name, half in (("x", 2), ("y", 1))}
    expected = jax.jit(gradients_and_carries, static_argnums=2)(params, batch, None)
    step = mpmd_jit_with_loop(
        gradients_and_carries, mesh_of(AxisType.Auto), in_specs=(P(), P(None, "data")), static_argnums=2
    )
    actual = step(params, batch, Std1F1B(STAGES))
    tree_allclose(actual, jax.tree.map(np.asarray, expected), rtol=0, atol=0)
    (loop,) = step.compile(params, batch, Std1F1B(STAGES)).placed.loops
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(expected)]
    deferred = {path for path, axes in zip(paths, loop.batch_dims, strict=True) if axes is not None}
    gradients = {f"[1]['{name}']" for name in ("bfloat16", "float32", "last")}
    assert deferred == gradients | {"[0]", "[2]['float32'][0]", "[2]['float32'][1]"}


# How the loop reduces a sum over examples; what is stacked may get its new axis at any place.
REDUCED = {"add": Add, "last": Last, "max": Max, **{f"stack at {axis}": Concat(axis) for axis in range(-3, 3)}}


def reduced(weight: Any, batch: Any, schedule: Schedule | None) -> Any:
    """A matrix and a number for each operation."""

    def body(x: Any) -> Any:
        y = mark_stage_end(x @ weight) @ weight
        pairs = (y[:, :, None] * x[:, None, :], (y * y).sum(1))
        return [{name: (factor * pair).sum(0) for factor, name in enumerate(REDUCED, 1)} for pair in pairs]

    numbers_too = {
        name: Concat(max(-1, min(op.axis, 0))) if isinstance(op, Concat) else op for name, op in REDUCED.items()
    }
    return treduce(body, batch, schedule, operation=[REDUCED, numbers_too])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_stacked_sums_and_the_last_wait_as_added_ones_do(axis_type: AxisType):
    """The sum of maxima is no maximum of sums: that one is reduced in every microbatch."""
    rng = np.random.default_rng(0)  # small integers: every sum is exact
    weight = rng.integers(-2, 3, (SIDE, SIDE)).astype(np.float32)
    batch = rng.integers(-2, 3, (MICROBATCHES, EXAMPLES, SIDE)).astype(np.float32)
    expected = jax.jit(reduced, static_argnums=2)(weight, batch, None)
    step = mpmd_jit_with_loop(reduced, mesh_of(axis_type), in_specs=(P(), P(None, "data")), static_argnums=2)
    arguments = weight, batch, ForwardOnly(Std1F1B(STAGES))
    tree_allclose(step(*arguments), jax.tree.map(np.asarray, expected), rtol=0, atol=0)
    (loop,) = step.compile(*arguments).placed.loops
    waiting = {name for name, dim in zip(sorted(REDUCED) * 2, loop.batch_dims, strict=True) if dim is not None}
    assert waiting == {*REDUCED} - {"max"}


@pytest.mark.soak
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("dtype", [d for d in SUMMED if d != "float32"])
def test_every_operation_in_every_dtype(dtype: str, axis_type: AxisType):
    with jax.enable_x64(dtype in WIDE):
        check(table([dtype], compilable), axis_type)


def test_every_primitive_has_a_row():
    seen: set[Any] = set()
    for name, dtype in table(["float32", "int32", "complex64"]):
        operand = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.dtype(dtype))
        seen.update(primitives_in(jax.make_jaxpr(ROWS[name])(operand, operand, operand)))
    missing = {name for primitive, name in all_primitives().items() if primitive not in seen}
    assert missing <= set(WITHOUT_ROW), f"add a row, or a reason, for {sorted(missing - set(WITHOUT_ROW))}"
    assert {primitive for primitive in all_primitives() if facts_of(primitive).linear is not None} <= seen
