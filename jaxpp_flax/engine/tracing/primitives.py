"""What the engine knows of each primitive of JAX: the one table that passes and analyses read.

A row says what a primitive costs, what it does with the dimension of the examples, in which operands it is linear, and
a few facts more. A primitive without a row gets the safe answer of every question: it is costly, so only one task
computes it; it loses the dimension of the examples, and it is linear in no operand, so no sum is deferred past it.

To add a primitive, add a line to `_rows`. `tests/engine/tracing/test_primitives.py` walks all primitives of JAX, and
fails for one that neither has a row nor is listed there as unclassified.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jax.extend.core import primitives

__all__ = ["Batch", "Cost", "Facts", "Linear", "Operands", "facts_of"]


class Cost(enum.Enum):
    """What an equation costs. Bytes are what it moves, if no fusion saves them."""

    VIEW = enum.auto()  # a view, or a part of its readers' work: no bytes
    LIGHT = enum.auto()  # element by element, or moved data, or a small reduction: every task may repeat it
    KERNEL = enum.auto()  # work of its own: only a tiny result is computed twice
    READING = enum.auto()  # the same, and it moves its operands too
    PRODUCT = enum.auto()  # a contraction: it moves its operands, and even a tiny result may be much work
    LOOP = enum.auto()  # how often its body runs is not seen from its results; so for what has no row


class Batch(enum.Enum):
    """What becomes of the dimension of the examples."""

    LOST = enum.auto()
    ELEMENTWISE = enum.auto()  # each element of the result depends on the elements at the same place, and on scalars
    EACH = enum.auto()  # each result is its own operand
    REDUCED = enum.auto()  # it stays, unless it is one of `Facts.along`
    ALONG = enum.auto()  # the same, and no dimension goes
    SLICED = enum.auto()  # it stays where it is whole
    PLACED = enum.auto()  # it stays, unless a sharding of the user's says otherwise
    BROADCAST = enum.auto()  # the others have each a rule of their own in `analyses/batch_dimensions.py`
    CONVOLUTION = enum.auto()
    DOT = enum.auto()
    GATHER = enum.auto()
    RESHAPE = enum.auto()
    SCAN = enum.auto()
    SCATTER = enum.auto()
    SHARD_MAP = enum.auto()
    TRANSPOSE = enum.auto()


class Operands(enum.Enum):
    """The operands in which an operation is linear; every other operand must be the same for all parts of a sum."""

    FIRST = enum.auto()
    EITHER = enum.auto()
    EVERY = enum.auto()


@dataclass(frozen=True)
class Linear:
    """The operands in which an operation is linear; `analyses/linearity.py` has the rule for dtypes.

    `moves` says that entries are only moved, repeated, dropped, negated or converted.
    """

    operands: Operands
    moves: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A row of the table.

    Args:
      cost: what an equation costs.
      batch: what becomes of the dimension of the examples.
      along: the parameter that names the dimensions of `Batch.REDUCED` and `Batch.ALONG`.
      linear: None if the operation is linear in no operand, or not for every dtype.
      summed: the operands over whose shared dimension the operation sums.
      adds: the result is the sum of the operands.
      jumps: whether results jump where a float among the operands moves a little; by default, those that are no floats.
      sums_over_devices: the result is the sum of the operand over axes of the mesh.
      body: the parameter that holds a body which may replace the call without changing a value.
      keeps_order: the parameter that is true for calls whose body must stay together, in its order.
      recomputes: the body is one of `jax.checkpoint`.
      placing: the parameter with the sharding that the operation gives its operand.
      unread: parameters that change no result.
    """

    cost: Cost = Cost.LOOP
    batch: Batch = Batch.LOST
    along: str | None = None
    linear: Linear | None = None
    summed: tuple[int, ...] = ()
    adds: bool = False
    jumps: bool | None = None
    sums_over_devices: bool = False
    body: str | None = None
    keeps_order: str | None = None
    recomputes: bool = False
    placing: str | None = None
    unread: tuple[str, ...] = ()

    def body_in(self, params: Mapping[str, Any]) -> Any:
        """Return the body of a call with these parameters, if it may replace the call; None for all others."""
        whole = self.keeps_order is not None and params[self.keeps_order]
        return None if self.body is None or whole else params[self.body]

    def placing_in(self, params: Mapping[str, Any]) -> Any:
        """Return the sharding that an equation with these parameters gives its operand; None for all others."""
        return None if self.placing is None else params[self.placing]

    def dimensions_in(self, params: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the dimensions that an equation with these parameters works along."""
        along = () if self.along is None else params[self.along]
        return tuple(along) if isinstance(along, Sequence) else (int(along),)  # JAX may pass a number of NumPy

    @property
    def is_reduction(self) -> bool:
        """True if the result has fewer elements, each made of many."""
        return self.batch is Batch.REDUCED and self.along == "axes"


_UNKNOWN = Facts()

_ELEMENTWISE = """
    abs acos acosh and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp clz
    complex conj cos cosh digamma eq eq_to erf erf_inv erfc exp exp2 expm1 ge gt igamma igamma_grad_a igammac
    imag integer_pow le le_to lgamma log log1p log2 logistic lt lt_to max min mulhi ne nextafter not
    one_minus_square or polygamma polynomial population_count pow real reciprocal reduce_precision
    regularized_incomplete_beta rem rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sin sinh sqrt square tan tanh xor zeta
"""
# Light work whose results hold the dimension of the examples in no known place.
_LIGHT = """
    after_all axis_index create_token device_put dimension_size dynamic_update_slice empty empty2 from_edtype
    iota_2x32_shape layout_constraint platform_index pbroadcast pcast preduced pvary random_clone random_fold_in
    random_seed random_split random_unwrap random_wrap reduced_vary_cast reduced_vary_cast_p stack
    tile to_edtype unstack vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint zeros_like
"""
# A collective in two halves stands in the body of a `shard_map`: its start costs what the whole one costs.
_STARTS = """
    all_gather_reduced_start all_gather_start all_to_all_start pbroadcast_start ppermute_start psum_invariant_start
    psum_start reduce_scatter_start unreduced_psum_start unreduced_reduce_scatter_start
"""
_ENDS = "all_gather_done all_to_all_done pbroadcast_done ppermute_done psum_done reduce_scatter_done"
_KERNELS = """
    all_gather all_gather_invariant all_gather_reduced all_to_all approx_top_k cholesky cholesky_update
    composite cond core_map cudnn_fusion custom_linear_solve custom_partitioning eig eigh ffi_call fft geqp3 geqrf
    hessenberg householder_product linear_call lu lu_pivots_to_permutation ormqr pallas_call philox2x32 philox4x32 pmax
    pmin ppermute qr ragged_all_to_all random_bits random_gamma reduce reduce_scatter reduce_window reduce_window_max
    reduce_window_min reduce_window_sum rng_bit_generator rng_uniform schur select_and_gather_add select_and_scatter
    select_and_scatter_add svd symmetric_product threefry2x32 threefry4x32 triangular_solve tridiagonal
    pbroadcast_dynamic tridiagonal_solve unreduced_pmax unreduced_pmin unreduced_psum unreduced_reduce_scatter
"""


def _rows() -> Iterator[tuple[str, Facts]]:
    """Yield the rows: the names of primitives with equal facts stand in one line."""

    def rows(names: str, cost: Cost, batch: Batch = Batch.LOST, **facts: Any) -> Iterator[tuple[str, Facts]]:
        row = Facts(cost=cost, batch=batch, **facts)
        return ((name, row) for name in names.split())

    view, light, kernel, reading, product, loop = Cost
    elementwise = Batch.ELEMENTWISE
    moved = Linear(Operands.FIRST, moves=True)

    # Element by element.
    yield from rows(_ELEMENTWISE, light, elementwise)
    yield from rows("ceil floor round sign", light, elementwise, jumps=True)
    yield from rows("bitcast_convert_type is_finite", light, elementwise, jumps=False)
    yield from rows("add add_any", light, elementwise, linear=Linear(Operands.EVERY), adds=True)
    yield from rows("sub", light, elementwise, linear=Linear(Operands.EVERY))
    yield from rows("mul", light, elementwise, linear=Linear(Operands.EITHER))
    yield from rows("div", light, elementwise, linear=Linear(Operands.FIRST))
    yield from rows("neg convert_element_type", light, elementwise, linear=moved)
    yield from rows("copy stop_gradient", view, elementwise, linear=moved)
    yield from rows("copy_p", view, elementwise)
    yield from rows("name", view, elementwise, linear=moved, unread=("name",))
    yield from rows("optimization_barrier", view, Batch.EACH)
    yield from rows("stage_marker named_tensor", view, Batch.EACH, unread=("name", "identifier"))
    yield from rows("iota", view)

    # Moved data.
    yield from rows("broadcast_in_dim", view, Batch.BROADCAST, linear=moved)
    yield from rows("reshape", view, Batch.RESHAPE, linear=moved)
    yield from rows("squeeze", view, Batch.REDUCED, along="dimensions", linear=moved)
    yield from rows("slice", view, Batch.SLICED, linear=moved)
    yield from rows("transpose", light, Batch.TRANSPOSE, linear=moved)
    yield from rows("pad", light, Batch.SLICED, linear=Linear(Operands.EVERY, moves=True))
    yield from rows("dynamic_slice", light, Batch.SLICED)
    yield from rows("concatenate", light, Batch.ALONG, along="dimension")
    yield from rows("split", light, Batch.ALONG, along="axis")
    yield from rows("rev", light, Batch.ALONG, along="dimensions")
    yield from rows("sharding_constraint", light, Batch.PLACED, placing="sharding")
    yield from rows("reshard", light, Batch.PLACED, placing="dst_sharding")
    yield from rows(_LIGHT, light)
    yield from rows("gather", kernel, Batch.GATHER)
    yield from rows("scatter scatter-max scatter-min scatter-mul scatter-sub", reading, Batch.SCATTER)
    yield from rows("scatter-add scatter_add", reading, Batch.SCATTER, summed=(0, 2))

    # Sums and other reductions.
    yield from rows("reduce_sum", light, Batch.REDUCED, along="axes", linear=Linear(Operands.FIRST), summed=(0,))
    yield from rows(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_xor", light, Batch.REDUCED,
        along="axes",
    )  # fmt: skip
    yield from rows("cumlogsumexp cummax cummin cumprod cumsum", kernel, Batch.ALONG, along="axis")
    yield from rows("sort", reading, Batch.ALONG, along="dimension")
    yield from rows("top_k", kernel, Batch.ALONG, along="axis")
    yield from rows("psum psum_invariant", kernel, sums_over_devices=True)
    yield from rows("dot_general", product, Batch.DOT, linear=Linear(Operands.EITHER), summed=(0, 1))
    yield from rows("conv_general_dilated", product, Batch.CONVOLUTION)
    yield from rows("dot ragged_dot_general scaled_dot", product)

    # What holds programs.
    yield from rows("call closed_call eval_jaxpr", light, body="call_jaxpr", unread=("name",))
    # JAX 0.12: with `enforce`, calls in a given order (`jax.experimental.overlap.program_order`).
    yield from rows("program_order", loop, body="call_jaxpr", keeps_order="enforce")
    yield from rows("jit", light, body="jaxpr", unread=("name", "inline"))
    yield from rows("checkpoint remat2", light, body="jaxpr", recomputes=True)
    yield from rows("custom_jvp_call", light, body="call_jaxpr", unread=("jvp_jaxpr_fun", "name"))
    yield from rows("custom_vjp_call", light, body="call_jaxpr", unread=("fwd_jaxpr_thunk", "bwd", "out_trees", "name"))
    yield from rows("scan", loop, Batch.SCAN)
    yield from rows("while", loop)
    yield from rows("shard_map", kernel, Batch.SHARD_MAP)
    yield from rows(_KERNELS + _STARTS, kernel)
    yield from rows(_ENDS, view)


_BY_NAME = dict(_rows())
# JAX's own primitives by the name of their equations, as far as they are public.
_PUBLIC = {primitive.name: primitive for key, primitive in vars(primitives).items() if key.endswith("_p")}


@cache
def facts_of(primitive: Any) -> Facts:
    """Return the row of a primitive; a user's primitive with the name of a public one of JAX has none.

    Example:
      >>> facts_of(primitives.exp_p).batch, facts_of(primitives.dot_general_p).cost
      (<Batch.ELEMENTWISE: 2>, <Cost.PRODUCT: 5>)
    """
    is_jax = _PUBLIC.get(primitive.name, primitive) is primitive
    return _BY_NAME.get(primitive.name, _UNKNOWN) if is_jax else _UNKNOWN
