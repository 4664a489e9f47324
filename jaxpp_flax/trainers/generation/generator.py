"""`trainer.generate`: groups of sequences go through the stages one behind another, so that every rank works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings, without_ambient_mesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.reshard import on_every_process
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.generation.decoding_form import Decode, check_calls, decode_linen, decode_nnx
from jaxpp_flax.trainers.generation.generation_loop import first_progress, make_step, take_turns
from jaxpp_flax.trainers.generation.layout import check_fits, make_carried, rank_specs
from jaxpp_flax.trainers.generation.prompts import check_vocabulary, make_groups, read_prompts, tokens_of_calls
from jaxpp_flax.trainers.generation.sampling import Sampling
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import ForwardOnly
from jaxpp_flax.trainers.weights import WeightCalls

__all__ = ["GenerationCalls"]

# XLA's CPU client stops at 32 computations in flight on a device, so no more calls than these are under way.
_MOST_UNDER_WAY = 16


@dataclass(frozen=True, eq=False)
class _Program:
    """What was traced for groups of `rows` sequences and one length of the cache."""

    decode: Decode
    step: Callable[..., Any]
    rows: int
    cache: LeafPrograms
    specs: tuple[Any, Any]  # of `(carried, tokens)` on a rank
    vocabularies: dict[int, int] = field(default_factory=dict)  # by the tokens of a call for which it was checked

    def tokens(self, taken: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, taken), jnp.int32)

    def vocabulary(self, stage: StageContext, state: TrainState, taken: int) -> int:
        """Check the model for calls of so many tokens, once, and return the size of its vocabulary."""
        if taken not in self.vocabularies:
            (cache, _), tokens = self.specs if stage.mesh is not None else ((None, None), None)
            read, specs = (self.cache.shapes, self.tokens(taken)), (cache, tokens)
            check = lambda state, read: check_calls(self.decode, state, *read)  # noqa: E731
            self.vocabularies[taken] = stage.trace(check, state, read, specs)
        return self.vocabularies[taken]


class GenerationCalls(WeightCalls):
    """The method of `PipelineTrainer` that generates tokens; the state does not change."""

    @without_ambient_mesh
    def generate(
        self, prompts: Any, *, max_new_tokens: int, lengths: Any = None, temperature: float = 0.0, seed: int = 0,
        top_k: int | None = None, top_p: float | None = None, eos_token_id: int | Sequence[int] | None = None,
        prefill: int = 1, groups: int | None = None, cache_length: int | None = None, cache_dtype: Any = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Continue each prompt by up to `max_new_tokens` tokens, pipelined, with a cache on each stage's devices.

        A copy of the model is switched to decoding by Flax's convention. NNX: each attribute `decode` that is a boolean
        or None is set to True, and each method `init_cache(input_shape, dtype=...)`, as `nnx.MultiHeadAttention` has
        it, is called to make `nnx.Cache` variables. Linen: the module is used with `decode=True` and makes its
        collection `cache`. The model must compute logits (batch, length, vocabulary) from tokens (batch, length). The
        state does not change. See `docs/guides/generation.md`.

        Args:
          prompts: lists of tokens, of any lengths; or an integer array (batch, length).
          max_new_tokens: the most tokens to add to each prompt.
          lengths: for an array that is padded on the right: the length of each prompt.
          temperature: 0 takes the most likely token. Otherwise the logits are divided by this number, and a token is
            sampled.
          top_k: sample among the k most likely tokens.
          top_p: sample among the most likely tokens that together have this probability.
          eos_token_id: the token, or tokens, that end a sequence.
          seed: the seed of the samples. A sample depends only on the seed, the index of its prompt and the position,
            and not on stages, groups or processes.
          prefill: how many tokens of a prompt the model takes in one call. `nnx.MultiHeadAttention` takes one.
          groups: the number of groups of sequences in the pipeline at one time. Default: the number of stages, so that
            every stage has work.
          cache_length: the positions in the cache of a sequence. Default: as many as the longest needs. Calls with
            equal numbers of prompts and equal `cache_length` share their compiled steps.
          cache_dtype: the dtype of the cache. Default: the dtype in which each module computes.

        Returns:
          One int32 array for each prompt, in order. It has shape (n,), with n from 1 to `max_new_tokens`, and holds
          only the new tokens, without padding. If a sequence ends with an end token, this token is included.

        Raises:
          ModelError: if the model has no cache, does not use it, or does not take such lengths.
          ValueError, TypeError: for a prompt or an option that does not fit; nothing has run then.
        """
        self._check_ready("generate")
        scheduling = self.steps.scheduling
        sampling = Sampling(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, eos_token_id=eos_token_id)
        count = scheduling.num_stages if groups is None else check_count("groups", groups)
        new, prefill = check_count("max_new_tokens", max_new_tokens), check_count("prefill", prefill)
        rows = read_prompts(prompts, lengths)
        cache_length = cache_length if cache_length is None else check_count("cache_length", cache_length)
        shards = scheduling.batch_shards
        work = make_groups(rows, count, max_new_tokens=new, multiple=shards, cache_length=cache_length)
        self.held.meet("trainer.generate")
        BatchComparison(scheduling.mesh, "generation").before([first_progress(group, sampling) for group in work])
        progress = [first_progress(group, sampling) for group in work]
        program = self._program(progress[0], sampling, cache_dtype)
        calls = [tokens_of_calls(of, prefill) for of in work]
        counts = sorted({taken for of_group in calls for taken in of_group})
        for taken in counts:
            vocabulary = program.vocabulary(self.steps.stage, self.held.memory, taken)
            check_vocabulary(rows, vocabulary)
            sampling.check_vocabulary(vocabulary)
        steps, places = self._compile_decoding(program, sampling, progress[0], counts)
        check_fits(program.cache.shapes, places[0], len(work))
        carried = [make_carried(program.cache, of_group, places) for of_group in progress]
        # Two calls of each group are under way, and the stages of a rank are computations of their own.
        schedule = scheduling.schedule
        tasks = 1 if schedule is None else -(-schedule.num_stages // schedule.num_ranks)
        most = max(1, min(2 * len(work), _MOST_UNDER_WAY // tasks))
        take_turns(work, calls, steps, self._for_inference(), carried, most)
        found: dict[int, np.ndarray] = {}
        for group, (_, ended) in zip(work, carried, strict=True):
            found |= _new_tokens(group, ended["tokens"], sampling.end_tokens)
        return [found[i] for i in range(len(found))]

    def _program(self, progress: Mapping[str, Any], sampling: Sampling, dtype: Any) -> _Program:
        """Return the program for groups with a progress like this one; it is made once."""
        (size, width), schedule, mesh = progress["tokens"].shape, self.schedule, self.mesh
        key = (size, width, None if dtype is None else jnp.dtype(dtype), sampling.compiled, schedule, trace_settings())
        if key not in self.steps.decoding:
            if isinstance(self.model.adapter, LinenModel):
                make_cache, decode = decode_linen(self.model.adapter, width - 1, dtype)
            else:
                make_cache, decode = decode_nnx(cast(NnxModel, self.model.adapter), self.held.memory, width - 1, dtype)
            step = make_step(decode, sampling, ForwardOnly(schedule) if schedule is not None else None)
            specs = (None, None) if mesh is None else rank_specs(mesh, make_cache, progress)
            cache = LeafPrograms.trace(lambda: make_cache(size))
            self.steps.decoding[key] = _Program(decode, step, size, cache, specs)
        return self.steps.decoding[key]

    def _compile_decoding(
        self, program: _Program, sampling: Sampling, progress: Any, counts: Sequence[int]
    ) -> tuple[dict[int, Any], Any]:
        """Return the step for each number of tokens, and the places of `carried`; place the weights."""
        mesh, carried, steps = self.mesh, (program.cache.shapes, progress), dict[int, Any]()
        for taken in counts:
            arguments = (carried, program.tokens(taken))
            steps[taken] = self.steps.for_decoding(program.step, sampling.compiled, arguments, program.specs)
        if mesh is not None:
            return steps, steps[counts[0]].in_shardings[0][1]
        default = jnp.zeros(()).sharding
        return steps, jax.tree.map(lambda _: default, carried)


def _new_tokens(group: Mapping[str, np.ndarray], known: Any, end_tokens: Sequence[int]) -> dict[int, np.ndarray]:
    """Return the new tokens of each sequence, by its number; every process must call this."""
    several = isinstance(known, MpmdArray) and known.sharding.mpmd_mesh.is_multi_process
    rows, found = np.asarray(on_every_process(known) if several else known), dict[int, np.ndarray]()
    for number, row, begin, limit in zip(group["sequences"], rows, group["lengths"], group["limits"], strict=True):
        ends = np.flatnonzero(np.isin(row[begin:limit], end_tokens))
        found[int(number)] = row[begin : begin + ends[0] + 1 if ends.size else limit].copy()
    return found
