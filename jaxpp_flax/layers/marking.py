"""Marks on the result of a callable: shared by the NNX and Linen layers, and the `pipeline_stage` decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
from flax import linen as nn
from flax import nnx

from jaxpp_flax.engine.tracing.markers import mark_stage_end
from jaxpp_flax.layers.remat import check_remat, rematerialized

__all__ = ["MARK_RESULTS", "article", "is_marked", "marked", "pipeline_stage", "remedy_for"]

F = TypeVar("F", bound=Callable[..., Any])

_FLAX = (nnx.Pytree, nn.Module)
MARK_RESULTS = "Models of other libraries are marked where their layers are called: `x = mark_stage_end(layer(x))`."

# The attribute that identifies one marking wrapper. `functools.wraps` copies it, so `nn.jit` and others keep it.
_TOKEN = "_pipeline_stage_token"


def is_marked(function: Any) -> bool:
    """Return True if `function` marks its result."""
    return hasattr(function, _TOKEN)


def marked(function: F, name: str | None = None, remat: Any = None) -> F:
    """Wrap `function` so that its result ends with a mark; `remat` recomputes the block before the mark."""
    method_name = getattr(function, "__name__", "__call__")
    token = object()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = args[0] if args else None
        # With `super().__call__()`, two marked methods run for one block: only the outer one marks.
        outermost = getattr(getattr(type(owner), method_name, None), _TOKEN, token)
        if outermost is not token:
            return function(*args, **kwargs)
        own = getattr(owner, "stage_remat", None)
        chosen = remat if own is None else own
        block = _name_of(owner, method_name, name, function)
        with jax.named_scope(block):  # the name in a profile
            result = (function if chosen is None else rematerialized(function, chosen))(*args, **kwargs)
        if isinstance(result, (nn.Module, nnx.Module)):
            raise TypeError(_makes_a_module(block, result))
        return mark_stage_end(result, block, closes_block=True)

    setattr(call, _TOKEN, token)
    return call  # type: ignore[return-value]


def _makes_a_module(block: str, module: Any) -> str:
    kind = type(module).__name__
    where = "jaxpp_flax.linen.PipelineStage" if isinstance(module, nn.Module) else "PipelineStage"
    return (
        f"{block!r} is marked as a block, but returns the module {kind}: a mark needs arrays that a block computes, "
        f"so nothing is marked here. Decorate the class {kind}, or mark the module: `{where}(module)`."
    )


def _name_of(owner: Any, method_name: str, name: str | None, function: Any) -> str:
    """Return the name of a block: from the instance, the decorator, a Linen path, or the class or function."""
    own = getattr(owner, "stage_name", None)
    if isinstance(own, str):
        return own
    if name is not None:
        return name
    if getattr(type(owner), method_name, None) is None:
        return method_name
    if getattr(owner, "scope", None) is not None and getattr(owner, "path", None):
        return "/".join(owner.path)
    return type(owner).__name__ if method_name == "__call__" else method_name


@overload
def pipeline_stage(target: F, *, name: str | None = None, remat: Any = None) -> F: ...
@overload
def pipeline_stage(target: None = None, *, name: str | None = None, remat: Any = None) -> Callable[[F], F]: ...
def pipeline_stage(target: Any = None, *, name: str | None = None, remat: Any = None) -> Any:
    """Mark a function, a method, or a Module class (NNX or Linen) as one block of a pipeline.

    Each call ends with a mark. The model may be cut into stages at a mark. Parameters keep their paths. Outside a
    pipeline, the results are the same, and `remat` recomputes as well.

    Args:
      target: a function or method with any arguments and any pytree of arrays as its result; or a class with
        `__call__`, which is changed in place. A Linen method may be decorated above or below `nn.compact`.
      name: the name of the block, for assignments by name and for messages. Default: the instance's `stage_name`, a
        Linen module's path, or the name of the class or function. Names that occur several times are numbered in
        order of execution (`Block_0`, `Block_1`).
      remat: "full" recomputes the block in the backward pass, so that only the block's input is kept; a
        `jax.checkpoint` policy selects more values to keep. Default: the instance's `stage_remat`, or None, which
        keeps all values.

    Returns:
      The marked function or class; without `target`, a decorator.

    Raises:
      TypeError: if `target` is an instance of a Module, a class without `__call__` or of another library, or cannot be
        called; if `remat` is another value. A call raises it if the block's result is a Module.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> @pipeline_stage
      ... def layer(w, x):
      ...     return jnp.tanh(x @ w)
      >>> jax.jit(layer)(jnp.ones((3, 2)), jnp.ones((1, 3))).shape
      (1, 2)
      >>> from flax import nnx
      >>> @pipeline_stage(name="block")
      ... class Block(nnx.Linear):
      ...     pass
      >>> Block(3, 2, rngs=nnx.Rngs(0))(jnp.ones((1, 3))).shape
      (1, 2)
    """
    check_remat(remat, "pipeline_stage")
    if target is None:
        return functools.partial(pipeline_stage, name=name, remat=remat)
    if isinstance(target, type):
        if not any("__call__" in vars(base) for base in target.__mro__):
            raise TypeError(
                f"pipeline_stage got the class {target.__name__}, which has no `__call__` to mark. "
                "Decorate the method that computes the block instead."
            )
        if not issubclass(target, _FLAX):
            raise TypeError(f"pipeline_stage got the class {target.__name__}, which is no Flax module. {MARK_RESULTS}")
        if not is_marked(target.__call__):
            target.__call__ = marked(target.__call__, name, remat)  # type: ignore[method-assign]
        return target
    if inspect.isroutine(target) or isinstance(target, functools.partial):
        return marked(target, name, remat)
    kind, remedy = type(target).__name__, "Decorate a function, method or Module class."
    if callable(target):
        remedy = "Wrap it: `PipelineStage(module)`." if isinstance(target, _FLAX) else MARK_RESULTS
    raise TypeError(f"pipeline_stage got {article(kind)} {kind}, neither a function nor a class. {remedy}")


def remedy_for(module: Any) -> str:
    """Return advice for an argument of `PipelineStage` that is no module of Flax."""
    if isinstance(module, type):
        flax = "Decorate the class with @pipeline_stage, or pass an instance."
        return flax if issubclass(module, _FLAX) else MARK_RESULTS
    if inspect.isroutine(module) or isinstance(module, functools.partial):
        return "Decorate a function with @pipeline_stage."
    return MARK_RESULTS if callable(module) else "Pass a module, or mark an array with `mark_stage_end(x)`."


def article(noun: str) -> str:
    """Return the article of a noun.

    Example:
      >>> article("Attrs"), article("Table")
      ('an', 'a')
    """
    return "an" if noun[:1].lower() in "aeiou" else "a"
