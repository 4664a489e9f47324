"""`trainer.generate`: groups of sequences go through the stages one behind another, so that every rank works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings, without_ambient_mesh
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.generation.decoding_form import DecodingForm
from jaxpp_flax.trainers.generation.explicit_cache import ExplicitCache, decode_explicitly
from jaxpp_flax.trainers.generation.generated import Generated, read_generated
from jaxpp_flax.trainers.generation.generation_loop import Turns, first_progress, take_turns
from jaxpp_flax.trainers.generation.implicit_cache import decode_linen, decode_nnx
from jaxpp_flax.trainers.generation.layout import check_fits, make_carried, put
from jaxpp_flax.trainers.generation.program import GenerationProgram
from jaxpp_flax.trainers.generation.prompts import Lengths, check_vocabulary, make_groups, read_prompts, tokens_of_calls
from jaxpp_flax.trainers.generation.sampling import Sampling
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.weights import WeightCalls

__all__ = ["GenerationCalls"]

# XLA's CPU client stops at 32 computations in flight on a device, so no more calls than these are under way.
_MOST_UNDER_WAY = 16


class GenerationCalls(WeightCalls):
    """The method of `PipelineTrainer` that generates tokens; the state does not change."""

    @without_ambient_mesh
    def generate(
        self, prompts: Any, *, max_new_tokens: int, lengths: Any = None, num_samples: int = 1, temperature: float = 0.0,
        seed: int = 0, top_k: int | None = None, top_p: float | None = None,
        eos_token_id: int | Sequence[int] | None = None, logprobs: Literal["raw", "processed"] | None = None,
        prompt_logprobs: bool = False, cache: ExplicitCache | None = None, prefill: int | None = None,
        groups: int | None = None, cache_length: int | None = None, cache_dtype: Any = None,
    ) -> Generated:  # fmt: skip
        """Continue each prompt by up to `max_new_tokens` tokens, pipelined, with a cache on each stage's devices.

        The model uses `cache`, two functions of yours. Without it, a copy of the model is switched to decoding by
        Flax's convention. NNX: each attribute `decode` that is a boolean or None is set to True, and each method
        `init_cache(input_shape, dtype=...)`, as `nnx.MultiHeadAttention` has it, is called to make `nnx.Cache`
        variables. Linen: the module is used with `decode=True` and makes its collection `cache`. The model must compute
        logits (batch, length, vocabulary) from tokens (batch, length). The state does not change. See
        `docs/guides/generation.md`.

        Args:
          prompts: lists of tokens, of any lengths; or an integer array (batch, length).
          max_new_tokens: the most tokens to add to each prompt.
          lengths: for an array that is padded on the right: the length of each prompt.
          num_samples: the number of samples for each prompt. The prompt goes through the model once.
          temperature: 0 takes the most likely token. Otherwise the logits are divided by this number, and a token is
            sampled.
          top_k: sample among the k most likely tokens.
          top_p: sample among the most likely tokens that together have this probability.
          eos_token_id: the token, or tokens, that end a sequence.
          seed: the seed of the samples. A sample depends only on the seed, the index of its prompt, its own number
            among the prompt's samples and the position, and not on stages, groups or processes.
          logprobs: "raw" returns the log-probabilities of new tokens by the model, "processed" those after temperature,
            `top_k` and `top_p`. With temperature 0 both are equal.
          prompt_logprobs: return also those of each prompt's tokens, by the model.
          cache: the functions of a model with an explicit cache.
          prefill: how many tokens of a prompt the model takes in one call. Default: 1 for an implicit cache, since
            `nnx.MultiHeadAttention` takes one; for an explicit one, all that its `tokens_per_call` allows.
          groups: the number of groups of sequences in the pipeline at one time. Default: the number of stages, so that
            every stage has work.
          cache_length: the slots in the cache of a sequence. Default: as many as the longest needs. Calls with equal
            numbers of prompts and equal `cache_length` share their compiled steps.
          cache_dtype: the dtype of an implicit cache. Default: the dtype in which each module computes.

        Returns:
          The new tokens of each sequence, and what else was asked for, in the order of the prompts; the samples of a
          prompt stand side by side: that of number j of prompt i is at `i * num_samples + j`. Each has from 1 to
          `max_new_tokens` tokens, int32 (n,), without padding. If a sequence ends with an end token, it is included.

        Raises:
          ModelError: if the model has no cache, does not use it, or does not take such lengths.
          ValueError, TypeError: for a prompt or an option that does not fit; nothing has run then.
        """
        self._check_ready("generate")
        scheduling = self.steps.scheduling
        sampling = Sampling(
            temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, eos_token_id=eos_token_id,
            samples=num_samples, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        )  # fmt: skip
        count = scheduling.num_stages if groups is None else check_count("groups", groups)
        rows = read_prompts(prompts, lengths)
        slots = _lengths(rows, max_new_tokens, cache, prefill, cache_length, cache_dtype)
        work = make_groups(rows, count, slots, multiple=scheduling.batch_shards, samples=num_samples)
        self.held.meet("trainer.generate")
        progress = [first_progress(group, sampling) for group in work]
        BatchComparison(scheduling.mesh, "generation").before(progress)
        program = self._program(progress[0], sampling, cache, cache_dtype)
        calls = [tokens_of_calls(group, slots) for group in work]
        kinds = sorted({(taken, not i) for of_group in calls for i, part in enumerate(of_group) for taken in part})
        for kind in kinds:
            vocabulary = program.vocabulary(self.steps.stage, self.held.memory, *kind)
            check_vocabulary(rows, vocabulary)
            sampling.check_vocabulary(vocabulary)
        steps, (carried_places, padding_place) = self._compile_decoding(program, sampling, progress[0], kinds, cache)
        check_fits(program.cache.shapes, carried_places[0], len(work), num_samples)
        carried = [make_carried(program.cache, of_group, carried_places) for of_group in progress]
        turns: list[Turns] = []
        for group, (prompt, later) in zip(work, calls, strict=True):
            both = (group["padding"][::num_samples], group["padding"])
            padding = tuple(put(of, padding_place) for of in both) if program.form.explicit else None
            turns.append(Turns(group["tokens"][::num_samples], prompt, later, padding))
        # Two calls of each group are under way, and the stages of a rank are computations of their own.
        schedule = scheduling.schedule
        tasks = 1 if schedule is None else -(-schedule.num_stages // schedule.num_ranks)
        most = max(1, min(2 * len(work), _MOST_UNDER_WAY // tasks))
        take_turns(turns, steps, self._for_inference(), carried, most, program.repeat if num_samples > 1 else None)
        return read_generated(work, [ended for _, ended in carried], sampling)

    def _program(
        self, progress: Mapping[str, Any], sampling: Sampling, cache: ExplicitCache | None, dtype: Any
    ) -> GenerationProgram:
        """Return the program for groups with a progress like this one; it is made once."""
        shape = progress["tokens"].shape
        of = (cache, None if dtype is None else jnp.dtype(dtype))
        key = (shape, *of, sampling.samples, sampling.compiled, self.schedule, trace_settings())
        if key not in self.steps.decoding:
            form = self._decoding_form(cache, shape[1] - 1, dtype)
            self.steps.decoding[key] = GenerationProgram.trace(form, sampling, progress, self.steps)
        return self.steps.decoding[key]

    def _decoding_form(self, cache: ExplicitCache | None, length: int, dtype: Any) -> DecodingForm:
        adapter = self.model.adapter
        if cache is not None:
            return decode_explicitly(cast(NnxModel | LinenModel, adapter), self.held.memory, cache, length)
        if isinstance(adapter, LinenModel):
            return decode_linen(adapter, length, dtype)
        return decode_nnx(cast(NnxModel, adapter), self.held.memory, length, dtype)

    def _compile_decoding(
        self, program: GenerationProgram, sampling: Sampling, progress: Any, kinds: Sequence[tuple[int, bool]],
        cache: ExplicitCache | None,
    ) -> tuple[dict[tuple[int, bool], Any], tuple[Any, Any]]:  # fmt: skip
        """Return the step for each kind of call, and the places of `carried` and of padding; place the weights."""
        steps, of = dict[tuple[int, bool], Any](), (*sampling.compiled, cache)
        for kind in kinds:
            steps[kind] = self.steps.for_decoding(program.step, of, program.arguments(progress, *kind), program.specs)
        if self.mesh is not None:
            _, carried, _, places = steps[kinds[0]].in_shardings[0]
            return steps, (carried, places.get("padding"))
        default = jnp.zeros(()).sharding
        return steps, (jax.tree.map(lambda _: default, (program.cache.shapes, progress)), default)


def _lengths(
    rows: Sequence[np.ndarray],
    new: int,
    cache: ExplicitCache | None,
    prefill: int | None,
    length: int | None,
    dtype: Any,
) -> Lengths:
    """Return the slots of a generation from its options."""
    if cache is not None and dtype is not None:
        raise ValueError(f"cache_dtype={dtype!r}: an explicit cache has the dtype that its init_cache gives it.")
    if cache is not None and not isinstance(cache, ExplicitCache):
        raise TypeError(f"cache={cache!r}: it must be an ExplicitCache(init_cache=, apply=), or None.")
    if prefill is None and cache is None:
        prefill = 1
    return Lengths.of(
        max(row.size for row in rows),
        check_count("max_new_tokens", new),
        pads=cache is not None and cache.pads,
        most=None if cache is None else cache.tokens_per_call,
        prefill=None if prefill is None else check_count("prefill", prefill),
        cache=None if length is None else check_count("cache_length", length),
    )
