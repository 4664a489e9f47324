"""`trainer.generate`: groups of sequences go through the stages one behind another, so that every rank works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.generation.decoding import DecodingModel
from jaxpp_flax.trainers.generation.linen_decoding import decode_linen
from jaxpp_flax.trainers.generation.nnx_decoding import decode_nnx
from jaxpp_flax.trainers.generation.program import DecodingProgram
from jaxpp_flax.trainers.generation.prompts import Group, Prompts
from jaxpp_flax.trainers.generation.rounds import run_in_turn
from jaxpp_flax.trainers.generation.sampling import Sampling, read_end_tokens
from jaxpp_flax.trainers.generation.steps import DecodingStep, fixed_values
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.nnx_model import NnxModel
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights
from jaxpp_flax.trainers.step.builder import ForwardOnly
from jaxpp_flax.trainers.step.compiled_steps import CompiledSteps

__all__ = ["Generator"]

# XLA's CPU client stops at 32 computations in flight on a device, so no more calls than these are under way.
_MOST_UNDER_WAY = 16


@dataclass(frozen=True)
class Generator:
    """Continues sequences with the current weights; the state does not change.

    `meet` is called with the name of a call that every process must make after the same step. `programs` keeps what
    is compiled.
    """

    adapter: ModelAdapter
    scheduling: Scheduling
    executables: CompiledSteps
    held: StateHolder
    weights: InferenceWeights
    meet: Callable[[str], None]
    programs: dict[Any, DecodingProgram] = field(default_factory=dict)

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int,
        lengths: Any,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        eos_token_id: int | Sequence[int] | None,
        seed: int,
        prefill: int,
        groups: int | None,
        cache_length: int | None,
        cache_dtype: DTypeLike | None,
    ) -> list[np.ndarray]:
        """As `PipelineTrainer.generate`."""
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, end_tokens=read_end_tokens(eos_token_id)
        )  # fmt: skip
        count = self.scheduling.num_stages if groups is None else check_count("groups", groups)
        new, prefill = check_count("max_new_tokens", max_new_tokens), check_count("prefill", prefill)
        given = Prompts.of(prompts, lengths)
        cache_length = cache_length if cache_length is None else check_count("cache_length", cache_length)
        shards = self.scheduling.batch_shards
        work = given.groups(count, max_new_tokens=new, multiple=shards, cache_length=cache_length)
        self.meet("trainer.generate")
        compared = BatchComparison(self.scheduling.mesh, "generation")
        compared.before([(group.tokens, fixed_values(group, sampling)) for group in work])
        program, calls = self._program(work[0], sampling, cache_dtype), [group.calls(prefill) for group in work]
        counts = sorted({taken for each in calls for taken in each})
        program.check(self.held.memory.for_inference(), counts, given, sampling)
        program.compile(counts)
        runs = program.runs(work, calls, sampling)
        run_in_turn(runs, program.steps, self.weights.for_inference(), self._most_under_way(len(runs)))
        found = {number: row for run in runs for number, row in run.sequences(sampling.end_tokens).items()}
        return [found[i] for i in range(len(found))]

    def _program(self, group: Group, sampling: Sampling, dtype: Any) -> DecodingProgram:
        """Return the program for groups like this one; it is made once."""
        (size, width), schedule = group.tokens.shape, self.scheduling.schedule
        key = (size, width, None if dtype is None else jnp.dtype(dtype), sampling.compiled, schedule, trace_settings())
        if key not in self.programs:
            model, doubled = (self._decoding_model(rows, width - 1, dtype) for rows in (size, 2 * size))
            forward = ForwardOnly(schedule) if schedule is not None else None
            step = DecodingStep(model=model, sampling=sampling, schedule=forward)
            mesh = self.scheduling.mesh
            self.programs[key] = DecodingProgram(step, doubled.cache, group, self.executables, mesh)
        return self.programs[key]

    def _decoding_model(self, batch_size: int, length: int, dtype: Any) -> DecodingModel:
        sizes, state = {"batch_size": batch_size, "length": length}, self.held.memory
        if isinstance(self.adapter, LinenModel):
            return decode_linen(self.adapter, **sizes, dtype=dtype)
        return decode_nnx(cast(NnxModel, self.adapter), state.params, state.model_state, **sizes, dtype=dtype)

    def _most_under_way(self, num_groups: int) -> int:
        schedule = self.scheduling.schedule
        tasks = 1 if schedule is None else -(-schedule.num_stages // schedule.num_ranks)
        return max(1, min(2 * num_groups, _MOST_UNDER_WAY // tasks))
