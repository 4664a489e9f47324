"""The steps that a trainer has compiled: one for each kind, schedule and signature of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpp_flax.assignment import CutPolicy, even
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.assigner import Assigner, Pipeline, kept_bytes
from jaxpp_flax.trainers.data.batch import signature
from jaxpp_flax.trainers.loop.process_synchronization import compare_compilations
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.step.builder import Loop
from jaxpp_flax.trainers.step.builder_cache import StepBuilderCache
from jaxpp_flax.trainers.step.compilation import Backend
from jaxpp_flax.trainers.tuning.scheduling import Scheduling

__all__ = ["Executables"]


class Executables:
    """Compiles a step if its key is new.

    Args:
      scheduling: the schedule, which may change, and the ranks.
      assigner: chooses the marks that cut.
      backend: compiles steps.
      builders: make the training step.
      held: the state that steps read.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        assigner: Assigner,
        backend: Backend,
        builders: StepBuilderCache,
        held: StateHolder,
    ) -> None:
        self._scheduling, self._assigner, self._backend = scheduling, assigner, backend
        self._builders, self._held = builders, held
        self.compiled: dict[Any, Any] = {}
        """The compiled steps by key; a key begins with the kind of step."""

    def for_training(self, microbatches: Any) -> Any:
        """Return the training step for such batches, and place the state for this step."""
        compiled = self.get("train", microbatches, lambda: self.training_function(microbatches), donate=True)
        self._held.place(self._backend.mesh, lambda: compiled.in_shardings[0][0])
        return compiled

    def training_function(self, microbatches: Any) -> Callable[..., Any]:
        """Return the pure function that a training step compiles."""
        loop = Loop(num_microbatches=self._scheduling.num_microbatches, schedule=self._scheduling.schedule)
        return self._builders.for_training(self._held.memory, microbatches).train(loop)

    def has_training(self, microbatches: Any) -> bool:
        """Return True if `for_training` would compile nothing for such batches."""
        return self._key("train", microbatches) in self.compiled

    def get(self, kind: str, microbatches: Any, build: Callable[[], Any], *, donate: bool) -> Any:
        """Return the compiled step of this kind for such batches.

        Args:
          kind: "train", or a kind of inference.
          microbatches: leaves of shape (num_microbatches, microbatch, ...), or their shapes.
          build: makes the pure function; called only if the step is not compiled yet.
          donate: True if the step reuses the state's memory.
        """
        held, scheduling = self._held, self._scheduling
        process_group().step = held.step + (kind == "train")  # for messages
        if not donate:
            held.load()  # inference in the data of a resumed `fit`, before its first step
        key = self._key(kind, microbatches)
        if key not in self.compiled:
            if scheduling.mesh is not None:  # without a mesh, `jax.jit` handles this setting
                refuse_disabled_jit("a pipelined step")
            compare_compilations(scheduling.mesh, held.memory, kind, scheduling.schedule, microbatches)
            policy = self._cut_policy(kind, microbatches)
            state = held.memory if donate else held.weights().for_inference()
            self.compiled[key] = self._backend.compile(build(), state, microbatches, policy, donate=donate)
        return self.compiled[key]

    def _key(self, kind: str, microbatches: Any) -> Any:
        return (kind, self._scheduling.schedule, signature(microbatches), trace_settings())

    def _cut_policy(self, kind: str, microbatches: Any) -> CutPolicy:
        """Return the policy that chooses the marks that cut the step of this kind."""
        schedule, mesh, specs = self._scheduling.schedule, self._scheduling.mesh, self._backend.state_specs
        if schedule is None or mesh is None:
            return even()  # plain `jax.jit` uses no policy
        pipeline = Pipeline(
            schedule=schedule,
            num_microbatches=self._scheduling.num_microbatches,
            mesh=mesh,
            kept=lambda: kept_bytes(self._held.memory, specs, microbatches, mesh),
        )
        return self._assigner.policy(pipeline, training=kind == "train")
