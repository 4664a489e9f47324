"""`treduce`: the loop over microbatches; `reductions.py` has the operations that reduce their results.

Under plain `jax.jit` the loop is an ordinary `jax.lax.fori_loop`, the reference for every test. Under
`mpmd_jit_with_loop` the loop becomes a pipeline that runs in the order of its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from jaxpp_flax._compat import needs_devices
from jaxpp_flax.engine.tracing.bodies.checks import check_carry, refuse_other_memory, refuse_references, same_type, says
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches, StackedMicrobatches
from jaxpp_flax.engine.tracing.bodies.several_shapes import (
    Entries,
    check_same_types,
    over_shared_constants,
    split_operands,
)
from jaxpp_flax.engine.tracing.ir import Graph, everywhere, from_jaxpr, struct_of
from jaxpp_flax.engine.tracing.reductions import Add, AddOp, Concat, Last, LastOp, Max, MaxOp, Op

if TYPE_CHECKING:
    from jaxpp_flax.schedules import Schedule

__all__ = [
    "Add", "AddOp", "Concat", "Last", "LastOp", "Max", "MaxOp", "Op", "state_type", "treduce", "treduce_i",
    "treduce_items", "treduce_p",
]  # fmt: skip


treduce_p = jex_core.Primitive("treduce")
treduce_p.multiple_results = True


def _run(
    *operands: Any, body: Graph, num_consts: int, num_carry: int, length: int, operations: tuple[Op, ...], **more: Any
) -> list[Any]:
    """Run the loop in plain JAX, one microbatch after another."""
    consts, carry = operands[:num_consts], operands[num_consts:]
    results = body.outputs[num_carry:]
    states = [op.state(length, struct_of(y.aval)) for op, y in zip(operations, results, strict=True)]

    def step(
        index: jax.Array, loop: tuple[Sequence[Any], Sequence[Any]], body: Graph = body, consts: Sequence[Any] = consts
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        outputs = body.run(*consts, index, *loop[0])
        new = [op.update(s, y, index) for op, s, y in zip(operations, loop[1], outputs[num_carry:], strict=True)]
        return outputs[:num_carry], new

    last: tuple[Sequence[Any], Sequence[Any]] = list(carry), states
    if bodies := more.get("bodies"):
        shared, leaves = split_operands(consts, len(more["pattern"]), more["num_leaves"])
        for index in range(length):
            last = step(jnp.int32(index), last, bodies[more["pattern"][index]], (*shared, *leaves[index]))
    else:
        last = jax.lax.fori_loop(jnp.int32(0), jnp.int32(length), step, last)
    return [*last[0], *last[1]]


treduce_p.def_impl(_run)


@treduce_p.def_effectful_abstract_eval
def _abstract(
    *avals: Any, body: Graph, num_consts: int, num_carry: int, length: int, operations: tuple[Op, ...], **more: Any
) -> tuple[list[Any], set[Any]]:
    carry = map(struct_of, avals[num_consts : num_consts + num_carry])
    # By identity: a user's operations may compare equal and do different things.
    states: dict[tuple[int, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct] = {}
    reduced: list[jax.ShapeDtypeStruct] = []
    for op, result in zip(operations, body.outputs[num_carry:], strict=True):
        value = struct_of(result.aval).update(weak_type=result.aval.weak_type)
        if (id(op), value) not in states:
            states[id(op), value] = state_type(op, length, value)
        reduced.append(states[id(op), value])
    bodies: tuple[Graph, ...] = more.get("bodies") or (body,)
    effects = {effect for each in bodies for equation in each.equations for effect in equation.effects}
    return [jax.core.ShapedArray(s.shape, s.dtype, sharding=s.sharding) for s in (*carry, *reduced)], effects


def state_type(op: Op, length: int, value: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the type of an operation's state, as a loop of JAX has it: a weak type gives way to the values' type."""

    def loop(y: jax.Array) -> jax.Array:
        start = op.state(length, struct_of(jax.typeof(y)))
        return jax.lax.fori_loop(jnp.int32(0), jnp.int32(length), lambda i, state: op.update(state, y, i), start)

    return jax.eval_shape(loop, value)


mlir.register_lowering(treduce_p, mlir.lower_fun(_run, multiple_results=True))


def _for_devices(bodies: Iterable[Graph]) -> tuple[Any, ...]:
    """Return a parameter that tells JAX if a body needs known devices to be lowered: JAX cannot read the graph."""
    if not any(needs_devices(equation.primitive) for body in bodies for equation in everywhere(body)):
        return ()
    return (jax.make_jaxpr(lambda: jax.pure_callback(int, jax.ShapeDtypeStruct((), jnp.int32)))(),)


def _refuse(what: str, remedy: str) -> Callable[..., Any]:
    def rule(*_: Any, **__: Any) -> Any:
        raise TypeError(f"treduce cannot be {what}. {remedy}")

    return rule


ad.primitive_jvps[treduce_p] = _refuse(
    "differentiated from outside", "Differentiate its body instead: `treduce(jax.value_and_grad(loss), batch, ...)`."
)
batching.primitive_batchers[treduce_p] = _refuse(
    "vmapped from outside", "Put `jax.vmap` inside its body, around the work of one microbatch."
)


def _broadcast_operations(operation: Any, results: Any) -> list[Op]:
    """Return one operation for each leaf of `results`; `operation` is a prefix tree."""
    is_op = lambda node: isinstance(node, Op) and not isinstance(node, type)  # noqa: E731
    flat: list[Op] = []
    try:
        jax.tree.map(lambda op, sub: flat.extend([op] * len(jax.tree.leaves(sub))), operation, results, is_leaf=is_op)
    except ValueError as error:
        raise ValueError(
            "treduce's `operation` is not a prefix of what the body returns: the body returns "
            f"{jax.tree.structure(results)}, the operation is {operation!r}. Pass one operation for all results "
            "(`operation=Add`) or a tree with one operation for each part, e.g. `operation=(Concat(), Add)`."
        ) from error
    for op in flat:
        if not is_op(op):
            raise TypeError(
                f"treduce's `operation` holds {op!r} ({type(op).__name__}), which is no operation: "
                "use Add, Concat(axis), Max, Last, or an object with `state` and `update`."
            )
    for (path, result), op in zip(jax.tree_util.tree_leaves_with_path(results), flat, strict=True):
        if isinstance(op, Concat):
            try:
                op.position(len(result.shape))
            except ValueError as error:
                name = f"its result{jax.tree_util.keystr(path)}, {result.dtype}{list(result.shape)}"
                raise ValueError(f"treduce cannot stack {name}: {error}") from error
    return flat


_NO_CARRY: Any = object()
_DEFAULT_OPERATION = (Concat(), Add)


def treduce_i(
    fun: Callable[..., Any],
    length: int,
    schedule: Schedule | None = None,
    operation: Any = _DEFAULT_OPERATION,
    axis: int = 0,
    *,
    init: Any = _NO_CARRY,
) -> Any:
    """Reduce `fun(index)` over `index` in `range(length)`, pipelined over the stages marked in `fun`.

    Args:
      fun: the body of the loop: `fun(index)`; if `init` is given, `fun(carry, index) -> (carry, result)`.
      length: the number of microbatches, at least 1.
      schedule: the order in which each rank runs its tasks; plain `jax.jit` ignores it.
      operation: a prefix tree of operations for the body's results. The default is for `jax.value_and_grad`: it stacks
        the values and adds up the gradients. For Flax's fp8 layers, whose next scales are the largest gradients:
        `(Concat(), {"params": Add, "_overwrite_with_gradient": Max})`, with a loss divided by `length`.
      axis: the axis of the microbatches in the results that the default operation stacks. For another operation, give
        the axis to the operation: `Concat(axis)`.
      init: the carry before the first microbatch (running statistics, counters). Its leaves must keep shape and dtype.

    Returns:
      The reduced results; if `init` is given, the pair (last carry, reduced results).

    Raises:
      ValueError: if `length` is below 1, `operation` does not fit, or `axis` and `operation` are both given.
      TypeError: if a leaf of the carry changes shape or dtype, or an operation is not an `Op`.

    Example:
      >>> import jax.numpy as jnp
      >>> print(treduce_i(lambda i: jnp.float32(i), 4, operation=Add))
      6.0
    """
    if length < 1:
        raise ValueError(f"treduce needs at least one microbatch, got length={length}.")
    if axis != 0:
        if operation != _DEFAULT_OPERATION:
            raise ValueError(
                f"treduce_i got axis={axis} and the operation {operation!r}: `axis` is for the default operation. Give "
                f"it to the operation itself, e.g. `operation=(Concat({axis}), Add)`."
            )
        operation = (Concat(axis), Add)
    return _reduce(lambda microbatch, *given: fun(*given), length, schedule, operation, init)


def _reduce(
    fun: Callable[..., Any], length: int, schedule: Any, operation: Any, init: Any, entries: Entries | None = None
) -> Any:
    """Bind the loop: `fun` takes the leaves of a microbatch's entry, the carry if there is one, and the index."""
    has_carry = init is not _NO_CARRY
    carry = jax.tree.map(jnp.asarray, init if has_carry else ())
    carry_leaves, carry_tree = jax.tree.flatten(carry)
    refuse_other_memory("treduce's init is", carry, map(jax.typeof, carry_leaves))
    avals = [struct_of(jax.typeof(leaf)) for leaf in carry_leaves]
    representatives = [()] if entries is None else entries.of_shapes
    traced: list[tuple[Graph, list[Any]]] = []
    results: list[Any] = []
    for leaves in representatives:

        def body(*inputs: Any, count: int = len(leaves)) -> Any:
            microbatch, index, carried = inputs[:count], inputs[count], inputs[count + 1 :]
            if has_carry:
                return fun(microbatch, jax.tree.unflatten(carry_tree, carried), index)
            return (), fun(microbatch, index)

        structs = [struct_of(jax.typeof(leaf)) for leaf in leaves]
        jaxpr, shapes = jax.make_jaxpr(body, return_shape=True)(*structs, jax.ShapeDtypeStruct((), jnp.int32), *avals)
        if not (isinstance(shapes, tuple) and len(shapes) == 2):
            raise TypeError("treduce with `init=` needs a body that returns the pair (carry, result).")
        check_carry(avals, carry_tree, shapes[0])
        traced.append(from_jaxpr(jaxpr))
        results.append(shapes[1])
        refuse_references(traced[-1][0])
        refuse_other_memory("treduce's body returns", shapes, [atom.aval for atom in traced[-1][0].outputs])
        names = tuple(", ".join(says(_type_of(leaf, 1)) for leaf in each) for each in (representatives[0], leaves))
        check_same_types(results[0], results[-1], (names[0], names[1]), same_type)
    bodies, consts = over_shared_constants(traced)
    several: dict[str, Any] = {}
    if entries is not None:
        several = {"bodies": bodies, "pattern": entries.pattern, "num_leaves": len(representatives[0])}
        consts += [leaf for leaves in entries.leaves for leaf in leaves]
    flat = treduce_p.bind(
        *consts,
        *carry_leaves,
        body=bodies[0],
        num_consts=len(consts),
        num_carry=len(carry_leaves),
        length=length,
        operations=tuple(_broadcast_operations(operation, results[0])),
        partial_over=tuple(_partial_over(atom.aval) for atom in bodies[0].outputs),
        schedule=schedule,
        carry_names=tuple(jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(carry)),
        lowered_for=_for_devices(bodies),
        **several,
    )
    carried, reduced = flat[: len(carry_leaves)], flat[len(carry_leaves) :]
    reduced = jax.tree.unflatten(jax.tree.structure(results[0]), reduced)
    return (jax.tree.unflatten(carry_tree, carried), reduced) if has_carry else reduced


def _type_of(leaf: Any, begin: int) -> jax.ShapeDtypeStruct:
    """Return the type of a leaf without its first axes."""
    return jax.ShapeDtypeStruct(jnp.shape(leaf)[begin:], leaf.dtype)


def _partial_over(aval: Any) -> frozenset[str]:
    """Return the mesh axes over which a type keeps partial sums (`unreduced=`), on an Explicit mesh."""
    sharding = struct_of(aval).sharding
    return frozenset() if sharding is None else frozenset(sharding.spec.unreduced)


def _whole_along(leaf: jax.Array, axis: int) -> jax.Array:
    """Return `leaf` unsharded along the axis of the microbatches: JAX cannot index an axis that is typed as sharded."""
    sharding = struct_of(jax.typeof(leaf)).sharding
    given = () if sharding is None else sharding.spec.partitions
    spec = (*given, *[None] * (leaf.ndim - len(given)))
    if sharding is None or spec[axis] is None:
        return leaf
    entries = [None if i == axis % leaf.ndim else entry for i, entry in enumerate(spec)]
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, sharding.spec.update(partitions=tuple(entries))))


def treduce(
    fun: Callable[..., Any],
    xs: Any,
    schedule: Schedule | None = None,
    axis: int = 0,
    operation: Any = _DEFAULT_OPERATION,
    *,
    init: Any = _NO_CARRY,
) -> Any:
    """Reduce `fun(xs[i])` over the microbatches `i`, pipelined over the stages marked in `fun`.

    Args:
      fun: the body of the loop for one microbatch: `fun(x)`; if `init` is given, `fun(carry, x) -> (carry, result)`.
      xs: a pytree of arrays that all have the same size along `axis`: the number of microbatches. Or `Microbatches`,
        whose microbatches may differ in shape: the body is traced, and each of its tasks compiled, once for each shape.
        The results must have the same types for each of them.
      axis: the axis of the microbatches in every leaf of `xs`; `Microbatches` have none.
      schedule, operation, init: as in `treduce_i`.

    Returns:
      The reduced results; if `init` is given, the pair (last carry, reduced results).

    Raises:
      ValueError: if `xs` has no array, or its leaves have different sizes along `axis`; also the errors of `treduce_i`.
      TypeError: if a result of `Microbatches` has another type for one shape than for another.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss(w, x):
      ...     return jnp.sum((x @ w) ** 2)
      >>> def step(w, batch):
      ...     return treduce(lambda x: jax.value_and_grad(loss)(w, x), batch)
      >>> losses, gradient = jax.jit(step)(jnp.ones((3, 2)), jnp.ones((4, 5, 3)))
      >>> losses.shape, gradient.shape
      ((4,), (3, 2))

    Source: the loop of NVIDIA's JaxPP (Xhebraj, Lee, Chen and Grover, 2024).
    """
    if isinstance(xs, Microbatches | StackedMicrobatches):
        if axis != 0:
            raise ValueError(
                f"treduce got axis={axis} and Microbatches, which have no axis of microbatches: leave it out."
            )
        carry = {} if init is _NO_CARRY else {"init": init}
        return treduce_items(lambda *given: fun(*given[:-2], given[-1]), xs, schedule, operation, **carry)
    length = _common_size(xs, axis)
    xs = jax.tree.map(lambda x: _whole_along(jnp.asarray(x), axis), xs)

    def microbatch(index: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False), xs)

    if init is _NO_CARRY:
        return treduce_i(lambda i: fun(microbatch(i)), length, schedule, operation)
    return treduce_i(lambda carry, i: fun(carry, microbatch(i)), length, schedule, operation, init=init)


def treduce_items(
    fun: Callable[..., Any],
    batch: Microbatches | StackedMicrobatches,
    schedule: Schedule | None = None,
    operation: Any = _DEFAULT_OPERATION,
    *,
    init: Any = _NO_CARRY,
) -> Any:
    """Reduce `fun(i, x_i)` over the microbatches `x_i` of a batch; with `init`, `fun(carry, i, x_i)`. See `treduce`.

    Example:
      >>> batch = Microbatches([jnp.ones(2), jnp.ones(3)])
      >>> print(treduce_items(lambda i, x: i + x.sum(), batch, operation=Add))
      6.0
    """
    entries = Entries.of(batch)
    body = lambda leaves, *given: fun(*given, entries.microbatch(leaves, given[-1]))  # noqa: E731
    return _reduce(body, entries.length, schedule, operation, init, entries)


def _common_size(xs: Any, axis: int) -> int:
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(xs):
        name, shape = f"xs{jax.tree_util.keystr(path)}", jnp.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"treduce's {name} has shape {shape}, which has no axis {axis} of microbatches.")
        sizes[name] = shape[axis]
    if not sizes:
        raise ValueError("treduce got `xs` without a single array, so the number of microbatches is unknown.")
    if len(set(sizes.values())) > 1:
        listing = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise ValueError(
            f"treduce's leaves disagree about the number of microbatches along axis {axis} ({listing}). "
            "Give every leaf the same size there."
        )
    return next(iter(sizes.values()))
