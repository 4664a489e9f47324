"""JAX's high-level calls, rewritten to the calls that stand in jaxprs without them.

With `JAX_REMAT3=1`, `JAX_CUSTOM_VJP3=1` or `JAX_CUSTOM_JVP3=1`, `jax.checkpoint`, `jax.custom_vjp` and `jax.custom_jvp`
bind one primitive, `call_hi_primitive`. Its parameter `_prim` is an object that holds the function. JAX's own way to
open such a call, before it compiles a program, has no public name, and forgets where `jax.checkpoint` stood. The class
of `_prim` is public in part (`jax.experimental.hijax`); it is known here by its name and by its method `expand`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import primitives

from jaxpp_flax._compat_texts.traces import in_context

__all__ = ["without_high_calls"]


def without_high_calls(jaxpr: Any) -> Any:
    """Return a (closed) jaxpr in which plain calls and `checkpoint` replace high-level calls, at any depth.

    A jaxpr without high-level calls stays the same object.

    Example:
      >>> import jax.numpy as jnp
      >>> jaxpr = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0)
      >>> [equation.primitive is primitives.remat_p for equation in without_high_calls(jaxpr).eqns]
      [True]
    """
    return _Lowered().jaxpr(jaxpr)


def _is_high(equation: Any) -> bool:
    rule = getattr(equation.primitive, "is_high", None)  # no public name; a JAX without it has no such jaxprs
    return rule is not None and bool(rule(*(atom.aval for atom in equation.invars), **equation.params))


class _Lowered:
    """Rewrites jaxprs; one that several equations share stays shared."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}  # keeps the old jaxpr alive, so that no other one gets its id

    def jaxpr(self, closed: Any) -> Any:
        inner = getattr(closed, "jaxpr", closed)
        if not getattr(inner, "is_high", True):  # a JAX without this attribute is searched
            return closed
        if id(closed) not in self.known:
            equations = [self._equation(equation) for equation in inner.eqns]
            # An order of calls (`program_order`) is high, too: JAX forgets it where a jaxpr says that nothing is.
            high = {"is_high": any(map(_is_high, equations))} if hasattr(inner, "is_high") else {}
            low = inner.replace(eqns=equations, **high)
            self.known[id(closed)] = closed, low if inner is closed else closed.replace(jaxpr=low)
        return self.known[id(closed)][1]

    def _equation(self, equation: Any) -> Any:
        if equation.primitive.name == "call_hi_primitive" and "_prim" in equation.params:
            primitive, params = self._call(equation.params["_prim"], equation.ctx)
            return equation.replace(primitive=primitive, params=params)
        params = {name: self._value(value) for name, value in equation.params.items()}
        changed = any(params[name] is not value for name, value in equation.params.items())
        return equation.replace(params=params) if changed else equation

    def _value(self, value: Any) -> Any:
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            return self.jaxpr(value)
        if type(value) in (tuple, list):
            parts = [self._value(part) for part in value]
            return type(value)(parts) if any(new is not old for new, old in zip(parts, value, strict=True)) else value
        return value

    def _call(self, call: Any, context: Any) -> tuple[Any, dict[str, Any]]:
        """Return the primitive and the parameters of a call that does the same."""
        kind, params = type(call).__name__, call.params
        if kind == "CheckpointName":
            return primitives.name_p, {"name": params["name"]}
        if kind == "RematTraced":
            body = self.jaxpr(params["jaxpr"])
            if not getattr(body, "consts", ()):
                return primitives.remat_p, {
                    "jaxpr": getattr(body, "jaxpr", body), "policy": params.get("policy"), "differentiated": False,
                    "prevent_cse": params.get("prevent_cse", True),
                }  # fmt: skip

        def expanded(*flat: Any) -> Sequence[Any]:
            return jax.tree.leaves(call.expand(*jax.tree.unflatten(call.in_tree, flat)))

        with in_context(context):
            made = jax.make_jaxpr(expanded)(*call.in_avals_flat)  # types of JAX, with their shardings and memories
        return primitives.closed_call_p, {"call_jaxpr": self.jaxpr(made)}
