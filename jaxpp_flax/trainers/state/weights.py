"""The trainer's weights, as ordinary modules and variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import on_every_process
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.linen_model import LinenModel
from jaxpp_flax.trainers.state.holder import StateHolder, copied


@dataclass(frozen=True)
class Weights:
    """Copies the weights of a state for the user, for the attributes of `PipelineTrainer`."""

    adapter: ModelAdapter
    held: StateHolder
    meet: Callable[[str], None]  # waits until every process has made the call of this name

    def model(self) -> Any:
        state = self.held.weights()
        self.meet("trainer.model")
        return self.adapter.rebuild(to_ordinary(state.params), to_ordinary(state.model_state))

    def ema_model(self) -> Any:
        state = self.held.weights()
        if state.ema is None:
            raise ValueError(
                "trainer.ema_model needs an average of the weights: parameters=Parameters(ema_decay=0.999)."
            )
        self.meet("trainer.ema_model")
        return self.adapter.rebuild(to_ordinary(state.ema), to_ordinary(state.model_state))

    def variables(self) -> dict[str, Any]:
        if not isinstance(self.adapter, LinenModel):
            raise TypeError("trainer.variables is for Linen models; an NNX model's are in `trainer.model`.")
        state = self.held.weights()
        self.meet("trainer.variables")
        return self.adapter.variables_of(to_ordinary(state.params), to_ordinary(state.model_state))


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
