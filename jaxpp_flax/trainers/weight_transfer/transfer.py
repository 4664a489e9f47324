"""The trainer's calls that send its weights to a sampler: a module, a tree, or whoever takes a stream of arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx

from jaxpp_flax.checkpoint.format.paths import PathFilter, choose, flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.runtime.relayout import relayout, relayout_across
from jaxpp_flax.engine.runtime.transport.base import Tag
from jaxpp_flax.engine.runtime.transport.connection import process_connection
from jaxpp_flax.messages import listed
from jaxpp_flax.pretrained.name_map import NameMap
from jaxpp_flax.processes import errors_naming_failed_process
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.model.sharding import unboxed
from jaxpp_flax.trainers.state.holder import is_gone
from jaxpp_flax.trainers.state.inference_weights import average_of
from jaxpp_flax.trainers.state.merged_adapters import merge_leaves
from jaxpp_flax.trainers.state.train_state import leaves_of_model, own_path
from jaxpp_flax.trainers.weight_transfer.outgoing import Outgoing, outgoing_leaves, tensors_of
from jaxpp_flax.trainers.weight_transfer.targets import Target, compare_targets, plan_targets
from jaxpp_flax.trainers.weights import WeightCalls

__all__ = ["TransferCalls"]

S = TypeVar("S")


class TransferCalls(WeightCalls):
    """The methods of `PipelineTrainer` that send weights to another layout. Every process makes these calls.

    The weights are those of `Inference(params=)`. Each part of a leaf goes straight from a device of its stage to the
    devices that need it, one leaf after another: no device and no host holds more than its part. The arrays are
    copies: training goes on and does not change them, and they may be changed or deleted.
    """

    @without_ambient_mesh
    def stream_weights(
        self,
        shardings: Any,
        *,
        dtype: Any = None,
        map: NameMap | None = None,
        only: PathFilter | None = None,
        ema: bool = False,
        merge_adapters: bool = True,
    ) -> Iterator[tuple[str, jax.Array]]:
        """Yield the weights with other shardings, each with its path, as an engine for inference takes them.

        The next leaf moves when you ask for it. With several processes, all of them go through the whole stream. A
        training step ends the stream with an error.

        Args:
          shardings: one `jax.sharding.Sharding` for all leaves; or a tree of them by the model's paths, such as
            `{"head/kernel": sharding}` or `{"head": {"kernel": sharding}}`. A `jax.ShapeDtypeStruct` or an array with a
            sharding counts too, and its dtype is the leaf's. The devices may be those of the stages, others of this
            process, or others of the trainer's processes.
          dtype: the type of floating numbers whose place says none; their stages' devices convert them. Numbers of 8
            bits or less stay as they are. None: the types of the leaves.
          map: names and arrangement as in files of another library, as for `export_pretrained`: each tensor is
            arranged on the devices of its stage, a stack of layers in one tensor for each. `shardings` then has the
            tensors' names.
          only: globs of the leaves to send, such as those that are trained.
          ema: send the average of the weights, in the parameters' dtypes.
          merge_adapters: merge adapters (LoRA), each on its own stage, as `export_pretrained` does; False sends kernels
            and adapters as they are. Adapters alone (`only="*/lora_*"`) are sent as they are in any case.

        Raises:
          ModelError: if a leaf has no sharding, or one that does not divide it or has devices of no process of this
            trainer; the message lists the leaves, and nothing has moved. Also if the model has no values yet.
          RuntimeError: if a training step came between two leaves.
          ValueError: for `ema=True` without an average; if an adapter cannot be merged.

        Example:
          >>> import jax, numpy as np, optax
          >>> from flax import nnx
          >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
          >>> from jaxpp_flax import PipelineStage, PipelineTrainer
          >>> model = nnx.Sequential(*(PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(i))) for i in range(2)))
          >>> trainer = PipelineTrainer(model, optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
          ...                           num_stages=2, num_microbatches=2, logging=False)
          >>> sampler = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
          >>> for path, array in trainer.stream_weights(NamedSharding(sampler, P("tensor"))):
          ...     print(path, array.shape, array.addressable_shards[0].data.shape)
          layers/0/bias (4,) (2,)
          layers/0/kernel (4, 4) (2, 4)
          layers/1/bias (4,) (2,)
          layers/1/kernel (4, 4) (2, 4)
        """
        call = "trainer.stream_weights"
        return self._stream(call, shardings, only, ema, merge_adapters, dtype=dtype, map=map)

    @without_ambient_mesh
    def sync_weights(
        self, sampler: S, *, only: PathFilter | None = None, ema: bool = False, merge_adapters: bool = True
    ) -> S:
        """Copy the weights into a model that samples, on its own mesh, in its own types.

        Each leaf goes to the sharding of the sampler's leaf of the same path, and replaces it before the next one
        moves: so devices hold the sampler and one leaf more. Variables that are no parameters and that the trainer does
        not have, as a cache, stay, and so do random streams.

        Args:
          sampler: an NNX module, marked or plain, whose values lie on devices or are `jax.ShapeDtypeStruct`s with
            shardings; it is changed in place. Or a tree of such values, as Linen's variables: it is not changed.
          only, ema, merge_adapters: as in `stream_weights`.

        Returns:
          The module; or a tree like `sampler` with the new values.

        Raises:
          ModelError, RuntimeError, ValueError: as in `stream_weights`; also if paths, shapes or dtypes do not fit.

        Example:
          >>> import jax, optax
          >>> from flax import nnx
          >>> from jaxpp_flax import PipelineStage, PipelineTrainer
          >>> make = lambda seed: nnx.Sequential(PipelineStage(nnx.Linear(4, 4, rngs=nnx.Rngs(seed))))
          >>> trainer = PipelineTrainer(make(0), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(),
          ...                           num_stages=1, num_microbatches=2, logging=False)
          >>> sampler = make(1)
          >>> x = jax.numpy.ones((2, 4))
          >>> bool((trainer.sync_weights(sampler)(x) == make(0)(x)).all())
          True
        """
        stream = self._stream("trainer.sync_weights", sampler, only, ema, merge_adapters)
        if isinstance(sampler, nnx.Module):
            places = _variables(sampler)
            for path, array in stream:
                variable, number = places[path]
                values, structure = jax.tree.flatten(variable.get_value())
                values[number] = array
                variable.set_value(jax.tree.unflatten(structure, values))
            return sampler
        leaves = flatten(unboxed(sampler))[0]
        own = {own_path(path): path for path in leaves}
        for path, array in stream:
            leaves[path if path in leaves else own[path]] = array
        return jax.tree.unflatten(jax.tree.structure(sampler), leaves.values())

    def _stream(
        self, call: str, given: Any, only: PathFilter | None, ema: bool, merge_adapters: bool,
        *, dtype: Any = None, map: NameMap | None = None,
    ) -> Iterator[tuple[str, jax.Array]]:  # fmt: skip
        """Check the targets of all leaves, now; and return the stream of the arrays."""
        self._check_ready(call.removeprefix("trainer."))
        self.held.meet(call)
        if ema and self.held.memory.ema is None:
            raise ValueError(f"{call}(ema=True) needs an average of the weights: training=Training(ema_decay=0.999).")
        shapes = leaves_of_model(self.held.memory)
        adapters = self._adapters_to_merge(shapes, only) if merge_adapters else []
        factors = {path for adapter in adapters for path in adapter.factors}
        sent = [path for path in filter(choose(only), shapes) if path not in factors]
        if not sent:
            raise ModelError(
                f"{call}: no leaf matches only={only!r}. The model's paths: {listed(list(shapes), 4, str)}."
            )
        values: dict[str, Any] = {}
        leaves, others = (
            outgoing_leaves({path: shapes[path] for path in sent}, values),
            shapes.keys() - {*sent, *factors},
        )
        if map is not None:
            (leaves, faults), others = tensors_of(leaves, map), set[str]()
            if faults:
                raise ModelError(f"{call}: the map does not fit, and nothing was moved. {listed(faults, 8, str)}.")
        local = None if self.held.is_across else jax.process_index()
        targets = plan_targets(call, given, leaves, dtype=dtype, kept=others, process=local)
        if self.held.is_across:
            compare_targets(call, leaves, targets)
        if not ema:
            self._tell_weights()
        values |= leaves_of_model(self.held.with_weights(average_of if ema else self.inference.params))
        if adapters:
            values |= merge_leaves(values, adapters, self.mesh)
        return self._moved(call, leaves, targets)

    def _moved(
        self, call: str, leaves: Mapping[str, Outgoing], targets: Mapping[str, Target]
    ) -> Iterator[tuple[str, jax.Array]]:
        state, connection = self.held.memory, process_connection() if self.held.is_across else None
        program = "" if connection is None else f"{call} {connection.next_program()}"
        for number, (path, target) in enumerate(targets.items()):
            if self.held.memory is not state or any(map(is_gone, jax.tree.leaves(state.params))):
                raise RuntimeError(
                    f"{call}: a step, or another call that changes the state, came before the leaf {path} had moved: "
                    "the stream would mix old and new weights. Take all of it before: dict(trainer.stream_weights(...))"
                )
            source = leaves[path].cast(target.dtype).make()
            source = source.as_jax_array() if isinstance(source, MpmdArray) else source
            with errors_naming_failed_process():
                if connection is None:
                    moved = relayout(source, target.sharding)
                else:
                    tag = Tag(program, self.step, number, what=f"leaf {path} of {call}")
                    moved = relayout_across(source, target.sharding, connection, tag)
                jax.block_until_ready(moved)
            del source
            if moved is None:  # as in JAX, an array of other processes has no part here
                shape = leaves[path].shape
                moved = jax.make_array_from_single_device_arrays(shape, target.sharding, [], dtype=target.dtype)
            yield path, moved
            del moved


def _variables(module: nnx.Module) -> dict[str, tuple[Any, int]]:
    """Return the variable of each leaf of a module, and the leaf's number among those of the variable."""
    nodes = {path: node for path, node in nnx.iter_graph(module) if isinstance(node, nnx.Variable)}
    found: dict[str, tuple[Any, int]] = {}
    for path, variable in nodes.items():
        inner = list(flatten(variable.get_value())[0])
        own = "/".join(map(str, path))
        found |= {f"{own}/{name}" if len(inner) > 1 else own: (variable, i) for i, name in enumerate(inner)}
    return found
