"""Weights of other libraries into a trainer's first state, and out of its current one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.layers.lora import find_adapters
from jaxpp_flax.pretrained import NameMap, export_pretrained
from jaxpp_flax.pretrained.loading import plan_load
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights
from jaxpp_flax.trainers.state.merged_adapters import merge_leaves
from jaxpp_flax.trainers.state.sources import Files
from jaxpp_flax.trainers.state.train_state import leaves_of_model, model_part, own_path


@dataclass(frozen=True)
class PretrainedWeights:
    """Loads and exports the weights of a trainer.

    Args:
      abstract_model: returns the model as shapes.
    """

    held: StateHolder
    weights: InferenceWeights
    mesh: MpmdMesh | None
    abstract_model: Callable[[], Any]

    @without_ambient_mesh
    def load(
        self,
        source: str | os.PathLike[str],
        *,
        map: NameMap,
        cast: bool,
        untie: bool,
        keep: PathFilter,
    ) -> None:
        """As `PipelineTrainer.load_pretrained`."""
        self.held.meet("trainer.load_pretrained")
        if self.held.step:
            raise ValueError(
                f"load_pretrained gives the first weights, but this trainer has done {self.held.step} steps, and its "
                "optimizer state belongs to the old weights. Make a new trainer; to continue a run, use restore."
            )
        state = self.held.memory
        plan = plan_load(source, leaves_of_model(state), map=map, cast=cast, untie=untie, keep=keep)
        names = {own_path(path): path for path in flatten(model_part(state.params, state.model_state))[0]}
        try:  # the old weights are freed before, so that memory never holds both
            self.held.take(Files(plan, names), low_memory=True)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error} The old weights are deleted: load some before training.") from error
        self.held.begin_anew()

    @without_ambient_mesh
    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        map: NameMap,
        only: PathFilter | None,
        config: Mapping[str, Any] | None,
        max_shard_bytes: int,
        ema: bool,
        merge_adapters: bool,
    ) -> Path:
        """As `PipelineTrainer.export_pretrained`."""
        self.held.meet("trainer.export_pretrained")
        if ema and self.held.memory.ema is None:
            raise ValueError("export_pretrained(ema=True) needs an average: training=Training(ema_decay=0.999).")
        leaves = leaves_of_model(self.weights.for_export(average=ema))
        if merge_adapters:
            leaves = self._merged(leaves, only)
        return export_pretrained(leaves, directory, map=map, only=only, config=config, max_shard_bytes=max_shard_bytes)

    def _merged(self, leaves: dict[str, Any], only: PathFilter | None) -> dict[str, Any]:
        """Return the leaves of the plain model; all leaves, if there is no adapter or adapters alone are wanted."""
        try:
            adapters = find_adapters(self.abstract_model())
        except ValueError as error:
            raise ValueError(f"{error} To write the adapters as they are, pass merge_adapters=False.") from error
        factors = {path for adapter in adapters for path in adapter.factors}
        if factors.issuperset(filter(choose(only), leaves)):
            return leaves
        return merge_leaves(leaves, adapters, self.mesh)
