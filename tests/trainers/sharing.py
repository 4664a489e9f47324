"""Trainers that are made alike compile each step once: most of a test is the building of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec
from unittest import mock

import jax

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.engine.jit import MpmdFunction

P = ParamSpec("P")


def sharing_steps(*beside: str) -> Callable[[Callable[P, PipelineTrainer]], Callable[P, PipelineTrainer]]:
    """Let the trainers of a function share their compiled steps, if its arguments and the states' forms are equal.

    Args:
      beside: the names of arguments that no step depends on, such as a seed or a directory.
    """
    steps: dict[Any, tuple[Any, dict[Any, Any]]] = {}  # with the arguments: a name may be an address in memory

    def sharing(make: Callable[P, PipelineTrainer]) -> Callable[P, PipelineTrainer]:
        signature = inspect.signature(make)

        def made(*args: P.args, **kwargs: P.kwargs) -> PipelineTrainer:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            given |= given.pop("options", {})
            given = {name: value for name, value in sorted(given.items()) if name not in beside}
            trainer = make(*args, **kwargs)
            key = repr(given), jax.tree.structure(trainer.held.memory)
            trainer.steps.compiled = steps.setdefault(key, (given, {}))[1]
            return trainer

        return made

    return sharing


def assign_stages(trainer: PipelineTrainer, batch: Any) -> None:
    """Trace the step and place it on ranks as `trainer.compile` does; XLA compiles nothing."""
    steps = trainer.steps
    compiled = steps.compiled.copy()
    with mock.patch.object(MpmdFunction, "compile", MpmdFunction.place):
        steps.for_training(trainer.steps.rows.split(batch), lambda known, new: None)
    steps.compiled.clear()  # of what is only placed; other trainers may share it
    steps.compiled.update(compiled)
