"""The trainer's weights, as ordinary modules and variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.messages import amount, listed
from jaxpp_flax.processes import value_text
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.model.sharding import unboxed
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights, average_of
from jaxpp_flax.trainers.state.placement import on_parts, to_ordinary
from jaxpp_flax.trainers.state.sources import Arrays, compare_values
from jaxpp_flax.trainers.state.train_state import (
    OF_MODEL,
    TrainState,
    leaves_of_model,
    model_part,
    own_path,
    shapes_of,
    weight_leaves,
)


@dataclass(frozen=True)
class Weights:
    """Copies the weights of a state for the user, and takes the user's, for `PipelineTrainer`."""

    adapter: ModelAdapter
    held: StateHolder
    inference: InferenceWeights
    mesh: MpmdMesh | None

    @without_ambient_mesh
    def model(self, *, ema: bool) -> Any:
        """As `PipelineTrainer.gather_model`."""
        if ema and self.held.memory.ema is None:
            raise ValueError(
                "gather_model(ema=True) needs an average of the weights: training=Training(ema_decay=0.999)."
            )
        return self.adapter.rebuild(*self._gathered("trainer.gather_model", average_of if ema else None))

    def abstract_model(self) -> Any:
        """The model with a `jax.ShapeDtypeStruct` for each value, as from `nnx.eval_shape`; it costs nothing."""
        state = self.held.memory
        return self.adapter.rebuild(shapes_of(state.params), shapes_of(state.model_state))

    @without_ambient_mesh
    def variables(self) -> dict[str, Any]:
        """As `PipelineTrainer.gather_variables`."""
        if not isinstance(self.adapter, LinenModel):
            raise TypeError("gather_variables() is for Linen models; for an NNX model, use `gather_model()`.")
        return self.adapter.variables_of(*self._gathered("trainer.gather_variables", None))

    def _gathered(self, call: str, function: Callable[[TrainState], Any] | None) -> tuple[Any, Any]:
        """Return copies of the weights that `function` makes of the state, and of the rest, on one device."""
        self._check(call)
        state = self.inference.of(function)
        self.held.meet(call)
        return to_ordinary(state.params), to_ordinary(state.model_state)

    @without_ambient_mesh
    def set(self, weights: Any) -> None:
        """As `PipelineTrainer.set_weights`."""
        self.held.meet("trainer.set_weights")
        state = self.held.weights()
        new = checked_weights(weights, leaves_of_model(state))
        if self.held.is_across:  # arrays on ranks are not compared: no process has all of one
            hashes = {path: None if isinstance(of, MpmdArray) else value_text(of) for path, of in new.items()}
            compare_values("the weights of set_weights", hashes)
        leaves = flatten(state)[0]
        values = {path: new[own_path(path)] for path in leaves if path.startswith(OF_MODEL) and own_path(path) in new}
        given = {path.removeprefix("params/"): value for path, value in values.items() if path.startswith("params/")}
        copies, others = self.held.copies_of(given) if given else ({}, [])
        if others:
            raise ModelError(
                f"trainer.set_weights: the optimizer computed {others[0]} from the old parameters, other than by "
                "copying them, so this value would not fit the new ones. Nothing has changed. Make a new trainer with "
                "the new weights."
            )
        values |= {path: given[of] for path, of in copies.items()}
        self.held.take(Arrays({path: self._owned(value, leaves[path].dtype) for path, value in values.items()}))

    def _owned(self, value: Any, dtype: Any) -> Any:
        """Return a value of this type; an array on ranks is a copy, which a step may donate."""
        if isinstance(value, MpmdArray) and self.mesh is not None:
            return on_parts(value, lambda part: jnp.array(part, dtype=dtype, copy=True))
        value = to_ordinary(value) if isinstance(value, MpmdArray) else value
        return value.astype(dtype) if isinstance(value, jax.Array) else np.array(value, dtype=dtype)

    def _check(self, what: str) -> None:
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
