"""The methods of a trainer that use its state without training: weights, inference, checkpoints, weight files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np

from jaxpp_flax.checkpoint.format.paths import PathFilter
from jaxpp_flax.pretrained import IDENTITY, NameMap
from jaxpp_flax.pretrained.exporting import SHARD_BYTES
from jaxpp_flax.trainers.data.batch import shape_of
from jaxpp_flax.trainers.data.batch_sharding import InferenceKind
from jaxpp_flax.trainers.loop.compiled_step import CompiledStep
from jaxpp_flax.trainers.parts import Core, Parts
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["TrainedModel"]


class TrainedModel:
    """The methods of `PipelineTrainer` that use its state without training. Every process makes these calls."""

    _core: Core
    _parts: Parts

    def _running(self, call: str) -> Parts:
        """Return the parts for a call that needs values on devices; refuse it if the devices are only described.

        Raises:
          RuntimeError: on a mesh of a described topology, for which a trainer only compiles; or if the state is gone.
        """
        if call not in ("compiled_step", "fit", "restore", "set_state"):  # `fit` may resume
            self._core.held.check_owned(f"trainer.{call}")
        if self._core.scheduling.mesh is not None:
            self._core.scheduling.mesh.check_attached(f"trainer.{call}")
        return self._parts

    # ------------------------------------------------------------------ weights

    @property
    def state(self) -> TrainState:
        """Parameters, optimizer state, the rest of the model's state, and the step, without a copy.

        The next `train_step` reuses the memory of these arrays. To keep weights, use `trainer.gather_model()`. If no
        step has run yet, this makes the state on the ranks: each rank gets its share.
        """
        self._running("state")
        return self._core.held.whole()

    @property
    def abstract_model(self) -> Any:
        """The model with a `jax.ShapeDtypeStruct` for each value, as from `nnx.eval_shape`; nothing is copied."""
        return self._parts.weights.abstract_model()

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
        return self._running("gather_model").weights.model(ema=ema)

    def gather_variables(self) -> dict[str, Any]:
        """Return a copy of the variables of a Linen model, as `module.apply` takes them; see also `gather_model`.

        Raises:
          TypeError: for an NNX model.
          ModelError: as in `gather_model`.
        """
        return self._running("gather_variables").weights.variables()

    def set_weights(self, weights: Any) -> None:
        """Copy weights from a module or a tree into the model. Leaves that are not in `weights` keep their values.

        Leaves are matched by their paths in the model. A leaf may be trained in one trainer and frozen in the other:
        trainers of one model with different `frozen=` accept each other's weights, `a.set_weights(b.state.params)`.
        The step, the random streams and the optimizer's moments do not change. Copies of parameters (their average,
        `z` of schedule-free) get the new values too.

        Args:
          weights: a module (`other.gather_model()`), an `nnx.State`, Linen's variables or parameters, a nested dict, or
            the state of another trainer or its `params`, with any number of stages.

        Raises:
          ModelError: the message lists the leaves whose path, shape or dtype does not fit; nothing has changed then.
        """
        self._running("set_weights").weights.set(weights)

    # ------------------------------------------------------------------ a state of your own

    def compiled_step(self, batch: Any, *, global_batch_size: int | None = None) -> CompiledStep:
        """Return the training step as a pure function, for a loop that owns its state: `fit` runs the same program.

        Args:
          batch, global_batch_size: as in `compile`, which this calls.
        """
        program = self._running("compiled_step").train_step.compile(batch, global_batch_size=global_batch_size)
        return CompiledStep(program, batch, self._core.rows, global_batch_size)

    def set_state(self, state: TrainState) -> None:
        """Go on from a state that `compiled_step` returned, or that `jaxpp_flax.checkpoint.restore` read; no copy.

        The place in the data is not known afterwards. The trainer's next step reuses the memory of `state`.

        Raises:
          ModelError: the message lists the leaves whose path, shape or dtype does not fit; nothing has changed then.
        """
        self._running("set_state").checkpoints.set_state(state)

    # ------------------------------------------------------------------ inference, and the rows of this process

    def evaluate(
        self,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        steps: int | None = None,
        global_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Compute the mean loss and metrics over all examples of `data`, pipelined; the state does not change.

        The weights are those of `Inference(params=)`. NNX modules run in `eval()` mode. For Linen, `model.training` is
        False. A loss with a parameter `training` gets False.

        Batches may have any sizes. Smaller ones than the largest so far run its program: examples fill it up by
        repetition, and each counts once, so the mean is exact. This needs a loss and metrics that are surely means, or
        pairs `(sum, weight)`, of single examples. If a trace does not show that (`exp` of the mean, a loss that
        compares examples), each size is compiled, and cut into at most `num_microbatches` parts; if the data-parallel
        devices of a stage cannot divide the last examples evenly, each device computes all of these.

        Args:
          data: an iterable of batches; for one batch, `[batch]`. Or a mapping of names to such sets.
          steps: the most batches to draw of each set; None draws all.
          global_batch_size: as in `fit`: the number of examples in a batch; each process passes only the examples that
            it reads, `rows_read(batch, "evaluate")`.

        Returns:
          Metrics as floats, at least `loss`; of several sets, `<set>/loss` and so on. `fit` returns and logs the same
          metrics with the prefix `eval_`: `eval_loss`, `eval_<set>/loss`.

        Raises:
          BatchError: if a batch cannot be cut, or lacks the rows that this process reads.
          TypeError: if `data` is one batch, or an array.
          ValueError: if a set has no batch, or no example with weight in the loss; if a name has a slash.
        """
        evaluation = self._running("evaluate").evaluation
        return evaluation.evaluate(data, steps=steps, global_batch_size=global_batch_size)

    def predict(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """Compute the model's outputs for a batch of any size, pipelined: `jax.Array`s of shape (batch, ...).

        If the model returns a scalar for a microbatch, the result is an array with one value for each microbatch.

        Args:
          batch: the input of the model, or of `predict_fn`: leaves of shape (batch, ...).
          global_batch_size: as in `fit`: the number of examples in the whole batch; this process passes only the
            examples that it reads, `rows_read(batch, "predict")`. Every process gets the outputs of the whole batch.

        Raises:
          TypeError: if the batch is a dict and there is no `predict_fn` to select the model's input.
          BatchError: if the batch cannot be cut, or lacks the rows that this process reads.
        """
        return self._running("predict").evaluation.predict(batch, global_batch_size=global_batch_size)

    def generate(
        self, prompts: Any, *, max_new_tokens: int, lengths: Any = None, temperature: float = 0.0, seed: int = 0,
        top_k: int | None = None, top_p: float | None = None, eos_token_id: int | Sequence[int] | None = None,
        prefill: int = 1, groups: int | None = None, cache_length: int | None = None, cache_dtype: Any = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Continue each prompt by up to `max_new_tokens` tokens, pipelined, with a cache on each stage's devices.

        A copy of the model is switched to decoding by Flax's convention. NNX: each attribute `decode` that is a boolean
        or None is set to True, and each method `init_cache(input_shape, dtype=...)`, as `nnx.MultiHeadAttention` has
        it, is called to make `nnx.Cache` variables. Linen: the module is used with `decode=True` and makes its
        collection `cache`. The model must compute logits (batch, length, vocabulary) from tokens (batch, length). The
        state does not change. See `docs/guides/generation.md`.

        Args:
          prompts: lists of tokens, of any lengths; or an integer array (batch, length).
          max_new_tokens: the most tokens to add to each prompt.
          lengths: for an array that is padded on the right: the length of each prompt.
          temperature: 0 takes the most likely token. Otherwise the logits are divided by this number, and a token is
            sampled.
          top_k: sample among the k most likely tokens.
          top_p: sample among the most likely tokens that together have this probability.
          eos_token_id: the token, or tokens, that end a sequence.
          seed: the seed of the samples. A sample depends only on the seed, the index of its prompt and the position,
            and not on stages, groups or processes.
          prefill: how many tokens of a prompt the model takes in one call. `nnx.MultiHeadAttention` takes one.
          groups: the number of groups of sequences in the pipeline at one time. Default: the number of stages, so that
            every stage has work.
          cache_length: the positions in the cache of a sequence. Default: as many as the longest needs. Calls with
            equal numbers of prompts and equal `cache_length` share their compiled steps.
          cache_dtype: the dtype of the cache. Default: the dtype in which each module computes.

        Returns:
          One int32 array for each prompt, in order. It has shape (n,), with n from 1 to `max_new_tokens`, and holds
          only the new tokens, without padding. If a sequence ends with an end token, this token is included.

        Raises:
          ModelError: if the model has no cache, does not use it, or does not take such lengths.
          ValueError, TypeError: for a prompt or an option that does not fit; nothing has run then.
        """
        return self._running("generate").generator.generate(
            prompts, max_new_tokens=max_new_tokens, lengths=lengths, temperature=temperature, seed=seed, top_k=top_k,
            top_p=top_p, eos_token_id=eos_token_id, prefill=prefill, groups=groups, cache_length=cache_length,
            cache_dtype=cache_dtype,
        )  # fmt: skip

    def leaves_read(self, batch: Any) -> Any:
        """Return, for each leaf of a batch of these shapes, True if this process reads the leaf in training.

        For any other leaf, a process may pass a `jax.ShapeDtypeStruct` with the whole batch's shape and dtype. Usually
        the first stage reads the inputs and the last stage reads the targets; then a process without these two stages
        loads nothing.
        """
        read = getattr(self._parts.train_step.compile(batch), "read_here", None)
        # A step without a mesh has no `read_here`.
        return jax.tree.map(lambda _: True, batch) if read is None else read[0][1]

    def rows_read(self, batch: Any, call: Literal["train"] | InferenceKind = "train") -> Any:
        """Return the examples of a batch that this process reads: the rows to load of each leaf.

        With `fit(..., global_batch_size=)` or `train_step(..., global_batch_size=)`, the process passes only these
        rows, in this order, as an array of shape (rows, ...). They are the same as the index of the devices' shards in
        `jax.make_array_from_process_local_data`, in one microbatch after another. Processes may also divide a dataset
        by other means (such as grain's `ShardOptions`) and pass any examples in these places: each process adds its own
        examples to every microbatch.

        Args:
          batch: a whole batch, or its shapes: leaves with `shape` (B, ...) and `dtype`.
          call: the use of the batch. "evaluate" has the rows of "train" if the batch can be cut into `num_microbatches`
            parts, except for leaves that only one of the two losses reads.

        Returns:
          A tree like `batch`, of int64 arrays of shape (rows,): indices along the first axis, ascending; empty for a
          leaf that this process does not read. `...` for a scalar, which has no rows: pass the scalar itself.

        Raises:
          ValueError, TypeError: as `compile`; and for an unknown `call`.

        Example:
          >>> import jax, optax, numpy as np
          >>> from flax import nnx
          >>> from jaxpp_flax import PipelineStage, PipelineTrainer
          >>> model = nnx.Sequential(*[PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(0))) for _ in range(2)])
          >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
          ...                           num_stages=2, num_microbatches=2, logging=False)
          >>> trainer.rows_read(jax.ShapeDtypeStruct((6, 4), np.float32))  # one process reads all of them
          array([0, 1, 2, 3, 4, 5])
        """
        rows = self._core.rows
        if call not in ("train", *get_args(InferenceKind)):
            raise ValueError(f"rows_read knows no call {call!r}; use 'train', 'evaluate' or 'predict'.")
        if call == "train":
            return rows.read(self._parts.train_step.compile(batch), batch, rows.num_microbatches)
        part = rows.inference_parts(jax.tree.map(shape_of, batch), rows_only=True)[0]
        return rows.read(self._parts.evaluation.compiled(call, part), batch, part.num_microbatches)

    # ------------------------------------------------------------------ checkpoints, and files of other libraries

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
        return self._running("save").checkpoints.save(where, only=only, wait=wait)

    def restore(
        self, where: str | os.PathLike[str] | int = "latest", *, only: PathFilter | None = None,
        rename: Mapping[str, str] | None = None, missing: Literal["error", "keep"] = "error", low_memory: bool = False,
    ) -> None:  # fmt: skip
        """Load a checkpoint's state. The run that wrote the checkpoint may have had another layout.

        Each leaf is read directly onto the devices of its ranks. Before a training step is compiled, the final ranks
        are not known: each rank gets a share of the leaves, and the first step moves them to their final ranks. Without
        a mesh, the state is read onto the default device.

        Inside a loop over data, the next step uses the next batch: the data does not go back. Checkpoints of later
        steps belong to what the loop has left: they are renamed to `<step>.abandoned` after its next step.

        The run may have frozen other parameters. The optimizer's state of a parameter that is trained only now begins
        anew, that of one that is frozen now is not read, and a line tells of both.

        Args:
          where: a step in the trainer's directory, "latest", "best" (see `Checkpoints(best=)`), or the path of any
            Orbax checkpoint of a tree.
          only: leaves to restore, by their paths in `trainer.state`: `"params/*"` for the weights only. Copies of the
            weights (their average, `z` of schedule-free) get the restored values too, unless `only` names the copies.
          rename: prefixes of paths, from `trainer.state` to the checkpoint: `{"params": ""}` for a checkpoint of an
            unpipelined model's parameters that stock Orbax wrote.
          missing: "keep" keeps the current value of each leaf that the checkpoint lacks.
          low_memory: free the state in memory before the new state is read, so that memory never holds both. Paths,
            shapes, dtypes and the sizes of all files are checked before that. If a file then cannot be read, no state
            is left, and you must restore another checkpoint.

        Raises:
          CheckpointMismatchError: the message lists all leaves that do not fit.
          CheckpointNotFoundError, UnfinishedCheckpointError, CorruptCheckpointError: if the checkpoint cannot be read.
            The state in memory does not change then, except as described at `low_memory`.
        """
        self._running("restore").checkpoints.restore(
            where, only=only, rename=rename, missing=missing, low_memory=low_memory
        )

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
        self._running("load_pretrained").pretrained.load(source, map=map, cast=cast, untie=untie, keep=keep)

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
        return self._running("export_pretrained").pretrained.export(
            directory, map=map, only=only, config=config, max_shard_bytes=max_shard_bytes, ema=ema,
            merge_adapters=merge_adapters,
        )  # fmt: skip
