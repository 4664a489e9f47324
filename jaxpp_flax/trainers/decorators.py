"""Decorators of the methods of `PipelineTrainer`: shared docstrings, and errors for old arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["RENAMED", "NewPlace", "described_by", "refuse_renamed"]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MAX_SHOWN = 60


def described_by(method: Callable[..., Any]) -> Callable[[F], F]:
    """Give a function the docstring of `method`. The function only calls `method`.

    Example:
      >>> def work(): "Work hard."
      >>> @described_by(work)
      ... def hand_on(): work()
      >>> hand_on.__doc__
      'Work hard.'
    """

    def describe(function: F) -> F:
        function.__doc__ = method.__doc__
        return function

    return describe


@dataclass(frozen=True)
class NewPlace:
    """The new place of an old argument.

    Args:
      parameter: the parameter of `PipelineTrainer`.
      options: the class in `jaxpp_flax.trainers` that the parameter takes.
      field: the field of that class.
    """

    parameter: str
    options: str
    field: str

    def __str__(self) -> str:
        """Return the text that a user writes."""
        return f"{self.parameter}={self.options}({self.field}=...)"


# For each parameter: the field that a plain value sets.
_PLAIN = {"checkpoints": "directory", "mesh": "mesh", "seed": "seed"}
_POSITIONAL = ("directory", "seed")
# The fields that have another name than the old argument.
_FIELDS: Mapping[str, str] = {
    "checkpoint_dir": "directory", "save_every": "every", "async_save": "asynchronous",
    "mesh_axes": "axes", "rng_names": "names", "log_every": "every",
}  # fmt: skip
_MOVED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("checkpoints", "Checkpoints"): ("checkpoint_dir", "save_every", "keep", "async_save", "preemption_deadline"),
    ("precision", "Precision"): ("gradient_dtype", "loss_scale", "on_nonfinite"),
    ("mesh", "MeshOptions"): ("mesh_axes", "num_ranks", "sharding_rules"),
    ("parameters", "Parameters"): ("wrt", "frozen", "ema_decay"),
    ("seed", "RandomStreams"): ("rng_names",),
    ("inference", "Inference"): ("eval_loss_fn", "predict_fn"),
    ("logging", "Logging"): ("tracker", "log_every", "progress"),
}

RENAMED: Mapping[str, NewPlace] = {
    old: NewPlace(parameter, options, _FIELDS.get(old, old))
    for (parameter, options), names in _MOVED.items()
    for old in names
}
"""Each old argument of `PipelineTrainer` with its new place."""


def refuse_renamed(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """Wrap a constructor: arguments with old names raise; Python itself refuses unknown names.

    Example:
      >>> class Trainer:
      ...     @refuse_renamed
      ...     def __init__(self, *, checkpoints=None):
      ...         pass
      >>> Trainer(checkpoint_dir="run", save_every=2)
      Traceback (most recent call last):
      TypeError: checkpoint_dir='run', save_every=2: pass checkpoints=Checkpoints('run', every=2)...
    """

    @functools.wraps(init)
    def checked(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        old = [name for name in kwargs if name in RENAMED]
        if old:
            raise TypeError(_message(old, kwargs))
        init(self, *args, **kwargs)

    return checked


def _message(old: list[str], given: Mapping[str, Any]) -> str:
    """Return the replacement of the old names: one call of an options class for each new parameter."""
    parts: list[str] = []
    classes: list[str] = []
    for parameter in dict.fromkeys(RENAMED[name].parameter for name in old):
        names = [name for name in old if RENAMED[name].parameter == parameter]
        options = RENAMED[names[0]].options
        fields = {RENAMED[name].field: _shown(given[name]) for name in names}
        plain = _PLAIN.get(parameter)
        if plain is not None and given.get(parameter) is not None:
            fields.setdefault(plain, _shown(given[parameter]))
        if parameter == "checkpoints":
            fields.setdefault("directory", "directory")
        first = [fields.pop(name) for name in _POSITIONAL if name in fields]
        inside = ", ".join([*first, *(f"{name}={value}" for name, value in fields.items())])
        before = ", ".join(f"{name}={_shown(given[name])}" for name in names)
        parts.append(f"{before}: pass {parameter}={options}({inside})")
        classes.append(options)
    return f"{'; '.join(parts)}. From jaxpp_flax.trainers import {', '.join(classes)}."


def _shown(value: Any) -> str:
    """Return a value's text for a message, or dots if the text is long or not Python."""
    text = repr(value)
    if len(text) <= _MAX_SHOWN and not text.startswith("<"):
        return text
    return getattr(value, "__name__", "...").replace("<lambda>", "...")
