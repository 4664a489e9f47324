"""Weights of other libraries into a trainer's first state, and out of its current one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.layers.lora import find_adapters
from jaxpp_flax.pretrained import IDENTITY, NameMap, export_pretrained
from jaxpp_flax.pretrained.exporting import SHARD_BYTES
from jaxpp_flax.pretrained.loading import LoadPlan, plan_load
from jaxpp_flax.trainers.state.holder import StateHolder, copied
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights
from jaxpp_flax.trainers.state.merged_adapters import merge_leaves
from jaxpp_flax.trainers.state.placement import put_on_ranks
from jaxpp_flax.trainers.state.train_state import (
    TrainState,
    first_average,
    is_abstract,
    leaves_of_model,
    model_part,
    own_path,
    shapes_of,
)
from jaxpp_flax.trainers.step.optimizer_update import Update


@dataclass(frozen=True)
class PretrainedWeights:
    """Loads and exports the weights of a trainer.

    Args:
      meet: waits until every process has made the call of this name.
      abstract_model: returns the model as shapes.
    """

    held: StateHolder
    weights: InferenceWeights
    update: Update
    mesh: MpmdMesh | None
    meet: Callable[[str], None]
    abstract_model: Callable[[], Any]

    def load(
        self,
        source: str | os.PathLike[str],
        *,
        map: NameMap = IDENTITY,
        cast: bool = False,
        untie: bool = False,
        keep: PathFilter = (),
    ) -> None:
        """As `PipelineTrainer.load_pretrained`."""
        self.meet("trainer.load_pretrained")
        if self.held.step:
            raise ValueError(
                f"load_pretrained gives the first weights, but this trainer has done {self.held.step} steps: their "
                "optimizer state would not be for the new weights. Make a new trainer; to go on with a run, use "
                "restore."
            )
        self.held.load()
        state = self.held.memory
        plan = plan_load(source, leaves_of_model(state), map=map, cast=cast, untie=untie, keep=keep)
        traceable = is_abstract(state.opt_state) or not jax.tree.leaves(state.opt_state)
        if self.held.owns_arrays:
            self.held.restored(self._read_in_place(plan, state))
        elif traceable:
            self.held.is_in_files(lambda shardings: self._read(plan, state, shardings))
        else:  # the optimizer's first state needs the values
            self.held.restored(self._read(plan, state, None))

    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        map: NameMap = IDENTITY,
        only: PathFilter | None = None,
        config: Mapping[str, Any] | None = None,
        max_shard_bytes: int = SHARD_BYTES,
        ema: bool = False,
        merge_adapters: bool = True,
    ) -> Path:
        """As `PipelineTrainer.export_pretrained`."""
        self.meet("trainer.export_pretrained")
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

    def _read(self, plan: LoadPlan, state: TrainState, shardings: TrainState | None) -> TrainState:
        """Make the first state from the files: with these shardings, or on the devices of `state`."""
        leaves, structure = flatten(model_part(state.params, state.model_state))
        unmade = {path for path, leaf in leaves.items() if is_abstract(leaf) and own_path(path) not in plan.filled}
        if shardings is None or self.mesh is None:
            made = self.held.make_model_leaves(unmade, None) if unmade else {}
            model = jax.tree.unflatten(structure, _filled(leaves | made, dict(plan.arrays())).values())
            return self.update.first_state(model["params"], model["model_state"])
        places = flatten(model_part(shardings.params, shardings.model_state))[0]
        made = self.held.make_model_leaves(unmade, places) if unmade else {}
        arrays = dict(plan.arrays({own_path(path): place for path, place in places.items()}))
        others = {path: leaf for path, leaf in leaves.items() if own_path(path) not in arrays and path not in made}
        placed = put_on_ranks(self.mesh, others, {path: places[path] for path in others})
        model = jax.tree.unflatten(structure, _filled(leaves | made | placed, arrays).values())
        return self._with_training_part(replace(state, **model), shardings)

    def _read_in_place(self, plan: LoadPlan, state: TrainState) -> TrainState:
        """Read the weights to where they are. The old ones are freed before, so that memory never holds both."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.held.target())
        places = flatten(model_part(shardings.params, shardings.model_state))[0]
        leaves, structure = flatten(model_part(state.params, state.model_state))
        replaced = [leaf for path, leaf in leaves.items() if own_path(path) in plan.filled]
        for leaf in [*replaced, *jax.tree.leaves((state.opt_state, state.ema))]:
            if not is_abstract(leaf):
                leaf.delete()
        try:
            arrays = dict(plan.arrays({own_path(path): place for path, place in places.items()}))
            model = jax.tree.unflatten(structure, _filled(leaves, arrays).values())
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error} The weights before are gone: load some before training.") from error
        return self._with_training_part(replace(state, **model), shardings)

    def _with_training_part(self, state: TrainState, shardings: TrainState) -> TrainState:
        """Make the optimizer's state and the average anew from the parameters, where they are to be."""
        if self.mesh is None:
            ema = None if state.ema is None else first_average(state.params)
            opt_state = self.held.kept.first(self.update.tx.init, state.params, shapes_of(state.opt_state))
            return replace(state, opt_state=jax.tree.map(copied, opt_state), ema=ema)
        state = replace(state, opt_state=shapes_of(state.opt_state), ema=shapes_of(state.ema))
        return self.held.training_part_on_ranks(self.mesh, state, shardings)


def _filled(leaves: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {path: arrays.get(own_path(path), leaf) for path, leaf in leaves.items()}
