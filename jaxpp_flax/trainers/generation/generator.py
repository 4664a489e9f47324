"""`trainer.generate`: groups of sequences go through the stages one behind another, so that every rank works."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpp_flax.trainers.generation.decoding import DecodingModel
from jaxpp_flax.trainers.generation.layout import Layout, layout_specs
from jaxpp_flax.trainers.generation.prompts import Group, Prompts
from jaxpp_flax.trainers.generation.rounds import GroupRun, run_in_turn
from jaxpp_flax.trainers.generation.sampling import Sampling, read_end_tokens
from jaxpp_flax.trainers.generation.steps import DecodingStep, first_progress, fixed_values
from jaxpp_flax.trainers.loop.process_synchronization import BatchComparison
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.setup import check_count
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.step.builder import ForwardOnly
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps
from jaxpp_flax.trainers.tuning.scheduling import Scheduling

__all__ = ["Generator"]

# XLA's CPU client stops at 32 computations in flight on a device, so no more calls than these are under way.
_MOST_UNDER_WAY = 16


@dataclass(frozen=True)
class Generator:
    """Continues sequences with the current weights; the state does not change.

    `meet` is called with the name of a call that every process must make after the same step.
    """

    adapter: ModelAdapter
    scheduling: Scheduling
    executables: CompiledSteps
    held: StateHolder
    meet: Callable[[str], None]

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int,
        lengths: Any = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        seed: int = 0,
        prefill: int = 1,
        groups: int | None = None,
        cache_length: int | None = None,
        cache_dtype: DTypeLike | None = None,
    ) -> list[np.ndarray]:
        """Continue each prompt by up to `max_new_tokens` tokens, pipelined, with a cache on each stage's devices.

        The model is brought into decoding form by Flax's convention: modules with an attribute `decode` get True, and
        modules with a method `init_cache(input_shape, dtype=...)`, as `nnx.MultiHeadAttention` has, make their
        `nnx.Cache` variables. The model must compute logits (batch, length, vocabulary) from tokens (batch, length).
        The state does not change. See `docs/generation.md`.

        Args:
          prompts: lists of tokens, of any lengths; or an integer array (batch, length).
          max_new_tokens: the most tokens to add to each prompt.
          lengths: for an array that is padded on the right: the length of each prompt.
          temperature: 0 takes the most likely token; otherwise logits are divided by this number, and sampled.
          top_k: sample among the k most likely tokens.
          top_p: sample among the most likely tokens that together have this probability.
          eos_token_id: the token, or tokens, that end a sequence.
          seed: of the samples. A sample depends on the seed, the number of the prompt and the position alone: not on
            stages, groups or processes.
          prefill: how many tokens of a prompt the model takes in one call. `nnx.MultiHeadAttention` takes one.
          groups: of sequences that are under way at once. Default: the number of stages, so that all of them work.
          cache_length: the positions in the cache of a sequence. Default: as many as the longest needs. Calls with
            equal numbers of prompts and equal `cache_length` share their compiled steps.
          cache_dtype: of the cache. Default: the dtype of each module's computation.

        Returns:
          One array for each prompt, in order: the new tokens alone, int32, of shape (n,) with n from 1 to
          `max_new_tokens`. There is no padding: a sequence ends with its end token, which is included, or is full.

        Raises:
          ModelError: if the model has no cache, does not use it, or does not take such lengths.
          ValueError, TypeError: for a prompt or an option that does not fit; nothing has run then.
        """
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, end_tokens=read_end_tokens(eos_token_id)
        )  # fmt: skip
        count = self.scheduling.num_stages if groups is None else check_count("groups", groups)
        new, prefill = check_count("max_new_tokens", max_new_tokens), check_count("prefill", prefill)
        given, adapter = Prompts.of(prompts, lengths), self.adapter
        if not isinstance(adapter, NnxModel):
            raise TypeError(
                "trainer.generate continues sequences with NNX models, and this model is of Linen. Move its weights "
                "(`trainer.variables`) to an NNX model, or decode with `module.apply(..., mutable=['cache'])`."
            )
        cache_length = cache_length if cache_length is None else check_count("cache_length", cache_length)
        shards = self.scheduling.batch_shards
        work = given.groups(count, max_new_tokens=new, multiple=shards, cache_length=cache_length)
        self.meet("trainer.generate")
        compared = BatchComparison(self.scheduling.mesh, "generation")
        compared.before([(group.tokens, fixed_values(group, sampling)) for group in work])
        make = functools.partial(self._decoding_model, adapter, length=work[0].tokens.shape[1] - 1, dtype=cache_dtype)
        prepared = self._prepare(make, given, work, [group.calls(prefill) for group in work], sampling)
        run_in_turn(prepared.runs, prepared.steps, self.held.weights().for_inference(), self._most_under_way(len(work)))
        found = {number: row for run in prepared.runs for number, row in run.sequences(sampling.end_tokens).items()}
        return [found[i] for i in range(len(found))]

    def _decoding_model(self, adapter: NnxModel, batch_size: int, *, length: int, dtype: Any) -> DecodingModel:
        state = self.held.memory
        return DecodingModel.of(
            adapter, state.params, state.model_state, batch_size=batch_size, length=length, dtype=dtype
        )

    def _prepare(
        self,
        make: Callable[[int], DecodingModel],
        given: Prompts,
        work: Sequence[Group],
        calls: Sequence[Sequence[int]],
        sampling: Sampling,
    ) -> _Prepared:
        """Check model and prompts, compile a step for each number of tokens, and place each group's arrays."""
        size, mesh, schedule = len(work[0].sequences), self.scheduling.mesh, self.scheduling.schedule
        model, counts = make(size), sorted({taken for each in calls for taken in each})
        forward = ForwardOnly(schedule) if schedule is not None else None
        step = DecodingStep(model=model, sampling=sampling, schedule=forward)
        tokens = {taken: jax.ShapeDtypeStruct((size, taken), jnp.int32) for taken in counts}
        for taken in counts:
            vocabulary = step.check(self.held.memory.for_inference(), model.cache, tokens[taken])
            given.check_vocabulary(vocabulary)
            sampling.check_vocabulary(vocabulary)
        progress, fixed = first_progress(work[0]), fixed_values(work[0], sampling)
        specs = layout_specs(mesh, model.cache, make(2 * size).cache, progress, fixed)
        steps = {
            taken: self.executables.for_decoding(step, ((model.cache, progress), tokens[taken], fixed), specs)
            for taken in counts
        }
        layout = Layout(steps[counts[0]], model, mesh)
        layout.check_fits(len(work))
        runs = [
            GroupRun(group, each, layout.carried(first_progress(group)), layout.fixed(fixed_values(group, sampling)))
            for group, each in zip(work, calls, strict=True)
        ]
        return _Prepared(runs, steps)

    def _most_under_way(self, num_groups: int) -> int:
        schedule = self.scheduling.schedule
        tasks = 1 if schedule is None else -(-schedule.num_stages // schedule.num_ranks)
        return max(1, min(2 * num_groups, _MOST_UNDER_WAY // tasks))


class _Prepared(NamedTuple):
    runs: list[GroupRun]
    steps: dict[int, Any]  # by the number of tokens that a call takes
