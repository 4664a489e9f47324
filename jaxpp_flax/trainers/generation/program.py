"""The compiled steps for groups of one size and one length of the cache, made once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.trainers.generation.layout import Layout, layout_specs
from jaxpp_flax.trainers.generation.prompts import Group, Prompts
from jaxpp_flax.trainers.generation.rounds import GroupRun
from jaxpp_flax.trainers.generation.sampling import Sampling
from jaxpp_flax.trainers.generation.steps import DecodingStep, first_progress, fixed_values
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps

__all__ = ["DecodingProgram"]


class DecodingProgram:
    """Checks prompts, compiles the step for each number of tokens in a call, and prepares groups.

    Args:
      step: the step; its sampling stands for all with equal compiled parts.
      doubled: the shapes of the cache of twice as many sequences.
      group: a group of this size and length.
      executables: compiles the steps, and places the weights for them.
      mesh: None for one stage without a mesh.
    """

    def __init__(
        self, step: DecodingStep, doubled: Any, group: Group, executables: CompiledSteps, mesh: MpmdMesh | None
    ) -> None:
        self._step, self._executables, self._mesh, self._size = step, executables, mesh, len(group.sequences)
        self._progress, self._fixed = first_progress(group), fixed_values(group, step.sampling)
        self._specs = layout_specs(mesh, step.model.cache, doubled, self._progress, self._fixed)
        self._vocabulary: dict[int, int] = {}
        self.steps: dict[int, Any] = {}  # by the number of tokens that a call takes

    def check(self, state: Any, counts: Iterable[int], prompts: Prompts, sampling: Sampling) -> None:
        """Check the model for such numbers of tokens, and prompts and sampling for its vocabulary.

        Raises:
          ModelError, ValueError: as `DecodingStep.check`, and for tokens that the model does not have.
        """
        for taken in counts:
            if taken not in self._vocabulary:
                self._vocabulary[taken] = self._step.check(state, self._step.model.cache, self._tokens(taken))
            prompts.check_vocabulary(self._vocabulary[taken])
            sampling.check_vocabulary(self._vocabulary[taken])

    def compile(self, counts: Iterable[int]) -> None:
        """Compile the steps that are not compiled yet, and place the weights for them."""
        for taken in counts:
            arguments = ((self._step.model.cache, self._progress), self._tokens(taken), self._fixed)
            self.steps[taken] = self._executables.for_decoding(self._step, arguments, self._specs)

    def runs(self, groups: Iterable[Group], calls: Iterable[list[int]], sampling: Sampling) -> list[GroupRun]:
        """Return the groups with their arrays on the devices.

        Raises:
          ModelError: if the caches do not fit; none is made then.
        """
        groups = list(groups)
        self._layout.check_fits(len(groups))
        return [
            GroupRun(
                group,
                each,
                self._layout.carried(first_progress(group)),
                self._layout.fixed(fixed_values(group, sampling)),
            )
            for group, each in zip(groups, calls, strict=True)
        ]

    @cached_property
    def _layout(self) -> Layout:
        return Layout(next(iter(self.steps.values())), self._step.model, self._mesh)

    def _tokens(self, taken: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self._size, taken), jnp.int32)
