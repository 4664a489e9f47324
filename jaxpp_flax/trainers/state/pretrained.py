"""Weights of other libraries into a trainer's first state, and out of its current one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.layers.lora import find_adapters
from jaxpp_flax.pretrained import IDENTITY, NameMap, export_pretrained
from jaxpp_flax.pretrained.exporting import SHARD_BYTES
from jaxpp_flax.pretrained.loading import plan_load
from jaxpp_flax.trainers.state.holder import StateHolder
from jaxpp_flax.trainers.state.inference_weights import InferenceWeights
from jaxpp_flax.trainers.state.merged_adapters import merge_leaves
from jaxpp_flax.trainers.state.optimizer_state import trace_init
from jaxpp_flax.trainers.state.sources import Arrays, Files
from jaxpp_flax.trainers.state.train_state import leaves_of_model, model_part, own_path
from jaxpp_flax.trainers.state.weights import to_ordinary


@dataclass(frozen=True)
class PretrainedWeights:
    """Loads and exports the weights of a trainer.

    Args:
      init: makes the optimizer's state from parameters.
      meet: waits until every process has made the call of this name.
      abstract_model: returns the model as shapes.
    """

    held: StateHolder
    weights: InferenceWeights
    init: Callable[[Any], Any]
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
        """Begin with the weights in files: safetensors as Hugging Face writes them, or an Orbax checkpoint.

        The files are checked at once: names, shapes, dtypes, ties, and that no shard is cut off. They are read when
        the state is placed: each process reads only the slices that its ranks hold, directly to
        their devices. The optimizer's state and the average of the weights begin anew from the new weights.

        Args:
          source: a safetensors file, an index of shards, a directory with either, or an Orbax checkpoint.
          map: which tensor fills which leaf; see `docs/guides/pretrained.md`.
          cast: convert floating numbers to the dtypes of the model's leaves.
          untie: fill leaves that the files tie to another tensor with a copy of that tensor.
          keep: globs of leaves that keep their values, such as adapters (`"*/lora_*"`).

        Raises:
          CheckpointMismatchError: the message lists all leaves that do not fit. Nothing has changed then.
          CheckpointNotFoundError, CorruptCheckpointError: if a file is missing, or was cut off.
          ValueError: after the first step.
        """
        self.meet("trainer.load_pretrained")
        if self.held.step:
            raise ValueError(
                f"load_pretrained gives the first weights, but this trainer has done {self.held.step} steps: their "
                "optimizer state would not be for the new weights. Make a new trainer; to go on with a run, use "
                "restore."
            )
        state = self.held.memory
        plan = plan_load(source, leaves_of_model(state), map=map, cast=cast, untie=untie, keep=keep)
        names = {own_path(path): path for path in flatten(model_part(state.params, state.model_state))[0]}
        try:  # the old weights are freed before, so that memory never holds both
            self.held.take(Files(plan, names), low_memory=True)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{error} The weights before are gone: load some before training.") from error
        self.held.begin_anew()
        if trace_init(self.init, state.params) is None:  # the optimizer's first state needs the values
            first = flatten(self.init(to_ordinary(self.held.weights().params)))[0]
            self.held.take(Arrays({f"opt_state/{path}".rstrip("/"): leaf for path, leaf in first.items()}))

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
        """Write the current weights to a new directory as Hugging Face does: safetensors, with an index.

        The weights are those of `Inference(params=)`. Each process writes the slices that its ranks hold, one after
        another, directly to their place in the files. Adapters (LoRA) are merged: the files have the leaves and the
        bits of `merge_lora(trainer.model)`, but each kernel is merged on its own ranks, and nothing is ever in one
        place.

        Args:
          directory: it must not exist; it gets its name when it is complete.
          map: the names and arrangement in the files, as in `load_pretrained`.
          only: globs of the leaves to write; None writes all parameters and other variables of the model.
          config: the content of a `config.json` beside the weights, which `transformers` needs.
          max_shard_bytes: the largest size of a file.
          ema: write the average of the weights, in the parameters' types.
          merge_adapters: False writes kernels and adapters as they are. Without it, if `only` chooses nothing but
            adapters (`"*/lora_*"`), these are written alone.

        Raises:
          CheckpointMismatchError: if the map does not fit; the message lists all leaves.
          CheckpointSaveError: if the directory exists, or cannot be written.
          ValueError: for `ema=True` without an average; if an adapter cannot be merged.
        """
        self.meet("trainer.export_pretrained")
        if ema and self.held.memory.ema is None:
            raise ValueError("export_pretrained(ema=True) needs an average: parameters=Parameters(ema_decay=0.999).")
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
