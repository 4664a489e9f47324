"""What equations of JAX tell by texts, and by objects without a public name: their scopes and their context.

JAX keeps the scopes of an equation as a stack of names, and says in no other way that an equation is work of a backward
pass, or a recomputation. Where a new JAX words it otherwise, such work counts as forward work: it may run on another
rank, at another time, and its results are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax

__all__ = ["context_on_mesh", "in_context", "is_future", "is_recomputed", "is_reference", "scopes_of", "transpositions"]

# The scope, for both implementations of `jax.checkpoint`, of what a backward pass computes again.
_RECOMPUTED = "rematted_computation"
# The scope of what a transposition makes, as in "transpose(jvp(layer))": the work of a backward pass.
_TRANSPOSED = "transpose("


def scopes_of(source: Any) -> str:
    """Return the scopes of an equation, outermost first, as text; `source` is its `source_info`.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = jax.named_scope("layer")(jnp.sin)
      >>> scopes_of(jax.make_jaxpr(layer)(1.0).eqns[0].source_info)
      'layer'
    """
    return str(getattr(source, "name_stack", ""))


def transpositions(scopes: str) -> int:
    """Return how often the work under these scopes was transposed; work of a backward pass was, at least once.

    Example:
      >>> import jax.numpy as jnp
      >>> equations = jax.make_jaxpr(jax.grad(jnp.sin))(1.0).eqns
      >>> [(equation.primitive.name, transpositions(scopes_of(equation.source_info))) for equation in equations]
      [('sin', 0), ('cos', 0), ('mul', 1)]
    """
    return scopes.count(_TRANSPOSED)


def is_recomputed(scopes: str) -> bool:
    """Return whether the work under these scopes computes again, in a backward pass, what `jax.checkpoint` dropped."""
    return _RECOMPUTED in scopes


def is_future(aval: Any) -> bool:
    """Return whether a type is that of a collective that is not done yet; its class has no public name.

    Example:
      >>> import jax
      >>> is_future(jax.typeof(1.0))
      False
    """
    return type(aval).__name__ == "AbstractFuture"


def is_reference(aval: Any) -> bool:
    """Return whether a type is that of a mutable array (`jax.new_ref`); JAX 0.12 has no public name for its class.

    Example:
      >>> import jax
      >>> is_reference(jax.typeof(1.0))
      False
    """
    return type(aval).__name__ == "AbstractRef"


def in_context(context: Any) -> AbstractContextManager[Any]:
    """Return the settings under which an equation was traced (`eqn.ctx`), to bind it again; None sets nothing.

    The context's class is private. One that cannot be entered sets nothing either: the operation is then bound as a
    function of the user's would be, without `jax.experimental.compute_on` and XLA metadata.
    """
    return getattr(context, "manager", None) or nullcontext()


def context_on_mesh(context: Any, mesh: Any) -> Any:
    """Return an equation's context (`eqn.ctx`) with the abstract mesh `mesh` in place of its own.

    The context's class is private. If a context cannot be copied by its slots, a fresh context replaces it. The fresh
    context lacks the settings of `jax.experimental.compute_on` and of XLA metadata.
    """
    try:
        copied = object.__new__(type(context))
        for slot in type(context).__slots__:
            if slot != "__weakref__" and hasattr(context, slot):
                object.__setattr__(copied, slot, getattr(context, slot))
        object.__setattr__(copied, "cur_abstract_mesh", mesh)
    except (AttributeError, TypeError):
        with jax.set_mesh(None), jax.sharding.use_abstract_mesh(mesh):
            copied = type(context)()
    return copied
