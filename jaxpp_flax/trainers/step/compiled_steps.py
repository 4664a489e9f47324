"""The steps that a trainer has compiled: one for each kind, schedule and signature of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec
from rich.table import Table

from jaxpp_flax.assignment import CutPolicy, Plan, even
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.summary import StageSummary
from jaxpp_flax.messages import amount
from jaxpp_flax.planning import describe
from jaxpp_flax.processes import process_group
from jaxpp_flax.schedules import ResidualPlan
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.trainers.assigner import Assigner, Pipeline
from jaxpp_flax.trainers.data.batch import signature
from jaxpp_flax.trainers.loop.process_synchronization import compare_compilations
from jaxpp_flax.trainers.mesh import batch_spec, inner_sizes, num_batch_shards
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.model.sharding import AxisRules
from jaxpp_flax.trainers.options.memory import Memory
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.builder import Loop, StepBuilderCache
from jaxpp_flax.trainers.step.kept_bytes import kept_bytes
from jaxpp_flax.trainers.tuning.scheduling import Scheduling


class CompiledSteps:
    """Compiles a step if its key is new. Without ranks, steps run under `jax.jit`.

    The schedule and the place of the state may change between two calls. `state_specs` has the specs of annotated
    leaves of the state; `rules` has the meanings of logical axis names; `fsdp` and `memory` are for
    training steps.
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
        fsdp: Fsdp = "microbatch",
        memory: Memory | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self._scheduling, self._assigner, self._builders, self._held = scheduling, assigner, builders, held
        self.state_specs, self._rules, self._memory = state_specs, rules, Memory.of(memory)
        self._fsdp: Fsdp = fsdp
        self.compiled: dict[Any, Any] = {}  # by key, which begins with the kind of step

    def for_training(self, microbatches: Any) -> Any:
        """Return the training step for such batches, and place the state for this step."""
        compiled = self.get("train", microbatches, lambda: self.training_function(microbatches), donate=True)
        with self.clock.part("placement"):
            self._held.place(lambda: compiled.in_shardings[0][0])
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
        held = self._held
        process_group().step = held.step + (kind == "train")  # for messages
        key = self._key(kind, microbatches)
        if key not in self.compiled:
            with self.clock.part("compilation"):
                policy = self._ready_to_compile(kind, microbatches)
                state = held.kept.described(held.memory) if donate else held.memory.for_inference()
                function = build()
                run = lambda: self._compile(function, state, microbatches, policy, donate=donate)  # noqa: E731
                schedule, count = self._scheduling.schedule, self._scheduling.num_microbatches
                is_limited = kind == "train" and schedule is not None
                self.compiled[key] = self._assigner.compile_within_limit(schedule, count, run) if is_limited else run()
        compiled = self.compiled[key]
        if not donate:
            held.place_weights(lambda: compiled.in_shardings[0][0])
        return compiled

    def for_decoding(self, step: Any, arguments: tuple[Any, ...], specs: tuple[Any, ...]) -> Any:
        """Return the compiled `DecodingStep` for such arguments, and place the weights for it.

        Args:
          step: the step; its `key` holds what its arguments do not tell.
          arguments: `(carried, tokens, fixed)`, arrays or shapes; the step reuses the memory of `carried`.
          specs: the specs of these arguments on a rank.
        """
        held, state_specs = self._held, self.state_specs
        key = (*self._key("generate", arguments), step.key)
        if key not in self.compiled:
            policy = self._ready_to_compile("generate", {"tokens": arguments[1]})
            form = _Form(
                in_specs=(None if state_specs is None else state_specs.for_inference(), *specs),
                out_specs=(*specs[:2], None),
                donated=(1,),
                everywhere=False,
            )
            all_arguments = (held.memory.for_inference(), *arguments)
            self.compiled[key] = self._compile_form(step, all_arguments, policy, form)
        compiled = self.compiled[key]
        held.place_weights(lambda: compiled.in_shardings[0][0])
        return compiled

    def _ready_to_compile(self, kind: str, batch: Any) -> CutPolicy:
        """Compare with the other processes, and return the policy of the cuts."""
        scheduling = self._scheduling
        if scheduling.mesh is not None:  # without a mesh, `jax.jit` handles this setting
            refuse_disabled_jit("a pipelined step")
        compare_compilations(scheduling.mesh, self._held.memory, kind, scheduling.schedule, batch)
        return self._cut_policy(kind, batch)

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
            kept=lambda: kept_bytes(self._held.memory, specs, microbatches, mesh, self._held.kept.kind_of),
            fsdp=self._fsdp,
        )
        return self._assigner.policy(pipeline, training=kind == "train")

    def _residuals(self) -> ResidualPlan | None:
        """Return the given residuals, or those that the assigner chose with the cuts of the training step."""
        if self._memory.residuals is not None:
            return self._memory.residuals
        return self._assigner.residuals_of(self._scheduling.schedule, self._scheduling.num_microbatches)

    def _compile(self, function: Callable[..., Any], state: Any, batch: Any, policy: CutPolicy, *, donate: bool) -> Any:
        """Compile `function(state, batch)`. All processes get the function's results other than a new state."""
        specs, mesh = self.state_specs, self._scheduling.mesh
        if specs is not None and not donate:
            specs = specs.for_inference()
        in_specs = None
        if mesh is not None:
            shards = num_batch_shards(mesh)
            # Only inference has batches that data-parallel devices cannot divide evenly: each device computes all.
            leaves, structure = jax.tree.flatten(batch)
            is_shared = all(leaf.shape[1] % shards == 0 for leaf in leaves if len(leaf.shape) > 1)
            of_batch = [batch_spec(mesh, len(leaf.shape)) if is_shared else PartitionSpec() for leaf in leaves]
            in_specs = (specs, jax.tree.unflatten(structure, of_batch))
        form = _Form(
            in_specs=in_specs,
            # A step returns the state with the shardings of its input state.
            out_specs=(specs, None) if donate and specs is not None else None,
            donated=(0,) if donate else (),
            everywhere=(False, True) if donate else True,
            fsdp=self._fsdp if donate else "microbatch",
            residuals=self._residuals if donate else None,  # inference has no backward
        )
        return self._compile_form(function, (state, batch), policy, form)

    def _compile_form(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], policy: CutPolicy, form: _Form
    ) -> Any:
        mesh = self._scheduling.mesh
        if mesh is None:
            jitted = jax.jit(function, donate_argnums=form.donated)
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                return jitted  # a compiled function would refuse to run operation by operation
            return jitted.lower(*arguments).compile()
        step = mpmd_jit_with_loop(
            function,
            mesh,
            in_shardings=form.in_specs,
            out_shardings=form.out_specs,
            donate_argnums=form.donated,
            cut_policy=policy,
            everywhere=form.everywhere,
            fsdp=form.fsdp,
            residuals=form.residuals,
        )
        with nn.logical_axis_rules(self._rules.on(inner_sizes(mesh))):
            return step.compile(*arguments)


@dataclass(frozen=True, kw_only=True)
class _Form:
    """The form of a step on a mesh: the specs of its arguments and results, and who reuses and gets them."""

    in_specs: Any
    out_specs: Any
    donated: tuple[int, ...]
    everywhere: Any
    fsdp: Fsdp = "microbatch"
    residuals: Callable[[], ResidualPlan | None] | None = None


def stage_table(
    stages: Sequence[StageSummary], memory: Mapping[int, int], title: str, plan: Plan | None = None
) -> Table:
    """Make the table that is printed before the first step.

    It has the FLOPs and the sent bytes of one microbatch, and `memory`, the maximum bytes of each rank. If the plan
    was made for a memory limit, it also has what each stage does with its residuals, their bytes in one step (kept,
    moved to the host, recomputed), the predicted bytes of each rank on its devices and on the host (the optimizer's
    state included), and the seconds of a step.
    """
    table = Table(title=title, title_justify="left")
    for column, side in (("stage", "right"), ("rank", "right"), ("blocks", "left"), ("parameters", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    for column in ("size", "FLOPs", "sent", "memory", "devices"):
        table.add_column(column, justify="right")
    choice = None if plan is None else plan.choice
    if choice is not None:
        for column in ("residuals", "kept", "moved", "recomputed", "predicted", "host"):
            table.add_column(column, justify="right")
    if plan is not None and plan.choice_text:
        table.caption, table.caption_justify = plan.choice_text, "left"
    for stage in stages:
        row = [
            str(stage.stage),
            str(stage.rank),
            ", ".join(names) if len(names := stage.blocks) <= 3 else f"{names[0]} … {names[-1]} ({len(names)})",
            f"{stage.parameter_count:,}",
            amount(stage.parameter_bytes, "B"),
            amount(stage.flops, ""),
            amount(stage.sent_bytes, "B"),
            amount(memory.get(stage.rank), "B"),
            ", ".join(str(getattr(device, "id", device)) for device in stage.devices),
        ]
        if choice is not None:
            use = choice.prediction.stages[stage.stage]
            row.append(describe(choice.residuals.of(stage.stage)))
            held = choice.prediction.peak_bytes[stage.rank]
            on_host = choice.prediction.host_bytes[stage.rank] + choice.prediction.state_host_bytes[stage.rank]
            row += [amount(nbytes, "B") for nbytes in (use.kept, use.moved, use.recomputed, held, on_host)]
        table.add_row(*row)
    return table
