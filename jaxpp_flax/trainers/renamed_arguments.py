"""Where the arguments of `PipelineTrainer` went that have moved into an options class: errors that name the place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

__all__ = ["RENAMED", "NewPlace", "refuse_renamed"]

P = ParamSpec("P")
T = TypeVar("T")

_MAX_SHOWN = 60


@dataclass(frozen=True)
class NewPlace:
    """Where an old argument is found.

    Args:
      parameter: of `PipelineTrainer`.
      options: the class in `jaxpp_flax.trainers` that the parameter takes.
      field: of that class.
    """

    parameter: str
    options: str
    field: str

    def __str__(self) -> str:
        """As a user writes it."""
        return f"{self.parameter}={self.options}({self.field}=...)"


# For each parameter: the field that a plain value of it stands for.
_PLAIN = {"checkpoints": "directory", "assignment": "how", "mesh": "mesh", "seed": "seed"}
_POSITIONAL = ("directory", "how", "seed")

RENAMED: Mapping[str, NewPlace] = {
    "checkpoint_dir": NewPlace("checkpoints", "Checkpoints", "directory"),
    "save_every": NewPlace("checkpoints", "Checkpoints", "every"),
    "keep": NewPlace("checkpoints", "Checkpoints", "keep"),
    "async_save": NewPlace("checkpoints", "Checkpoints", "asynchronous"),
    "preemption_deadline": NewPlace("checkpoints", "Checkpoints", "preemption_deadline"),
    "gradient_dtype": NewPlace("precision", "Precision", "gradient_dtype"),
    "loss_scale": NewPlace("precision", "Precision", "loss_scale"),
    "on_nonfinite": NewPlace("precision", "Precision", "on_nonfinite"),
    "cost": NewPlace("assignment", "Assignment", "cost"),
    "memory_limit": NewPlace("assignment", "Assignment", "memory_limit"),
    "mesh_axes": NewPlace("mesh", "MeshOptions", "axes"),
    "num_ranks": NewPlace("mesh", "MeshOptions", "num_ranks"),
    "sharding_rules": NewPlace("mesh", "MeshOptions", "sharding_rules"),
    "wrt": NewPlace("parameters", "Parameters", "wrt"),
    "frozen": NewPlace("parameters", "Parameters", "frozen"),
    "ema_decay": NewPlace("parameters", "Parameters", "ema_decay"),
    "rng_names": NewPlace("seed", "RandomStreams", "names"),
    "eval_loss_fn": NewPlace("inference", "Inference", "eval_loss_fn"),
    "predict_fn": NewPlace("inference", "Inference", "predict_fn"),
    "tracker": NewPlace("logging", "Logging", "tracker"),
    "log_every": NewPlace("logging", "Logging", "every"),
    "progress": NewPlace("logging", "Logging", "progress"),
}
"""Each old argument of `PipelineTrainer` with its new place."""


def refuse_renamed(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """A constructor that raises where an argument goes by an old name; what is unknown is left to Python.

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
    """What to write in place of the old names: one call of an options class for each new parameter."""
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
    """A value in a message: its text, or dots where that is long or no Python."""
    text = repr(value)
    if len(text) <= _MAX_SHOWN and not text.startswith("<"):
        return text
    return getattr(value, "__name__", "...").replace("<lambda>", "...")
