"""Find out if what a call has changed beside values would change the next call.

Plain Flax keeps new variables and attributes, and the next call may read them. A trainer drops them, which changes
nothing if the next call computes the same: a value that is kept to look at, a flag that each call sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flax import nnx
from jax.extend import core as jex_core

from jaxpp_flax.engine.tracing.ir import bodies, opened, without_high_calls
from jaxpp_flax.engine.tracing.markers import marker_p
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.writes.structure import Changes

__all__ = ["model_after", "same_program"]


def same_program(one: Any, other: Any) -> bool:
    """Return True if two jaxprs have the same equations, with the same numbers, and the same outputs.

    The second one may have more inputs at the end that it does not read. Functions in parameters (the rules of a
    `custom_vjp`) are not compared.

    Example:
      >>> import jax
      >>> step = jax.make_jaxpr(lambda x: x + 1)(0.0)
      >>> same_program(step, jax.make_jaxpr(lambda x, unread: x + 1)(0.0, 0.0))
      True
      >>> same_program(step, jax.make_jaxpr(lambda x: x + 2)(0.0))
      False
    """
    return list(_lines(without_high_calls(one))) == list(_lines(without_high_calls(other)))


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
