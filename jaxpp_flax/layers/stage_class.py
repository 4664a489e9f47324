"""Make the class that `PipelineStage(module)` gives to a module: a stage, and a subclass of the module's class.

A wrapper module would add a level to every parameter's path. So the module itself becomes a stage: its class becomes a
subclass that differs in one thing, a mark on the result of `__call__`.
"""

from __future__ import annotations

import copyreg
import types
from typing import Any

from jaxpp_flax.layers.marking import is_marked, marked

__all__ = ["mark_call", "origin_of", "register_metaclass", "stage_class"]

_ORIGIN = "_pipeline_stage_origin"
_classes: dict[tuple[type, type, str | None, Any], type] = {}


def stage_class(base: type, cls: type, name: str | None = None, remat: Any = None, **keywords: Any) -> type:
    """Return the subclass of both `cls` and `base` (a `PipelineStage`), made once.

    `keywords` go to `__init_subclass__`. `name` and `remat`, if given, are attributes of the class, for modules whose
    instances take no extra attribute.
    """
    key = (base, cls, name, remat)
    if key not in _classes:

        def body(namespace: dict[str, Any]) -> None:
            namespace.update(
                __module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__, **{_ORIGIN: key}
            )
            if name is not None:
                namespace["stage_name"] = name
            if remat is not None:
                namespace["stage_remat"] = remat

        _classes[key] = types.new_class(cls.__name__, (cls, base), keywords, body)
    return _classes[key]


def origin_of(cls: type) -> tuple[Any, type, str | None, Any] | None:
    """Return the arguments of the `stage_class` call that made `cls`; None for any other class."""
    return vars(cls).get(_ORIGIN)


def mark_call(cls: type) -> None:
    """Let `cls.__call__` mark its result, unless it does already; a class without `__call__` is not changed."""
    call = next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
    if call is not None and not is_marked(call):
        cls.__call__ = marked(call)  # type: ignore[method-assign]


def register_metaclass(metaclass: type) -> None:
    """Pickle the classes made here as the arguments to make them again; other classes are pickled by name as usual."""
    copyreg.pickle(metaclass, _reduce)  # type: ignore[arg-type]


def _reduce(cls: type) -> Any:
    origin = origin_of(cls)
    return cls.__qualname__ if origin is None else (_remake, origin)


def _remake(base: Any, cls: type, name: str | None, remat: Any = None) -> type:
    return base._stage_class_of(cls, name, remat)
