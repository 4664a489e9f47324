"""`trainer.generate`: groups of sequences go through the stages one behind another, so that every rank works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

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
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import ForwardOnly
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps

__all__ = ["Generator"]

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


@dataclass(frozen=True)
class Generator:
    """Continues sequences with the current weights; the state does not change.

    `programs` keeps what was traced.
    """

    adapter: ModelAdapter
    scheduling: Scheduling
    executables: CompiledSteps
    held: StateHolder
    weights: InferenceWeights
    programs: dict[Any, _Program] = field(default_factory=dict)

    @without_ambient_mesh
    def generate(
        self, prompts: Any, *, max_new_tokens: int, lengths: Any, prefill: int, groups: int | None,
        cache_length: int | None, cache_dtype: DTypeLike | None, **sampling_options: Any,
    ) -> list[np.ndarray]:  # fmt: skip
        """As `PipelineTrainer.generate`."""
        sampling, scheduling = Sampling(**sampling_options), self.scheduling
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
            vocabulary = program.vocabulary(self.executables.stage, self.held.memory, taken)
            check_vocabulary(rows, vocabulary)
            sampling.check_vocabulary(vocabulary)
        steps, places = self._compile(program, sampling, progress[0], counts)
        check_fits(program.cache.shapes, places[0], len(work))
        carried = [make_carried(program.cache, of_group, places) for of_group in progress]
        # Two calls of each group are under way, and the stages of a rank are computations of their own.
        schedule = scheduling.schedule
        tasks = 1 if schedule is None else -(-schedule.num_stages // schedule.num_ranks)
        most = max(1, min(2 * len(work), _MOST_UNDER_WAY // tasks))
        take_turns(work, calls, steps, self.weights.for_inference(), carried, most)
        found: dict[int, np.ndarray] = {}
        for group, (_, ended) in zip(work, carried, strict=True):
            found |= _new_tokens(group, ended["tokens"], sampling.end_tokens)
        return [found[i] for i in range(len(found))]

    def _program(self, progress: Mapping[str, Any], sampling: Sampling, dtype: Any) -> _Program:
        """Return the program for groups with a progress like this one; it is made once."""
        (size, width), schedule, mesh = progress["tokens"].shape, self.scheduling.schedule, self.scheduling.mesh
        key = (size, width, None if dtype is None else jnp.dtype(dtype), sampling.compiled, schedule, trace_settings())
        if key not in self.programs:
            if isinstance(self.adapter, LinenModel):
                make_cache, decode = decode_linen(self.adapter, width - 1, dtype)
            else:
                make_cache, decode = decode_nnx(cast(NnxModel, self.adapter), self.held.memory, width - 1, dtype)
            step = make_step(decode, sampling, ForwardOnly(schedule) if schedule is not None else None)
            specs = (None, None) if mesh is None else rank_specs(mesh, make_cache, progress)
            cache = LeafPrograms.trace(lambda: make_cache(size))
            self.programs[key] = _Program(decode, step, size, cache, specs)
        return self.programs[key]

    def _compile(
        self, program: _Program, sampling: Sampling, progress: Any, counts: Sequence[int]
    ) -> tuple[dict[int, Any], Any]:
        """Return the step for each number of tokens, and the places of `carried`; place the weights."""
        mesh, carried, steps = self.scheduling.mesh, (program.cache.shapes, progress), dict[int, Any]()
        for taken in counts:
            arguments = (carried, program.tokens(taken))
            steps[taken] = self.executables.for_decoding(program.step, sampling.compiled, arguments, program.specs)
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
