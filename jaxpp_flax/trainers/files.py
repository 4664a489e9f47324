"""The trainer's checkpoints, and files of weights of other libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxpp_flax.checkpoint.format.paths import PathFilter, flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.pretrained import IDENTITY, NameMap, export_pretrained
from jaxpp_flax.pretrained.exporting import SHARD_BYTES, LeafToWrite, written_parts
from jaxpp_flax.pretrained.loading import plan_load
from jaxpp_flax.trainers.metrics.clock import timed
from jaxpp_flax.trainers.state.inference_weights import average_of
from jaxpp_flax.trainers.state.merged_adapters import MergedKernel, merge_leaves
from jaxpp_flax.trainers.state.sources import Files
from jaxpp_flax.trainers.state.train_state import leaves_of_model, model_part, own_path
from jaxpp_flax.trainers.weights import WeightCalls

__all__ = ["FileCalls"]


class FileCalls(WeightCalls):
    """The methods of `PipelineTrainer` that read and write files. Every process makes these calls."""

    def save(
        self, where: str | os.PathLike[str] | int | None = None, *, only: PathFilter | None = None, wait: bool = True
    ) -> Path:
        """Write a checkpoint of the whole run: state, random numbers, step, and the position in the data.

        Args:
          where: None or the current step for the trainer's directory; or another path.
          only: leaves to write to another path, by their paths in `trainer.state`: `"params/*"` for the trained
            parameters alone, such as adapters. `restore(path, only=...)` with the same globs reads them.
          wait: True waits until the checkpoint is complete. False writes in the background while training continues;
            if the save fails, the next step raises. A save to another path always waits.

        Returns:
          The checkpoint's directory.

        Raises:
          CheckpointSaveError: if the checkpoint cannot be written; the state and older checkpoints are not changed.
          NonFiniteLossError: if losses or parameters are not finite, unless `on_nonfinite="ignore"` or `where` is a
            path.
          ValueError: if `only` chooses no leaf, or `where` is no path.
        """
        self._check_ready("save")
        if only is not None:
            return self.checkpoints.save_part(where, only)
        if where is None or isinstance(where, int):
            return self.checkpoints.save(where, wait=wait)
        return self.checkpoints.save_whole(where)

    @without_ambient_mesh
    @timed("restore")
    def restore(
        self, where: str | os.PathLike[str] | int = "latest", *, only: PathFilter | None = None,
        rename: Mapping[str, str] | None = None, missing: Literal["error", "keep"] = "error",
    ) -> None:  # fmt: skip
        """Load a checkpoint's state. The run that wrote the checkpoint may have had another layout.

        All leaves are compared, and the sizes of all files, before anything changes. Each leaf is then read directly
        onto the devices of its ranks: now, or once a step is compiled and the ranks are known. The state in memory is
        freed before, so that memory never holds both. If a file then cannot be read, no state is left, and you must
        restore another checkpoint.

        Inside a loop over data, the next step uses the next batch: the data does not go back. Checkpoints of later
        steps belong to what the loop has left: they are renamed to `<step>.abandoned` after its next step.

        The run may have frozen other parameters. The optimizer's state of a parameter that is trained only now begins
        anew, that of one that is frozen now is not read, and a line tells of both.

        Args:
          where: a step in the trainer's directory, "latest", "best" (see `Checkpoints(best=)`), or the path of any
            Orbax checkpoint of a tree.
          only: leaves to restore, by their paths in `trainer.state`: `"params/*"` for the weights only. What is made
            from weights (their average, `z` of schedule-free) is made from the restored ones, unless `only` names it.
          rename: prefixes of paths, from `trainer.state` to the checkpoint: `{"params": ""}` for a checkpoint of an
            unpipelined model's parameters that stock Orbax wrote.
          missing: "keep" keeps the current value of each leaf that the checkpoint lacks.

        Raises:
          CheckpointMismatchError: the message lists all leaves that do not fit.
          CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if the checkpoint cannot be read.
        """
        self._check_ready("restore")
        self.held.meet("trainer.restore")
        path = self.checkpoints.path_of(where)
        self.checkpoints.restore(path, only=only, rename=rename, missing=missing)

    @without_ambient_mesh
    def load_pretrained(
        self, source: str | os.PathLike[str], *, map: NameMap = IDENTITY, cast: bool = False, untie: bool = False,
        keep: PathFilter = (),
    ) -> None:  # fmt: skip
        """Start training from the weights in files: safetensors as Hugging Face writes them, or an Orbax checkpoint.

        The files are checked immediately: names, shapes, dtypes, ties, and that no shard is truncated. They are read
        when the state is placed: each process reads only the slices that its ranks hold, directly onto their devices.
        The optimizer's state and the average of the weights are made again from the new weights.

        Args:
          source: a safetensors file, an index of shards, a directory with either, an Orbax checkpoint, or
            "organization/name" of the Hugging Face Hub.
          map: which tensor fills which leaf; see `docs/guides/pretrained.md`.
          cast: convert floating numbers to the dtypes of the model's leaves.
          untie: if the files tie a leaf to another tensor, fill the leaf with a copy of that tensor.
          keep: globs of leaves that keep their values, such as adapters (`"*/lora_*"`).

        Raises:
          CheckpointMismatchError: the message lists all leaves that do not fit. Nothing has changed then.
          CheckpointNotFoundError, CorruptCheckpointError: if a file is missing or truncated.
          ModuleNotFoundError: for safetensors without the extra `huggingface`.
          ValueError: after the first step.
        """
        self._check_ready("load_pretrained")
        self.held.meet("trainer.load_pretrained")
        if self.step:
            raise ValueError(
                f"load_pretrained gives the first weights, but this trainer has done {self.step} steps, and its "
                "optimizer state belongs to the old weights. Make a new trainer; to continue a run, use restore."
            )
        state = self.held.memory
        plan = plan_load(source, leaves_of_model(state), map=map, cast=cast, untie=untie, keep=keep)
        names = {own_path(path): path for path in flatten(model_part(state.params, state.model_state))[0]}
        self.held.take(Files(plan, names))
        self.held.begin_anew()

    @without_ambient_mesh
    def export_pretrained(
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
        bits of `merge_lora(trainer.gather_model())`, but each kernel is merged on its own ranks, and no device needs
        memory for the whole model.

        Args:
          directory: the path of the new directory. It must not exist; it appears when it is complete.
          map: the names and arrangement in the files, as in `load_pretrained`.
          only: globs of the leaves to write; None writes all parameters and other variables of the model.
          config: the content of a `config.json` beside the weights, which `transformers` needs.
          max_shard_bytes: the largest size of a file.
          ema: write the average of the weights, in the parameters' dtypes.
          merge_adapters: False writes kernels and adapters as they are. If `only` chooses nothing but adapters
            (`"*/lora_*"`), they are written as they are in any case.

        Raises:
          CheckpointMismatchError: if the map does not fit; the message lists all leaves.
          CheckpointSaveError: if the directory exists, or cannot be written.
          ValueError: for `ema=True` without an average; if an adapter cannot be merged.
        """
        self._check_ready("export_pretrained")
        self.held.meet("trainer.export_pretrained")
        if ema and self.held.memory.ema is None:
            raise ValueError("export_pretrained(ema=True) needs an average: training=Training(ema_decay=0.999).")
        if ema:
            self.message("export_pretrained writes the moving average of the weights")
        else:
            self._tell_weights()
        leaves = leaves_of_model(self.held.with_weights(average_of if ema else self.inference.params))
        if merge_adapters:
            leaves = merge_leaves(leaves, self._adapters_to_merge(leaves, only), self.mesh)
        leaves = {path: _as_parts(leaf) if isinstance(leaf, MergedKernel) else leaf for path, leaf in leaves.items()}
        return export_pretrained(leaves, directory, map=map, only=only, config=config, max_shard_bytes=max_shard_bytes)


def _as_parts(kernel: MergedKernel) -> LeafToWrite:
    """Return a kernel that is merged when it is written."""
    parts = lambda: ((index, np.asarray(part)) for index, part in written_parts(kernel.make()))  # noqa: E731
    return LeafToWrite(kernel.shape, kernel.dtype, parts)
