"""The state that a trainer holds. A leaf is a shape that a source can read, or an array at its place."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import jax
import numpy as np

from jaxpp_flax.checkpoint.errors import CorruptCheckpointError
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.messages import listed
from jaxpp_flax.processes import process_group
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.inference_weights import weights_of
from jaxpp_flax.trainers.state.optimizer_memory import ON_DEVICES, OptimizerMemory, default_place, fetched
from jaxpp_flax.trainers.state.optimizer_state import made_of
from jaxpp_flax.trainers.state.placement import Ranks, check_fits, put_on_ranks
from jaxpp_flax.trainers.state.sources import Arrays, Checkpoint, Factory, MemoryCopy, Source, compare_values
from jaxpp_flax.trainers.state.train_state import (
    OF_MODEL,
    TrainState,
    abstract_text,
    first_average,
    is_abstract,
    shapes_of,
)

__all__ = ["StateHolder", "is_gone", "is_here"]


class StateHolder:
    """Holds the `TrainState` and counts its steps. A large state is never on a single device.

    A leaf begins as a shape, with a source that can read its value: the user's arrays, a factory, a checkpoint, a
    copy in memory, or files of weights. `place` brings all leaves to their places, once a step is compiled and the
    shardings are known: they are read, moved if they lie elsewhere, or made from the parameters (the optimizer's first
    state, the average).
    Inference places the weights alone. A call that needs values before that (a save, `trainer.state`) places them on
    the ranks too, each with its share; the first step moves what belongs to another rank.

    Args:
      first: the state before the first step: arrays, and shapes of what does not exist yet.
      init: makes the optimizer's state from parameters.
      initializer: makes the parameters and the rest of the model's state, if `first` has only their shapes.
      ranks: None without a mesh; the state is then on the default device.
      kept: the memory of the optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxpp_flax.trainers.step.optimizer_update import Update
      >>> update = Update(tx=optax.sgd(0.1, momentum=0.9))
      >>> held = StateHolder(update.first_state({"w": jnp.ones(2)}, {}), update.tx.init)
      >>> is_abstract(held.memory.opt_state), is_abstract(held.whole().opt_state)
      (True, False)
    """

    def __init__(
        self,
        first: TrainState,
        init: Callable[[Any], Any],
        *,
        initializer: LeafPrograms | None = None,
        ranks: Ranks | None = None,
        kept: OptimizerMemory = ON_DEVICES,
    ) -> None:
        self.step = 0  # the number of optimizer steps done
        self.memory = shapes_of(first)  # shapes, and arrays at their places
        self.places: Mapping[str, Any] | None = None  # of the leaves in a training step, once all of them lie there
        self._known = WeakSet[Any]()  # the steps that are known to take these places; their trainer may forget them
        self.kept = kept
        self._init, self._ranks, self._compared = init, ranks, False
        self._sources: dict[str, Source] = {}  # of the leaves that are shapes, by path
        self._programs: dict[Callable[[TrainState], Any], LeafPrograms] = {}  # of `with_weights`
        given = {path: leaf for path, leaf in flatten(first)[0].items() if not is_abstract(leaf)}
        weights = {path: leaf for path, leaf in given.items() if path.startswith(OF_MODEL)}
        others = {path: leaf for path, leaf in given.items() if path not in weights}
        for source in (Arrays(weights), Arrays(others), *([] if initializer is None else [Factory(initializer)])):
            self._sources |= dict.fromkeys(source.paths, source)

    # ------------------------------------------------------------------ several processes

    @property
    def is_across(self) -> bool:
        """True if the ranks belong to several processes."""
        return self._ranks is not None and self._ranks.mesh.is_multi_process

    @property
    def _is_described(self) -> bool:
        return self._ranks is not None and self._ranks.mesh.is_described

    def meet(self, call: str, detail: str = "") -> None:
        """Wait until every process has made the same call; if a process makes another call, the run fails.

        Args:
          call: the name of the call, such as "trainer.save", for errors.
          detail: more about the call; it may differ between processes.
        """
        if self.is_across:
            # Once the state is ready, no other process waits for a value of this process.
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(self.memory) if not is_gone(leaf)])
            why = f"it waits in {call}{detail}, which every process must call after the same step"
            process_group().barrier(call, idle_reason=why)

    # ------------------------------------------------------------------ what there is

    def valued(self) -> set[str]:
        """Return the paths of leaves with a value, here or in a source; the others are made from the parameters."""
        return {
            path for path, leaf in flatten(self.memory)[0].items() if path in self._sources or not is_abstract(leaf)
        }

    def target(self) -> TrainState:
        """Return the target of a restore: shapes, with the shardings of leaves at their places. Nothing is read."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=None if is_abstract(leaf) else leaf.sharding
            ),
            self.memory,
        )

    def can_stay(self) -> set[str]:
        """Return the paths of leaves that a restore may leave out: they have a value, or are made from parameters."""
        return self.valued() | {path for path in flatten(self.memory)[0] if not path.startswith(OF_MODEL)}

    def made_of(self, params: Container[str]) -> list[str]:
        """Return the leaves with values that were made from some parameters: the average, and the optimizer's."""
        return sorted(self.valued().intersection(made_of(params, self.memory, self._init)))

    # ------------------------------------------------------------------ new sources

    def take(self, source: Source) -> None:
        """Use another source for its leaves: leaves at their places are read now, others when they are placed.

        For a source on disk, the arrays there are deleted before, so that memory never holds both.

        Raises:
          CorruptCheckpointError: if a file cannot be read; the message says that the state is gone.
        """
        leaves, structure = flatten(self.memory)
        now = {path: leaves[path].sharding for path in source.paths if not is_abstract(leaves[path])}
        for path in () if isinstance(source, Arrays) else now:  # those in memory may be the arrays there
            leaves[path].delete()
        try:
            read = source.read(now) if now else {}
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(
                f"{error} The state in memory is already deleted: restore another checkpoint before training."
            ) from error
        self._sources |= dict.fromkeys([path for path in source.paths if path not in now], source)
        self.memory = jax.tree.unflatten(structure, (leaves | read).values())

    def put(self, state: TrainState) -> None:
        """Hold another state, whose arrays may lie anywhere; arrays of NumPy are read when they are placed."""
        leaves, structure = flatten(state)
        source = Arrays({path: leaf for path, leaf in leaves.items() if isinstance(leaf, np.ndarray | np.generic)})
        leaves |= {path: shapes_of(leaves[path]) for path in source.paths}
        self.memory, self.places = jax.tree.unflatten(structure, leaves.values()), None
        self._sources = dict.fromkeys(source.paths, source)

    def check_owned(self, call: str) -> None:
        """Refuse a call that needs the state, if its memory was reused and no other state has come to the trainer.

        Raises:
          RuntimeError: the message says how the trainer gets a state.
        """
        if any(is_gone(leaf) for leaf in jax.tree.leaves(self.memory) if is_here(leaf)):
            raise RuntimeError(
                f"{call}: the trainer has no state, since its memory was reused by a step of "
                "`trainer.compiled_step`, or by a step or a restore that did not end. Give the trainer the state that "
                "the step returned, `trainer.set_state(state)`, or restore a checkpoint."
            )

    def check_kept(self, new: Container[str]) -> None:
        """Refuse to keep leaves whose memory a step has reused; `new` are the paths that get new values."""
        kept = ((path, leaf) for path, leaf in flatten(self.memory)[0].items() if path not in new and is_here(leaf))
        if gone := [path for path, leaf in kept if is_gone(leaf)]:
            raise RuntimeError(
                f"trainer.restore would keep {listed(gone, 3, str)}, but a step has reused the memory of the state. "
                "Restore all of it, or give the trainer the state that the step returned: `trainer.set_state(state)`."
            )

    def begin_anew(self) -> None:
        """Forget the optimizer's state and the average: they are made from the parameters again."""
        self.forget([path for path in flatten(self.memory)[0] if path.startswith(("opt_state", "ema"))])

    def forget(self, paths: Iterable[str]) -> None:
        """Forget leaves of the optimizer's state and the average: they are made from the parameters again."""
        (leaves, structure), gone = flatten(self.memory), {*paths}
        if not gone:
            return
        for path in gone:
            if not is_abstract(leaves[path]):
                leaves[path].delete()
            leaves[path] = shapes_of(leaves[path])
        self.memory, self.places = jax.tree.unflatten(structure, leaves.values()), None
        self._sources = {path: of for path, of in self._sources.items() if path not in gone}

    # ------------------------------------------------------------------ places

    def place(self, compiled: Any) -> None:
        """Place the state where a compiled training step takes it, unless it lies there already.

        Leaves that lie elsewhere move, as those of another schedule do. On devices that are only described, the state
        stays shapes.

        Raises:
          ModelError: if the model is abstract and has no values, or does not fit; nothing is placed then.
        """
        if self._is_described or (self.places is not None and (self._ranks is None or compiled in self._known)):
            return
        places = self._places_without_step() if self._ranks is None else _places_of(compiled)
        # Steps for batches of other shapes have the same places as a rule: so they may alternate at no cost.
        if self.places != places:
            if self.places is not None:
                self.check_owned("a step for other places")
            self._place(places)
            self.places, self._known = places, WeakSet()
        if self._ranks is not None:
            self._known.add(compiled)

    def place_weights(self, compiled: Any) -> None:
        """Place the leaves of `TrainState.for_inference`, unless a training step has placed the state."""
        if self._ranks is None:
            self.weights()
        elif self.places is None and not self._is_described:
            places, leaves = _places_of(compiled), flatten(self.memory)[0]
            # The state stays the same object if nothing moves: what is made of it stays valid.
            if not all(_lies_at(leaves[path], to) for path, to in places.items()):
                self._place(places)

    @without_ambient_mesh
    def whole(self) -> TrainState:
        """Return all values of the state.

        Raises:
          ModelError: if the model is abstract and has no values yet, or does not fit.
        """
        self._place(self._places_without_step())
        return self.memory

    def weights(self) -> TrainState:
        """Return the state; what only training needs may have only shapes.

        Raises:
          ModelError: as `whole`.
        """
        wanted = flatten(self.memory.for_inference())[0]
        self._place({path: to for path, to in self._places_without_step().items() if path in wanted})
        return self.memory

    def with_weights(self, function: Callable[[TrainState], Any] | None) -> TrainState:
        """Return the state with the weights that `function` makes of it, in the types and places of the parameters.

        They are made anew in each call: a copy for a short time. None: the state as it is.
        """
        if function is None:
            return self.weights()
        state = self.whole()
        if function not in self._programs:
            made = lambda state: weights_of(replace(state, opt_state=fetched(state.opt_state)), function)  # noqa: E731
            self._programs[function] = LeafPrograms.trace(made, self.kept.traced(shapes_of(state)))
        params, structure = flatten(state.params)
        found = self._programs[function].compute(state, {path: leaf.sharding for path, leaf in params.items()})
        return replace(state, params=jax.tree.unflatten(structure, [found[path] for path in params]))

    @without_ambient_mesh
    def load(self) -> None:
        """Read the checkpoint, or the copy in memory, of a run that was resumed and has made no step."""
        if any(isinstance(source, Checkpoint | MemoryCopy) for source in self._sources.values()):
            self.whole()

    def advance(self, state: TrainState) -> None:
        """Hold `state`, the result of a step. The step has reused the memory of the state held before."""
        self.memory = state
        self.step += 1

    def _places_without_step(self) -> dict[str, Any]:
        """Return a place for each leaf that is still a shape, without the shardings of a compiled step."""
        leaves = flatten(self.memory)[0]
        missing = {path: leaf for path, leaf in leaves.items() if is_abstract(leaf)}
        if not missing:
            return {}
        if self._ranks is None:
            kinds = {path: self.kept.kind_of(leaf) for path, leaf in missing.items() if path.startswith("opt_state")}
            return {path: default_place(kinds.get(path)) for path in missing}
        places = self._ranks.preliminary(self.memory)
        return {path: places[path] for path in missing}

    def _place(self, places: Mapping[str, Any]) -> None:
        """Bring leaves to their places: move them, read them from their sources, or make them from the parameters."""
        if not places:
            return
        if self._ranks is not None:
            self._ranks.mesh.check_attached("a value of the trainer's state")
        leaves, structure = flatten(self.memory)
        there = {path: leaves[path] for path in places if not is_abstract(leaves[path])}
        to_read = {path: to for path, to in places.items() if path not in there and path in self._sources}
        to_make = {path: to for path, to in places.items() if path not in there and path not in self._sources}
        if lacking := [path for path in to_make if path.startswith(OF_MODEL)]:
            raise ModelError(abstract_text(lacking, sum(path.startswith(OF_MODEL) for path in leaves)))
        if self._ranks is not None:
            check_fits({path: leaves[path] for path in places}, dict(places))
            self._compare()
            leaves |= put_on_ranks(self._ranks.mesh, there, {path: places[path] for path in there})
            self.memory = jax.tree.unflatten(structure, leaves.values())
        for source in dict.fromkeys(map(self._sources.get, to_read)):
            own = {path: to for path, to in to_read.items() if self._sources[path] is source}
            leaves |= source.read(own)  # type: ignore[union-attr]
        params = jax.tree.unflatten(jax.tree.structure(self.memory.params), _under("params", leaves).values())
        for name, function in (("ema", first_average), ("opt_state", self._init)):
            if wanted := _under(name, to_make):
                made = LeafPrograms.trace(function, shapes_of(params)).compute(params, wanted)
                leaves |= {f"{name}/{path}".rstrip("/"): leaf for path, leaf in made.items()}
        self._sources = {path: source for path, source in self._sources.items() if path not in to_read}
        self.memory = jax.tree.unflatten(structure, leaves.values())

    def _compare(self) -> None:
        """Compare the sources of all processes, once."""
        if self._compared or not self.is_across:
            return
        self._compared, hashes = True, dict[str, str | None]()
        for source in dict.fromkeys(self._sources.values()):
            hashes |= source.hashes()
        programs = LeafPrograms.trace(self._init, shapes_of(self.memory.params))
        if not any(path.startswith("opt_state") for path in self._sources):
            numbers = {f"opt_state/{path}": text for path, text in programs.single_numbers().items()}
            begins = "what the optimizer begins with (its hyperparameters and keys of random numbers)"
            hashes |= {**numbers, begins: programs.hash()}
        compare_values("the initial state", hashes)


def _places_of(compiled: Any) -> dict[str, Any]:
    """Return an `MpmdSharding` for each leaf of the state that a compiled step takes."""
    return flatten(compiled.in_shardings[0][0])[0]


def _lies_at(leaf: Any, place: Any) -> bool:
    """Return whether a leaf lies at its place; what no rank reads may lie anywhere."""
    return not isinstance(leaf, jax.ShapeDtypeStruct) and (leaf.sharding == place or not place.mesh_ids)


def is_gone(leaf: Any) -> bool:
    """Return whether a step has reused the memory of a leaf; shapes and NumPy arrays stay."""
    return hasattr(leaf, "is_deleted") and leaf.is_deleted()


def is_here(leaf: Any) -> bool:
    """Return whether this process has a part of a leaf."""
    return not isinstance(leaf, MpmdArray) or leaf.is_partially_addressable


def _under(name: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a part of the state, by their paths in that part."""
    own = {path: leaf for path, leaf in leaves.items() if path == name or path.startswith(f"{name}/")}
    return {path.removeprefix(name).removeprefix("/"): leaf for path, leaf in own.items()}
