"""What is traced for the groups of a generation, once, and compiled for each number of tokens in a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.trainers.generation.decoding_form import DecodingForm, batch_dimensions, check_calls
from jaxpp_flax.trainers.generation.generation_loop import make_step
from jaxpp_flax.trainers.generation.layout import rank_specs, repeat_leaf
from jaxpp_flax.trainers.generation.sampling import Sampling
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly

__all__ = ["GenerationProgram"]


@dataclass(frozen=True, eq=False)
class GenerationProgram:
    """What was traced for groups of `prompts` prompts with `samples` samples each, and one length of the cache."""

    form: DecodingForm
    step: Callable[..., Any]
    prompts: int
    samples: int
    cache: LeafPrograms  # of the prompts
    dimensions: Sequence[int | None]  # of the sequences in each leaf of the cache
    specs: tuple[Any, ...]  # of `(carried, tokens, places)` on a rank
    vocabularies: dict[tuple[int, bool], int] = field(default_factory=dict)  # by the calls that were checked

    @classmethod
    def trace(
        cls, form: DecodingForm, sampling: Sampling, progress: Mapping[str, Any], steps: CompiledSteps
    ) -> GenerationProgram:
        """Trace for groups with a progress like this one."""
        schedule, mesh, prompts = steps.scheduling.schedule, steps.scheduling.mesh, len(progress["tokens"])
        prompts //= sampling.samples
        step = make_step(form.call, sampling, ForwardOnly(schedule) if schedule is not None else None)
        dimensions = batch_dimensions(form.make_cache, prompts)
        cache = LeafPrograms.trace(lambda: form.make_cache(prompts))
        specs: tuple[Any, ...] = (None, None, None)
        if mesh is not None:
            carried, tokens, padding = rank_specs(mesh, cache.shapes, dimensions, progress)
            places = {"padding": padding, "slot": jax.sharding.PartitionSpec()} if form.explicit else {}
            specs = (carried, tokens, places)
        return cls(form, step, prompts, sampling.samples, cache, dimensions, specs)

    def rows(self, in_prompts: bool) -> int:
        """Return the number of sequences in a call: prompts, or later all of their samples."""
        return self.prompts * (1 if in_prompts else self.samples)

    def arguments(self, progress: Any, taken: int, in_prompts: bool) -> tuple[Any, Any, Any]:
        """Return the shapes of `(carried, tokens, places)` in a call of so many tokens."""
        rows, times = self.rows(in_prompts), 1 if in_prompts else self.samples
        leaves, structure = jax.tree.flatten(self.cache.shapes)
        repeated = [
            jax.eval_shape(lambda leaf: repeat_leaf(leaf, dimension, times), leaf)  # noqa: B023
            for leaf, dimension in zip(leaves, self.dimensions, strict=True)
        ]
        places = {"padding": _integers(rows), "slot": _integers()} if self.form.explicit else {}
        return (jax.tree.unflatten(structure, repeated), progress), _integers(rows, taken), places

    def vocabulary(self, stage: StageContext, state: TrainState, taken: int, in_prompts: bool) -> int:
        """Check the model for calls of so many tokens, once, and return the size of its vocabulary."""
        if (taken, in_prompts) not in self.vocabularies:
            (cache, _), tokens, places = self.arguments(None, taken, in_prompts)
            specs = (None, None, None) if stage.mesh is None else (self.specs[0][0], *self.specs[1:])
            check = lambda state, read: check_calls(self.form, state, *read)  # noqa: E731
            self.vocabularies[taken, in_prompts] = stage.trace(check, state, (cache, tokens, places), specs)
        return self.vocabularies[taken, in_prompts]

    def repeat(self, cache: Any) -> Any:
        """Return the cache of all samples, from that of the prompts."""
        leaves, structure = jax.tree.flatten(cache)
        repeated = [repeat_leaf(*each, self.samples) for each in zip(leaves, self.dimensions, strict=True)]
        return jax.tree.unflatten(structure, repeated)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
