"""The trainer's weights, as ordinary modules and variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.engine.arrays.device_memory import shortage
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import on_every_process
from jaxpp_flax.messages import amount
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.state.holder import StateHolder, copied
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights, average_of
from jaxpp_flax.trainers.state.train_state import shapes_of


@dataclass(frozen=True)
class Weights:
    """Copies the weights of a state for the user, for the attributes of `PipelineTrainer`."""

    adapter: ModelAdapter
    held: StateHolder
    inference: InferenceWeights
    meet: Callable[[str], None]  # waits until every process has made the call of this name

    def model(self) -> Any:
        """An ordinary module with a copy of the trained weights, all of them on one device of this process.

        It costs the bytes of all weights there, and with several processes as many sent; every process has to ask for
        it. Shapes alone cost nothing: `trainer.abstract_model`.

        Raises:
          ModelError: if the weights are larger than the free memory of that device; nothing is copied then. A model
            larger than a device stays in parts: `trainer.save()` writes it, each leaf from its ranks.
        """
        self._check("trainer.model")
        state = self.held.weights()
        self.meet("trainer.model")
        return self.adapter.rebuild(to_ordinary(state.params), to_ordinary(state.model_state))

    def abstract_model(self) -> Any:
        """The model with a `jax.ShapeDtypeStruct` for each value, as from `nnx.eval_shape`; it costs nothing."""
        state = self.held.memory
        return self.adapter.rebuild(shapes_of(state.params), shapes_of(state.model_state))

    def ema_model(self) -> Any:
        """An ordinary module with a copy of the averaged weights, in the types of the parameters.

        The average itself, `trainer.state.ema`, is in float32 or wider. Costs and errors are those of `trainer.model`.
        """
        if self.held.memory.ema is None:
            raise ValueError(
                "trainer.ema_model needs an average of the weights: parameters=Parameters(ema_decay=0.999)."
            )
        self._check("trainer.ema_model")
        state = self.inference.of(average_of)
        self.meet("trainer.ema_model")
        return self.adapter.rebuild(to_ordinary(state.params), to_ordinary(state.model_state))

    def variables(self) -> dict[str, Any]:
        if not isinstance(self.adapter, LinenModel):
            raise TypeError("trainer.variables is for Linen models; an NNX model's are in `trainer.model`.")
        self._check("trainer.variables")
        state = self.held.weights()
        self.meet("trainer.variables")
        return self.adapter.variables_of(to_ordinary(state.params), to_ordinary(state.model_state))

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
                "and read the file where there is room; trainer.abstract_model has the shapes."
            )


def to_ordinary(tree: Any) -> Any:
    """Copy every leaf to a new `jax.Array` on the default device.

    If the ranks belong to several processes, all of them must call this function.
    """
    device = jax.local_devices()[0]

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, MpmdArray):
            return copied(leaf)
        several = leaf.sharding.mpmd_mesh.jax_mesh.is_multi_process
        return copied(jax.device_put(on_every_process(leaf) if several else leaf.as_jax_array(), device))

    return jax.tree.map(one, tree)
