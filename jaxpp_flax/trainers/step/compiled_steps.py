"""The steps that a trainer has compiled: one for each kind, schedule and signature of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec
from rich.table import Table

from jaxpp_flax.assignment import CutPolicy, even
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.messages import amount
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.assigner import Assigner, Pipeline, kept_bytes
from jaxpp_flax.trainers.data.batch import signature
from jaxpp_flax.trainers.loop.process_synchronization import compare_compilations
from jaxpp_flax.trainers.mesh import batch_spec, inner_sizes, num_batch_shards
from jaxpp_flax.trainers.model.sharding import AxisRules
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import Loop, StepBuilderCache
from jaxpp_flax.trainers.tuning.scheduling import Scheduling


class CompiledSteps:
    """Compiles a step if its key is new. Without ranks, steps run under `jax.jit`.

    The schedule and the place of the state may change between two calls. `state_specs` has the specs of annotated
    leaves of the state; `rules` has the meanings of logical axis names.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        assigner: Assigner,
        builders: StepBuilderCache,
        held: StateHolder,
        *,
        state_specs: TrainState | None,
        rules: AxisRules,
    ) -> None:
        self._scheduling, self._assigner, self._builders, self._held = scheduling, assigner, builders, held
        self.state_specs, self._rules = state_specs, rules
        self.compiled: dict[Any, Any] = {}  # by key, which begins with the kind of step

    def for_training(self, microbatches: Any) -> Any:
        """Return the training step for such batches, and place the state for this step."""
        compiled = self.get("train", microbatches, lambda: self.training_function(microbatches), donate=True)
        self._held.place(self._scheduling.mesh, lambda: compiled.in_shardings[0][0])
        return compiled

    def training_function(self, microbatches: Any) -> Callable[..., Any]:
        """Return the pure function that a training step compiles."""
        loop = Loop(num_microbatches=self._scheduling.num_microbatches, schedule=self._scheduling.schedule)
        return self._builders.for_training(self._held.memory, microbatches).train(loop)

    def has_training(self, microbatches: Any) -> bool:
        """Return True if `for_training` would compile nothing for such batches."""
        return self._key("train", microbatches) in self.compiled

    def get(self, kind: str, microbatches: Any, build: Callable[[], Any], *, donate: bool) -> Any:
        """Return the compiled step of this kind, "train" or a kind of inference, for such batches.

        `build` makes the pure function, if the step is not compiled yet. With `donate`, the step reuses the state's
        memory. Without, the weights are placed for it now, if no step was compiled before.
        """
        held, scheduling = self._held, self._scheduling
        process_group().step = held.step + (kind == "train")  # for messages
        key = self._key(kind, microbatches)
        if key not in self.compiled:
            if scheduling.mesh is not None:  # without a mesh, `jax.jit` handles this setting
                refuse_disabled_jit("a pipelined step")
            compare_compilations(scheduling.mesh, held.memory, kind, scheduling.schedule, microbatches)
            policy = self._cut_policy(kind, microbatches)
            state = held.memory if donate else held.memory.for_inference()
            self.compiled[key] = self._compile(build(), state, microbatches, policy, donate=donate)
        compiled = self.compiled[key]
        if not donate:
            held.place_weights(lambda: compiled.in_shardings[0][0])
        return compiled

    def _key(self, kind: str, microbatches: Any) -> Any:
        return (kind, self._scheduling.schedule, signature(microbatches), trace_settings())

    def _cut_policy(self, kind: str, microbatches: Any) -> CutPolicy:
        schedule, mesh, specs = self._scheduling.schedule, self._scheduling.mesh, self.state_specs
        if schedule is None or mesh is None:
            return even()  # plain `jax.jit` uses no policy
        pipeline = Pipeline(
            schedule=schedule,
            num_microbatches=self._scheduling.num_microbatches,
            mesh=mesh,
            kept=lambda: kept_bytes(self._held.memory, specs, microbatches, mesh),
        )
        return self._assigner.policy(pipeline, training=kind == "train")

    def _compile(self, function: Callable[..., Any], state: Any, batch: Any, policy: CutPolicy, *, donate: bool) -> Any:
        """Compile `function(state, batch)`. All processes get the function's results other than a new state."""
        donated = (0,) if donate else ()
        specs, mesh = self.state_specs, self._scheduling.mesh
        if specs is not None and not donate:
            specs = specs.for_inference()
        if mesh is None:
            jitted = jax.jit(function, donate_argnums=donated)
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                return jitted  # a compiled function would refuse to run operation by operation
            return jitted.lower(state, batch).compile()
        shards = num_batch_shards(mesh)
        # Only inference has batches that data-parallel devices cannot divide evenly: each device computes all of it.
        leaves, structure = jax.tree.flatten(batch)
        is_shared = all(leaf.shape[1] % shards == 0 for leaf in leaves if len(leaf.shape) > 1)
        specs_of_batch = [batch_spec(mesh, len(leaf.shape)) if is_shared else PartitionSpec() for leaf in leaves]
        step = mpmd_jit_with_loop(
            function,
            mesh,
            in_shardings=(specs, jax.tree.unflatten(structure, specs_of_batch)),
            # A step returns the state with the shardings of its input state.
            out_shardings=(specs, None) if donate and specs is not None else None,
            donate_argnums=donated,
            cut_policy=policy,
            everywhere=(False, True) if donate else True,
        )
        with nn.logical_axis_rules(self._rules.on(inner_sizes(mesh))):
            return step.compile(state, batch)


def stage_table(
    stages: Sequence[StageSummary], memory: Mapping[int, int], title: str, caption: str | None = None
) -> Table:
    """Make the table that is printed before the first step.

    It has the FLOPs and the sent bytes of one microbatch, and `memory`, the maximum bytes of each rank.
    """
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column, side in (("stage", "right"), ("rank", "right"), ("blocks", "left"), ("parameters", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for column in ("size", "FLOPs", "sent", "memory", "devices"):
        table.add_column(column, justify="right")
    for stage in stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            ", ".join(names) if len(names := stage.blocks) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})",
            f"{stage.parameter_count:,}",
            amount(stage.parameter_bytes, "B"),
            amount(stage.flops, ""),
            amount(stage.sent_bytes, "B"),
            amount(memory.get(stage.rank), "B"),
            ", ".join(str(getattr(device, "id", device)) for device in stage.devices),
        )
    return table
