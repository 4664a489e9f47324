"""Find out if what a call has changed beside values would change the next call.

Plain Flax keeps new variables and attributes, and the next call may read them. A trainer drops them, which changes
nothing if the next call computes the same: a value that is kept to look at, a flag that each call sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend import core as jex_core

from jaxpp_flax.engine.tracing.ir import bodies, opened, struct_of, without_high_calls
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.writes.structure import Changes

__all__ = ["model_after", "same_program"]


def same_program(one: Any, other: Any) -> bool:
    """Return True if two jaxprs and their gradients have the same equations, with the same numbers, and outputs.

    The second one may have more inputs at the end that it does not read. Gradients show what the rules of a
    `custom_vjp` or `custom_jvp` do, which are functions in parameters.

    Example:
      >>> import jax
      >>> step = jax.make_jaxpr(lambda x: x + 1)(0.0)
      >>> same_program(step, jax.make_jaxpr(lambda x, unread: x + 1)(0.0, 0.0))
      True
      >>> same_program(step, jax.make_jaxpr(lambda x: x + 2)(0.0))
      False
    """
    count = len(opened(one).invars)
    return _same(one, other) and _same(_gradients(one, count), _gradients(other, count))


def _same(one: Any, other: Any) -> bool:
    same_numbers = all(a is b or _equal(a, b) for a, b in zip(one.consts, other.consts, strict=False))
    return same_numbers and list(_lines(without_high_calls(one))) == list(_lines(without_high_calls(other)))


def _gradients(jaxpr: Any, count: int) -> Any:
    """Return the jaxpr of the gradients of all float results by those of the first `count` inputs that are floats."""
    run, inputs = jex_core.jaxpr_as_fun(jaxpr), [value.aval for value in opened(jaxpr).invars]
    moving = [i for i, aval in enumerate(inputs[:count]) if jnp.issubdtype(aval.dtype, jnp.floating)]

    def gradients(*given: Any) -> Any:
        def results(values: Sequence[Any]) -> list[Any]:
            by_position = dict(zip(moving, values, strict=True))
            found = run(*[by_position.get(i, value) for i, value in enumerate(given)])
            return [result for result in found if jnp.issubdtype(jnp.result_type(result), jnp.floating)]

        found, pull = jax.vjp(results, [given[i] for i in moving])
        return pull([jnp.ones_like(result) for result in found])

    return jax.make_jaxpr(gradients)(*map(struct_of, inputs))


def _equal(one: Any, other: Any) -> bool:
    if jnp.shape(one) != jnp.shape(other) or one.dtype != other.dtype:
        return False
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    return np.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.inexact))


def _lines(jaxpr: Any) -> Iterator[Any]:
    inner = opened(jaxpr)
    names: dict[Any, Any] = {v: ("input", i) for i, v in enumerate((*inner.constvars, *inner.invars))}

    def name(atom: Any) -> Any:
        return (repr(atom.val), str(atom.aval)) if isinstance(atom, jex_core.Literal) else names[atom]

    for k, equation in enumerate(inner.eqns):
        is_mark = equation.primitive is marker_p  # marks have numbers
        yield equation.primitive.name, [*map(name, equation.invars)], None if is_mark else _plain(equation.params)
        for body in bodies(equation.params):
            yield from _lines(body)
        names |= {v: ("result", k, i) for i, v in enumerate(equation.outvars)}
    yield [*map(name, inner.outvars)]


def _plain(params: Any) -> list[Any]:
    return sorted((key, repr(value)) for key, value in params.items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def model_after(model: NnxModel, rest: Any, changes: Changes, made: Sequence[Any]) -> tuple[NnxModel, Any]:
    """Return an NNX model and its rest as the next call finds them; `made` has the values of `changes.made`."""
    paths = zip(changes.made, made, strict=True)
    return replace(model, graphdef=changes.graphdef), nnx.from_flat_state([*nnx.to_flat_state(rest), *paths])
