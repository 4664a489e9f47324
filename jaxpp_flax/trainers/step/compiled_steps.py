"""The steps that a trainer has compiled: one for each kind, schedule and signature of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp_flax._compat_executables import called_with_few_bits
from jaxpp_flax._compat_texts.errors import lacks_product
from jaxpp_flax.engine.arrays.ambient_mesh import trace_settings, without_ambient_mesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.pipeline import PlacedPipeline
from jaxpp_flax.engine.runtime.debug_switches import refuse_disabled_jit
from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.planning import CutPolicy, PlanningStep
from jaxpp_flax.processes import compare_hashes, process_group
from jaxpp_flax.schedules import ResidualPlan, Schedule
from jaxpp_flax.schedules.gathers import Fsdp
from jaxpp_flax.trainers.data.batch import describe_batch, signature
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_sharding import BatchSharding, examples_of_a_device
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.mesh import batch_spec, layout_of, num_batch_shards
from jaxpp_flax.trainers.metrics.clock import Clock
from jaxpp_flax.trainers.stages.assigner import Assigner
from jaxpp_flax.trainers.stages.scheduling import Scheduling
from jaxpp_flax.trainers.stages.stage_context import StageContext
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.train_state import shapes_of
from jaxpp_flax.trainers.step.accumulation import (
    Accumulation,
    Pending,
    StatePlaces,
    adding,
    as_read,
    terms_of,
    zero_terms,
    zeros_on,
)
from jaxpp_flax.trainers.step.builder import Sums, one_of
from jaxpp_flax.trainers.step.builder_cache import StepBuilderCache
from jaxpp_flax.trainers.step.facts.kept_bytes import kept_bytes
from jaxpp_flax.trainers.step.microbatch_loop import MicrobatchLoop, with_schedule
from jaxpp_flax.trainers.step.microbatch_orders import MicrobatchOrders
from jaxpp_flax.trainers.step.nonfinite import StepsUnderWay
from jaxpp_flax.trainers.step.optimizer_update import trace_update
from jaxpp_flax.trainers.step.pattern_steps import PatternSteps


class CompiledSteps:
    """Compiles a step if its key is new. Without ranks, steps run under `jax.jit`.

    The schedule and the place of the state may change between two calls.

    Args:
      ignored: the logical axis names without a meaning, each with a leaf.
      fsdp: for training steps.
      under_way: the training steps that devices may still run.
      orders: the order of microbatches of several shapes.
    """

    def __init__(
        self,
        scheduling: Scheduling,
        assigner: Assigner,
        builders: StepBuilderCache,
        held: StateHolder,
        rows: BatchSharding,
        *,
        stage: StageContext,
        ignored: Mapping[str, str],
        fsdp: Fsdp,
        clock: Clock,
        under_way: StepsUnderWay,
        orders: MicrobatchOrders,
    ) -> None:
        self.clock, self.under_way, self.orders = clock, under_way, orders
        self.scheduling, self.assigner, self.builders, self._held = scheduling, assigner, builders, held
        self.stage, self.state_specs = stage, stage.specs
        self._fsdp: Fsdp = fsdp
        self._ignored = ignored
        self.rows = rows
        self.trained_on = BatchComparison(scheduling.mesh, "training")
        self.compiled: dict[Any, Any] = {}  # by key, which begins with the kind of step
        self._patterns = PatternSteps(self.compiled)
        self.decoding: dict[Any, Any] = {}  # what was traced for generation, by its key

    def for_training(self, microbatches: Any, announce: Callable[[int, int], None]) -> Any:
        """Return the training step for such batches, and place the state for this step.

        Before a step is compiled, call `announce` with the number of other shapes of batches that have one with the
        present schedule and settings, and with the number of new shapes.
        """

        def build() -> Callable[..., Any]:
            like = self._key("train", microbatches)
            if isinstance(microbatches, StackedMicrobatches) and self.scheduling.mesh is not None:
                trained, new = self._patterns.shapes(self.scheduling.schedule, microbatches)
                if new:
                    announce(len(trained), len(new))
            else:  # without ranks, one program runs all microbatches of a step
                announce(sum(key[:2] + key[-1:] == like[:2] + like[-1:] for key in self.compiled), 1)
            return self.training_function(microbatches)

        compiled = self.get("train", microbatches, build, donate=True)
        with self.clock.part("placement"):
            self._held.place(compiled)
        return compiled

    def order_of(
        self, microbatches: StackedMicrobatches, compiled_for: Callable[[StackedMicrobatches], Any]
    ) -> Sequence[int]:
        """Return the order in which microbatches of several shapes shall run; see `MicrobatchOrders`."""
        schedule, _ = self.scheduling.pipeline("an order of microbatches")
        return self.orders.order_of(microbatches, schedule, compiled_for, self._keeps_order)

    @without_ambient_mesh
    def _keeps_order(self, microbatches: StackedMicrobatches) -> bool:
        """Return whether the loss hands state from one microbatch to the next, or draws keys by their numbers."""
        return self.builders.keeps_order(self._held.memory, microbatches)

    @without_ambient_mesh
    def training_function(self, microbatches: Any) -> Callable[..., Any]:
        """Return the pure function that a training step compiles."""
        loop = MicrobatchLoop(num_microbatches=self.scheduling.num_microbatches, schedule=self.scheduling.schedule)
        return self.builders.for_training(self._held.memory, microbatches).train(loop)

    @without_ambient_mesh
    def to_plan(self, microbatches: Any, units: int) -> PlanningStep:
        """Return the training step for such batches, of so many units, as a planner needs it; nothing is compiled.

        Raises:
          ValueError: without a pipeline.
        """
        (schedule, mesh), held = self.scheduling.pipeline("a plan"), self._held
        state = held.kept.described(held.memory)

        function = self.training_function(microbatches)
        with self.stage.axis_rules():
            step = mpmd_jit_with_loop(function, mesh, **self._form(microbatches, donate=True))
            traced = step.trace(state, microbatches)

        def place(of: Schedule, policy: Any, residuals: ResidualPlan | None) -> PlacedPipeline:
            return traced.place(policy, residuals, lambda own: with_schedule(own, of))

        devices = mesh.rank_devices(0)
        return PlanningStep(
            schedule=schedule,
            num_microbatches=self.scheduling.num_microbatches,
            layout=layout_of(mesh),
            platform=devices[0].platform,
            devices_of_a_rank=len(devices),
            examples=examples_of_a_device(microbatches, mesh),
            units=units,
            fsdp=self._fsdp,
            kept=kept_bytes(held.memory, self.state_specs, microbatches, mesh, held.kept.kind_of),
            argument_bytes=[float(leaf.size * leaf.dtype.itemsize) for leaf in jax.tree.leaves((state, microbatches))],
            place=place,
            cuts=self.assigner.fixed_cuts,
            residuals=self.scheduling.residuals,
            ignored=self._ignored,
            update=lambda: trace_update(self.builders.untraced.update, held.memory),
        )

    def for_accumulation(self, microbatches: Any, announce: Callable[[int], None]) -> Accumulation:
        """Return the program that adds the gradients of such batches, and place the state as a training step has it.

        `announce` is called as in `for_training`.
        """
        process_group().note_step(self._held.step + 1)
        key = self._key("accumulate", microbatches)
        if key not in self.compiled:
            announce(sum(of[:2] + of[-1:] == key[:2] + key[-1:] for of in self.compiled))
            with self.clock.part("compilation"):
                self.compiled[key] = self._accumulation(microbatches)
        with self.clock.part("placement"):
            self._held.place(self.compiled[key].places)
        return self.compiled[key]

    @without_ambient_mesh
    def _accumulation(self, microbatches: Any) -> Accumulation:
        held, specs = self._held, self.state_specs
        policy = self._ready_to_compile("accumulate", microbatches)
        builder = self.builders.for_training(held.memory, microbatches)
        loop = MicrobatchLoop(num_microbatches=self.scheduling.num_microbatches, schedule=self.scheduling.schedule)
        add, form = adding(builder, loop), self._form(microbatches, donate=True)
        held.place(places := self._places_of_training(microbatches, policy))
        summed = jax.eval_shape(builder.update.summand, shapes_of(held.memory.params))
        terms = self.stage.trace(partial(terms_of, builder), builder.computed_shapes(held.memory), one_of(microbatches))
        leaves, carried = jax.tree.leaves(held.memory.model_state), builder.writes.carried
        sums = Sums(terms=zero_terms(terms), grads=summed, written={i: leaves[i] for i in carried}, params={})
        of_sums = None if specs is None else Sums(terms=None, grads=specs.params, written=None, params=None)  # type: ignore[arg-type]
        if form["in_shardings"] is not None:
            of_state = None if specs is None else as_read(specs)
            form["in_shardings"] = (of_state, form["in_shardings"][1], of_sums, None)
        form |= {"out_shardings": of_sums and (of_sums, None), "donate_argnums": (2,)}
        compiled = self._compile(add, (as_read(held.memory), microbatches, sums, np.int32(0)), policy, **form)
        places_of_sums = None if self.scheduling.mesh is None else compiled.in_shardings[0][2].grads
        return Accumulation(
            compiled=compiled, places=places, carried=carried, terms=terms, zeros=zeros_on(summed, places_of_sums)
        )

    def _places_of_training(self, microbatches: Any, policy: CutPolicy) -> StatePlaces:
        """Return the places of a training step's arguments; the step is not compiled for them."""
        mesh, held = self.scheduling.mesh, self._held
        if mesh is None:
            return StatePlaces(None)
        compiled = self.compiled.get(self._key("train", microbatches))
        if compiled is None:
            function, form = self.training_function(microbatches), self._form(microbatches, donate=True)
            with self.stage.axis_rules():
                step = mpmd_jit_with_loop(function, mesh, cut_policy=policy, **form)
                compiled = step.place(held.kept.described(held.memory), microbatches)
        return StatePlaces(compiled.in_shardings)

    @without_ambient_mesh
    def for_update(self, pending: Pending) -> Any:
        """Return the program that takes a step with sums: `(state, sums, calls) -> (state, metrics)`."""
        held, mesh, specs = self._held, self.scheduling.mesh, self.state_specs
        arguments = held.memory, pending.sums
        leaves, tree = jax.tree.flatten(arguments)
        types = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves)
        key = "update", self.scheduling.schedule, (tree, types), trace_settings()
        if key not in self.compiled:
            with self.clock.part("compilation"):
                policy = self._ready_to_compile("update", {"gradients": shapes_of(pending.sums.grads)})
                finish = self.builders.untraced.finish
                self.compiled[key] = self._compile(
                    lambda state, sums, calls: finish(state, sums, self.scheduling.num_microbatches, calls),
                    (*arguments, np.int32(1)),
                    policy,
                    donate_argnums=(0,) if mesh is None else (0, 1),  # JAX warns of sums that become no result
                    in_shardings=None if mesh is None else (*jax.tree.map(lambda leaf: leaf.sharding, arguments), None),
                    out_shardings=None if specs is None else (specs, None),
                    everywhere=(False, True),
                )
        return self.compiled[key]

    def like_training(self, function: Callable[..., Any], microbatches: Any) -> Any:
        """Compile another function of a state and such batches, in the form of the training step; it is not kept.

        It returns the new state and anything else, on the ranks that make it; it may reuse the memory of its state.
        """
        policy, state = self._ready_to_compile("train", microbatches), self._held.kept.described(self._held.memory)
        form = {**self._form(microbatches, donate=True), "everywhere": False}
        return self._compile(function, (state, microbatches), policy, **form)

    def has_training(self, microbatches: Any) -> bool:
        """Return True if `for_training` would compile nothing for such batches."""
        return self._key("train", microbatches) in self.compiled

    def get(
        self, kind: str, microbatches: Any, build: Callable[[], Any], *, donate: bool, more: tuple[Any, ...] = ()
    ) -> Any:
        """Return the compiled step of this kind, "train" or a kind of inference, for such batches.

        `build` makes the pure function, if the step is not compiled yet. With `donate`, the step reuses the state's
        memory. Without, the weights are placed for it now, if no step was compiled before. `more` has the shapes of
        further arguments, which follow from the kind and the batch; each device gets all of them.
        """
        held = self._held
        process_group().note_step(held.step + (kind == "train"), trains=kind == "train")
        key = self._key(kind, microbatches)
        if key not in self.compiled:
            with self.clock.part("compilation"):
                policy = self._ready_to_compile(kind, microbatches)
                state = held.kept.described(held.memory) if donate else held.memory.for_inference()
                function = build()
                form = self._form(microbatches, donate=donate)
                if form["in_shardings"] is not None:
                    form["in_shardings"] = (*form["in_shardings"], *[PartitionSpec()] * len(more))
                self.compiled[key] = self._compile(function, (state, microbatches, *more), policy, **form)
        if not donate:
            held.place_weights(self.compiled[key])
        return self.compiled[key]

    def for_decoding(
        self, step: Callable[..., Any], kind: Any, arguments: tuple[Any, ...], specs: tuple[Any, ...]
    ) -> Any:
        """Return the compiled step of a generation for such arguments, and place the weights for it.

        Args:
          step: the step of `make_step`.
          kind: what is compiled into the step beside the types of its arguments.
          arguments: `(carried, tokens, places)`, arrays or shapes; the step reuses the memory of `carried`.
          specs: the specs of these arguments on a rank.
        """
        held, state_specs = self._held, self.state_specs
        key = (*self._key("generate", arguments), kind)
        if key not in self.compiled:
            policy = self._ready_to_compile("generate", {"tokens": arguments[1]})
            self.compiled[key] = self._compile(
                step,
                (held.memory.for_inference(), *arguments),
                policy,
                in_shardings=(None if state_specs is None else state_specs.for_inference(), *specs),
                out_shardings=(*specs[:2], None),
                donate_argnums=(1,),
            )
        held.place_weights(self.compiled[key])
        return self.compiled[key]

    def _ready_to_compile(self, kind: str, batch: Any) -> CutPolicy:
        """Return the policy of the cuts, once every process compiles this step; the engine compares the programs."""
        scheduling = self.scheduling
        if scheduling.mesh is not None:  # without a mesh, `jax.jit` handles this setting
            refuse_disabled_jit("a pipelined step")
        step = f"a step to {kind} for {describe_batch(batch)}"
        self._held.meet("the compilation of a step", f" ({step})")
        if self._held.is_across:  # before the long trace, and in the words of a call
            compared = {"the step": step, "the schedule": repr(scheduling.schedule)}
            remedy = "Make the same call with batches of the same shapes, and the same schedule, in every process."
            compare_hashes(process_group(), "what to compile", compared, remedy)
        return self.assigner.policy(scheduling, training=kind in ("train", "accumulate"))

    def _key(self, kind: str, microbatches: Any) -> Any:
        return (kind, self.scheduling.schedule, signature(microbatches), trace_settings())

    def _form(self, batch: Any, *, donate: bool) -> dict[str, Any]:
        """Return the arguments of `mpmd_jit_with_loop` for a function of the state and a batch.

        All processes get the function's results other than a new state.
        """
        specs, mesh = self.state_specs, self.scheduling.mesh
        if specs is not None and not donate:
            specs = specs.for_inference()
        in_specs = None
        if mesh is not None:
            shards = num_batch_shards(mesh)
            # Only inference has batches that data-parallel devices cannot divide evenly: each device computes all.
            # One item stands for all microbatches, of which a later step may have another number.
            like = StackedMicrobatches(batch.items[:1]) if isinstance(batch, StackedMicrobatches) else batch
            leaves, structure = jax.tree.flatten(like)
            is_shared = all(leaf.shape[1] % shards == 0 for leaf in leaves if len(leaf.shape) > 1)
            of_batch = [batch_spec(mesh, len(leaf.shape)) if is_shared else PartitionSpec() for leaf in leaves]
            in_specs = (specs, jax.tree.unflatten(structure, of_batch))
        if not donate:
            return {"in_shardings": in_specs, "everywhere": True}
        return {
            "in_shardings": in_specs,
            # A step returns the state with the shardings of its input state.
            "out_shardings": None if specs is None else (specs, None),
            "donate_argnums": (0,),
            "everywhere": (False, True),
            "fsdp": self._fsdp,
            "residuals": self.scheduling.residuals,
        }

    def _compile(self, function: Callable[..., Any], arguments: tuple[Any, ...], policy: CutPolicy, **form: Any) -> Any:
        """Compile a function for such arguments; `form` has those of `mpmd_jit_with_loop`.

        Raises:
          ModelError: if the model has a matrix product that JAX lacks on the devices.
        """
        try:
            return self._compile_any(function, arguments, policy, **form)
        except ValueError as error:
            if not lacks_product(error):
                raise
            raise ModelError(
                f"the model has a matrix product that JAX lacks on these devices: {error}. On CPU this is attention of "
                "jax.nn and Flax in float16. Compute in another type there: dtype=jnp.bfloat16 or dtype=jnp.float32 "
                "in the modules, or as precision=."
            ) from error

    def _compile_any(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        policy: CutPolicy,
        *,
        donate_argnums: tuple[int, ...] = (),
        **form: Any,
    ) -> Any:
        mesh = self.scheduling.mesh
        if mesh is None:
            jitted = jax.jit(function, donate_argnums=donate_argnums)
            if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
                return jitted  # a compiled function would refuse to run operation by operation
            return called_with_few_bits(jitted.lower(*arguments).compile())
        with self.stage.axis_rules():
            step = mpmd_jit_with_loop(function, mesh, cut_policy=policy, donate_argnums=donate_argnums, **form)
            if isinstance(arguments[1], StackedMicrobatches):
                return self._patterns.compile(self.scheduling.schedule, step, *arguments)
            return step.compile(*arguments)
