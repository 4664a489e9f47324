"""Annotations of a program: names of computations and arrays, calls for microbatches, loops over microbatches.

Under plain `jax.jit`, and outside any `jit`, an annotation changes no result.

A named computation is a `jax.jit` under a scope with its name in JAX's name stack, which every transformation of JAX
preserves; its transpose is a `jit` under that scope inside `transpose(...)`. So JAX applies all its rules of `jax.jit`
(differentiation, batching, rematerialisation, dead code). A wrong name can move work to another mesh, but it changes no
result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax._compat_texts.traces import transpositions

__all__ = [
    "call",
    "calls_in",
    "enumerated_for",
    "fori_loop",
    "name_scope",
    "named_computation",
    "named_tensor",
    "names_in",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

RESERVED_NAMES = ("main",)
RESERVED_PREFIX = "partir."


def name_scope(what: str, name: str, transpose_count: int = 0) -> AbstractContextManager[Any]:
    """Return the scope of a named "computation" or "tensor"; `transpose_count`: see `named_computation`."""
    # Brackets, slashes and parentheses have a meaning in name stacks.
    return jax.named_scope(f"mpmd.{what}[{quote(name, safe=' ')};{transpose_count}]")


def names_in(stack: str, what: str) -> list[tuple[str, int, int]]:
    """Return the names of computations or tensors around an equation, outermost first.

    Each has the number of transpositions that JAX made of it, and the count that is written in its scope.
    """
    matches = re.finditer(rf"mpmd\.{what}\[([^\]]*);(\d+)\]", stack)
    return [(unquote(match[1]), transpositions(stack[: match.start()]), int(match[2])) for match in matches]


def calls_in(stack: str) -> list[int]:
    """Return the call counters around an equation, outermost first."""
    return [int(counter) for counter in re.findall(r"mpmd\.call\[(\d+)\]", stack)]


def check_name(name: Any) -> str:
    """Check that a name may be assigned to a mesh, and return it.

    Raises:
      TypeError: if the name is not a string.
      ValueError: if the name is empty or reserved.
    """
    if not isinstance(name, str):
        raise TypeError(f"a computation's name must be a string, got {name!r} ({type(name).__name__}).")
    if not name or name in RESERVED_NAMES or name.startswith(RESERVED_PREFIX):
        raise ValueError(
            f"a computation cannot be named {name!r}: the names '', 'main' and those that start with "
            f"{RESERVED_PREFIX!r} are reserved. Use the name of the layer, such as 'block_0'."
        )
    return name


def named_computation(
    fn: Callable[..., Any] | None = None,
    *,
    name: str,
    transpose_count: int = 0,
    static_argnames: str | Sequence[str] | None = None,
) -> Any:
    """Give a function a name; `make_config` assigns the function and its backward pass to a mesh by this name.

    Args:
      fn: any JAX function; it may close over arrays. Without it, a decorator is returned.
      name: the name in assignments and messages. Several computations may share a name; then they share a mesh.
      transpose_count: for a backward pass written by hand: 1 for the transpose of the forward computation of this
        name, 2 for the transpose of the transpose. Transposes made by JAX are counted automatically.
      static_argnames: arguments that are not arrays, as in `jax.jit`.

    Returns:
      A function that computes the same.

    Raises:
      TypeError: if `name` is not a string.
      ValueError: if `name` is empty or reserved (`main`, `partir....`), or `transpose_count` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> @named_computation(name="double")
      ... def double(x):
      ...     return x + x
      >>> double(jnp.ones(2))
      Array([2., 2.], dtype=float32)

    After Shardy:MPMD's function of the same name (openxla/shardy, "MPMD RFC", 2025).
    """
    check_name(name)
    if transpose_count < 0:
        raise ValueError(f"transpose_count of {name!r} must be 0 or more, got {transpose_count}.")
    if fn is None:
        return functools.partial(
            named_computation, name=name, transpose_count=transpose_count, static_argnames=static_argnames
        )
    # A jit of its own keeps the computation in one piece through every transformation.
    jitted = jax.jit(fn, static_argnames=static_argnames)

    @functools.wraps(fn)
    def named(*args: Any, **kwargs: Any) -> Any:
        with name_scope("computation", name, transpose_count):
            return jitted(*args, **kwargs)

    return named


def call(fn: F, *, call_counter: int | None = None) -> F:
    """Mark a call of `fn` as the work of one microbatch.

    A schedule orders the named computations of different microbatches, forward and backward, by `call_counter`. A
    function is traced once for all its calls with arguments of equal types.

    Args:
      fn: a function of arrays (or trees of them).
      call_counter: the microbatch, from 0. None marks nothing.

    Raises:
      ValueError: if the counter is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> losses = [call(lambda x: x.sum(), call_counter=i)(jnp.ones(2)) for i in range(2)]
    """
    if call_counter is None:
        return fn
    if call_counter < 0:
        raise ValueError(
            f"call_counter must be 0 or more, got {call_counter}. Count the microbatches: "
            "`for i, x in enumerate(microbatches): carry = mpmd.call(step, call_counter=i)(carry, x)`."
        )
    jitted = jax.jit(fn)

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(f"mpmd.call[{call_counter}]"):
            args, kwargs = jax.tree.map(_as_value, (args, kwargs))
            return jitted(*args, **kwargs)

    return called  # type: ignore[return-value]


def _as_value(operand: Any) -> Any:
    """Turn a whole number (the index of a microbatch) into a value, so that all microbatches run one program."""
    if not _is_array(operand) or np.ndim(operand) or not jnp.issubdtype(jnp.result_type(operand), np.integer):
        return operand
    return jax.lax.copy_p.bind(operand)


def named_tensor(tensor: jax.typing.ArrayLike, name: str) -> jax.Array:
    """Give an array a name; `make_config` assigns the array and its gradient to a mesh by this name.

    Args:
      tensor: an array of any shape and dtype.
      name: as in `named_computation`; an array and a computation may share one.

    Returns:
      The array, unchanged.

    Raises:
      TypeError: if `name` is not a string.
      ValueError: if `name` is empty or reserved.

    Example:
      >>> import jax.numpy as jnp
      >>> named_tensor(jnp.ones(2), "hidden")
      Array([1., 1.], dtype=float32)
    """
    with name_scope("tensor", check_name(name)):
        return jax.lax.copy_p.bind(jnp.asarray(tensor))


def fori_loop(num_iterations: int, body_fun: Callable[[Any, T], T], init_val: T) -> T:
    """Run `jax.lax.fori_loop` from 0; each iteration is a microbatch, a `call` with its own counter.

    The loop is unrolled, and its body is traced once.

    Args:
      num_iterations: the number of times that `body_fun` runs.
      body_fun: takes the index (a `uint32` scalar) and the value, and returns the next value.
      init_val: the first value, any tree of arrays. `body_fun` must keep its structure, shapes and dtypes.

    Raises:
      TypeError: if `body_fun` returns another structure, shape or dtype, as in `jax.lax.fori_loop`.

    Example:
      >>> import jax.numpy as jnp
      >>> fori_loop(3, lambda i, x: x + 1, jnp.zeros(()))
      Array(3., dtype=float32)
    """
    once = functools.partial(jax.lax.fori_loop, jnp.uint32(0), jnp.uint32(1), body_fun)
    jax.eval_shape(once, init_val)  # JAX refuses a value that changes
    value = init_val
    for i in range(num_iterations):
        value = call(body_fun, call_counter=i)(jnp.uint32(i), value)
    return value


def _is_sequence(leaf: Any) -> bool:
    return isinstance(leaf, (list, tuple)) and all(_is_array(x) for x in leaf)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, bool, int, float, complex))


def enumerated_for(body_fun: Callable[[T, Any, Any], T], initial_carry: T, inputs: Any, *, unroll: bool = False) -> T:
    """Run `for i, x in enumerate(inputs): carry = body_fun(carry, i, x)`; each iteration is a microbatch.

    Args:
      body_fun: takes the carry, the index and the i-th inputs, and returns the next carry.
      initial_carry: the first carry: any tree of arrays.
      inputs: a tree whose leaves are lists or tuples of arrays, all of one length.
      unroll: the loop is unrolled in any case; its body is traced once.

    Raises:
      ValueError: if a leaf of `inputs` is not a sequence of arrays, or the lengths differ.

    Example:
      >>> import jax.numpy as jnp
      >>> enumerated_for(lambda carry, i, x: carry + x, jnp.zeros(()), [1.0, 2.0])
      Array(3., dtype=float32)
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(inputs, is_leaf=_is_sequence)
    for path, leaf in leaves:
        if not _is_sequence(leaf):
            raise ValueError(
                f"enumerated_for takes sequences of arrays, but the leaf of `inputs` at "
                f"{jax.tree_util.keystr(path) or 'the top'} is of type {type(leaf).__name__}. "
                "Pass a list with one array for each microbatch, e.g. `list(batch)`."
            )
    lengths = {jax.tree_util.keystr(path) or "inputs": len(leaf) for path, leaf in leaves}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"enumerated_for takes sequences of one length, got {lengths}. Each leaf of `inputs` needs one array for "
            "each microbatch."
        )
    carry = initial_carry
    for i in range(next(iter(lengths.values()))):
        element = jax.tree_util.tree_unflatten(tree, [leaf[i] for _, leaf in leaves])
        carry = call(body_fun, call_counter=i)(carry, jnp.uint32(i), element)
    return carry
