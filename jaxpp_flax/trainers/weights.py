"""The trainer's weights and its state, as ordinary modules and variables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import on_parts
from jaxpp_flax.layers.lora import Adapter, find_adapters
from jaxpp_flax.messages import amount, listed
from jaxpp_flax.processes import exchange_values, process_group
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.sharding import unboxed
from jaxpp_flax.trainers.objects import TrainerObjects
from jaxpp_flax.trainers.state.holder import is_gone, is_here
from jaxpp_flax.trainers.state.inference_weights import average_of, which_weights
from jaxpp_flax.trainers.state.placement import to_ordinary
from jaxpp_flax.trainers.state.sources import Arrays, compare_values
from jaxpp_flax.trainers.state.train_state import (
    OF_MODEL,
    TrainState,
    is_abstract,
    leaves_of_model,
    model_part,
    own_path,
    shapes_of,
    weight_leaves,
)

__all__ = ["WeightCalls", "checked_weights"]


class WeightCalls(TrainerObjects):
    """The methods of `PipelineTrainer` that read and set its state. Every process makes these calls."""

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state, the rest of the model's state, and the step, without a copy.

        The next `train_step` or `restore` reuses the memory of these arrays. To keep weights, use
        `trainer.gather_model()`. If no step has run yet, this makes the state on the ranks: each rank gets its share.
        """
        self._check_ready("state")
        return self.held.whole()

    @property
    def abstract_model(self) -> Any:
        """The model with a `jax.ShapeDtypeStruct` for each value, as from `nnx.eval_shape`; nothing is copied."""
        state = self.held.memory
        return self.model.adapter.rebuild(shapes_of(state.params), shapes_of(state.model_state))

    @without_ambient_mesh
    def gather_model(self, *, ema: bool = False) -> Any:
        """Return an ordinary module with a copy of the trained weights, all of them on one device of this process.

        The device needs memory for all weights. With several processes, the weights are also sent between processes,
        and every process must call this. For shapes alone, use `trainer.abstract_model`, which copies nothing.

        Args:
          ema: return the averaged weights, in the parameters' dtypes. The average itself, `trainer.state.ema`, has
            float32 or a wider dtype.

        Raises:
          ModelError: if the weights are larger than the free memory of that device; nothing is copied then. A model
            larger than a device stays in parts: `trainer.save()` writes it, each leaf from its ranks.
          ValueError: for `ema=True` without an average.
        """
        self._check_ready("gather_model")
        if ema and self.held.memory.ema is None:
            raise ValueError(
                "gather_model(ema=True) needs an average of the weights: training=Training(ema_decay=0.999)."
            )
        return self.model.adapter.rebuild(*self._gathered("trainer.gather_model", average_of if ema else None))

    @without_ambient_mesh
    def gather_variables(self) -> dict[str, Any]:
        """Return a copy of the variables of a Linen model, as `module.apply` takes them; see also `gather_model`.

        Raises:
          TypeError: for an NNX model.
          ModelError: as in `gather_model`.
        """
        self._check_ready("gather_variables")
        adapter = self.model.adapter
        if not isinstance(adapter, LinenModel):
            raise TypeError("gather_variables() is for Linen models; for an NNX model, use `gather_model()`.")
        return adapter.variables_of(*self._gathered("trainer.gather_variables", None))

    def _gathered(self, call: str, function: Callable[[TrainState], Any] | None) -> tuple[Any, Any]:
        """Return copies of the weights that `function` makes of the state, and of the rest, on one device."""
        self._check_memory(call)
        state = self.held.with_weights(function)
        self.held.meet(call)
        return to_ordinary(state.params), to_ordinary(state.model_state)

    def _check_memory(self, what: str) -> None:
        """Refuse a copy of all weights on one device that cannot take them."""
        state, device = self.held.memory, jax.local_devices()[0]
        leaves = jax.tree.leaves((state.params, state.model_state))
        needed = sum(leaf.size * getattr(leaf.dtype, "itemsize", 0) for leaf in leaves)
        short = shortage({device: needed})
        if short is not None:
            raise ModelError(
                f"{what} copies all weights to one device: {amount(needed, 'B')} to {device}, which has "
                f"{amount(short.free, 'B')} free. Nothing was copied. Write them from their ranks with trainer.save(), "
                "and read the file on a machine with more memory; trainer.abstract_model has the shapes."
            )

    def _for_inference(self) -> TrainState:
        """Return the part of the state that inference reads, with the weights of `Inference(params=)`."""
        self._tell_weights()
        return self.held.with_weights(self.inference.params).for_inference()

    def _adapters_to_merge(self, paths: Collection[str], only: PathFilter | None) -> list[Adapter]:
        """Return the adapters that a plain model has merged; none if adapters alone are wanted of the leaves."""
        try:
            adapters = find_adapters(self.abstract_model)
        except ValueError as error:
            raise ValueError(f"{error} To take the adapters as they are, pass merge_adapters=False.") from error
        factors = {path for adapter in adapters for path in adapter.factors}
        return [] if factors.issuperset(filter(choose(only), paths)) else adapters

    def _tell_weights(self) -> None:
        """Say once which weights inference and export use, if there are others."""
        self.loop.display.message_once(which_weights(self.held.memory, self.inference.params))

    @without_ambient_mesh
    def set_weights(self, weights: Any) -> None:
        """Copy weights from a module or a tree into the model. Leaves that are not in `weights` keep their values.

        Leaves are matched by their paths in the model. A leaf may be trained in one trainer and frozen in the other:
        trainers of one model with different `frozen=` accept each other's weights, `a.set_weights(b.state.params)`.
        The step, the random streams and the optimizer's moments do not change. What is made from parameters (their
        average, `z` of schedule-free) is made anew from the new values.

        Args:
          weights: a module (`other.gather_model()`), an `nnx.State`, Linen's variables or parameters, a nested dict, or
            the state of another trainer or its `params`, with any number of stages.

        Raises:
          ModelError: the message lists the leaves whose path, shape or dtype does not fit; nothing has changed then.
        """
        self._check_ready("set_weights")
        self.held.meet("trainer.set_weights")
        state = self.held.memory
        new = checked_weights(weights, leaves_of_model(state))
        if self.held.is_across:  # arrays on ranks are not compared: no process has all of one
            compare_values("the weights of set_weights", Arrays(new).hashes())
        leaves = flatten(state)[0]
        values = {path: new[own_path(path)] for path in leaves if path.startswith(OF_MODEL) and own_path(path) in new}
        self.held.take(Arrays({path: self._owned(value, leaves[path].dtype) for path, value in values.items()}))
        self.held.forget(self.held.made_of({path.removeprefix("params/") for path in values}))

    def set_state(self, state: TrainState) -> None:
        """Go on from a state that `compiled_step` returned, or that `jaxpp_flax.checkpoint.restore` read; no copy.

        The place in the data is not known afterwards. The trainer's next step reuses the memory of `state`.

        Raises:
          ModelError: the message lists the leaves whose path, shape or dtype does not fit; nothing has changed then.
        """
        self._check_ready("set_state")
        if not isinstance(state, TrainState):
            raise ModelError(f"trainer.set_state got a {type(state).__name__}: it takes a `TrainState`.")
        now, new = flatten(self.held.memory)[0], flatten(state)[0]
        faults = [f"{path}: it lacks this leaf" for path in now if path not in new]
        for path, leaf in new.items():
            has = "no such leaf" if path not in now else f"{now[path].dtype}{list(now[path].shape)}"
            given = f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else f"the {type(leaf).__name__} {leaf}"
            if given != has:
                faults.append(f"{path}: {given}, and the trainer has {has}")
            elif is_abstract(leaf):
                faults.append(f"{path}: {given} without a value")
            elif is_gone(leaf):
                faults.append(f"{path}: a step has reused its memory")
        if faults:
            raise ModelError(
                f"trainer.set_state got a state that does not fit, and nothing has changed. {listed(faults, 8, str)}."
            )
        self.held.put(state)
        self.held.meet("trainer.set_state")
        step: Any = state.step
        known = int(step) if is_here(step) else None
        answers = exchange_values(process_group(), "the step of the new state", known)
        self.checkpoints.take_position(next(answer for answer in answers if answer is not None), None)

    def _owned(self, value: Any, dtype: Any) -> Any:
        """Return a value of this type; an array on ranks is a copy, which a step may donate."""
        if isinstance(value, MpmdArray) and self.mesh is not None:
            return on_parts(value, lambda part: jnp.array(part, dtype=dtype, copy=True))
        value = to_ordinary(value) if isinstance(value, MpmdArray) else value
        return value.astype(dtype) if isinstance(value, jax.Array) else np.array(value, dtype=dtype)


def checked_weights(weights: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a module or a tree by the model's own paths; `known` has the model's leaves.

    Raises:
      ModelError: the message lists the leaves that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> checked_weights({"params": {"w": jnp.ones(2)}}, {"w": jnp.zeros(2), "b": jnp.zeros(2)})
      {'w': Array([1., 1.], dtype=float32)}
    """
    if isinstance(weights, nnx.Module):
        weights = nnx.state(weights)
    elif isinstance(weights, nn.Module):
        weights = weights.variables
    elif isinstance(weights, TrainState):
        weights = model_part(weights.params, weights.model_state)
    leaves = weight_leaves(unboxed(weights))
    found = {path if path in known else own_path(path): leaf for path, leaf in leaves.items()}
    faults = [] if found else ["it has no weights"]
    for path, leaf in found.items():
        if path not in known:
            faults.append(f"{path}: the model has no such leaf")
        elif np.shape(leaf) != known[path].shape:
            faults.append(f"{path}: shape {np.shape(leaf)}, and the model has {known[path].shape}")
        elif (dtype := getattr(leaf, "dtype", np.result_type(type(leaf)))) != known[path].dtype:
            faults.append(f"{path}: dtype {dtype}, and the model has {known[path].dtype}")
    if faults:
        raise ModelError(
            f"trainer.set_weights got a {type(weights).__name__} that does not fit, and nothing has changed. "
            f"{listed(faults, 8, str)}. The model's paths: {listed(list(known), 4, str)}."
        )
    return found
