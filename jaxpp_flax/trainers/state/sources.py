"""Sources of a state's values: the user's arrays, a factory, a checkpoint, a copy in memory, files of weights.

A source has leaves, named by their paths in `TrainState`, and one function that reads some of them to their places. A
place is a sharding: an `MpmdSharding`, or without ranks a sharding of JAX on the default device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxpp_flax.checkpoint.format.leaves import is_empty
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.checkpoint.memory.copies import StateCopy
from jaxpp_flax.checkpoint.reading import RestorePlan
from jaxpp_flax.engine.arrays.mesh import MpmdSharding
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.arrays.placing import place
from jaxpp_flax.pretrained.loading import LoadPlan
from jaxpp_flax.processes import compare_hashes, process_group, value_text
from jaxpp_flax.trainers.state.first_values import LeafPrograms
from jaxpp_flax.trainers.state.placement import put_on_ranks
from jaxpp_flax.trainers.state.train_state import own_path

__all__ = ["Arrays", "Checkpoint", "Factory", "Files", "MemoryCopy", "Source", "compare_values"]

_REMEDY = (
    "Every process makes model and optimizer by itself, so all must make the same ones: give each the same seed and "
    "hyperparameters, which depend neither on the process nor on the time. Values made in one process alone can be "
    "sent to the others by `jax.experimental.multihost_utils.broadcast_one_to_all`."
)


def compare_values(name: str, hashes: Mapping[str, str | None]) -> None:
    """Make sure that every process has the same values, or programs of them; `name` is all of them in words.

    Raises:
      ValuesMismatchError: the message names the first one that differs, and the processes.
    """
    compare_hashes(process_group(), name, hashes, _REMEDY)


class Source(Protocol):
    """Values of some leaves of a state, which are not at their places yet."""

    @property
    def paths(self) -> Iterable[str]:
        """The paths of its leaves in a `TrainState`."""
        ...

    def read(self, places: Mapping[str, Any]) -> dict[str, Any]:
        """Return new arrays of these leaves; with several processes, all of them call this for the same leaves."""
        ...

    def hashes(self) -> dict[str, str | None]:
        """Return what all processes must have in common, by name; nothing for files that all of them read."""
        ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """Arrays in memory, the same in every process. They are copied, and stay valid."""

    leaves: Mapping[str, Any]

    @property
    def paths(self) -> Iterable[str]:
        return self.leaves.keys()

    def read(self, places: Mapping[str, Any]) -> dict[str, Any]:
        on_ranks = {path: to for path, to in places.items() if isinstance(to, MpmdSharding)}
        chosen = {path: self.leaves[path] for path in on_ranks}
        found: dict[str, Any] = {}
        if on_ranks:
            mesh = next(iter(on_ranks.values())).mpmd_mesh
            found = put_on_ranks(mesh, chosen, on_ranks, donate=False)
        others = {path: to for path, to in places.items() if path not in on_ranks}
        return found | {path: place(self.leaves[path], to, may_alias=False) for path, to in others.items()}

    def hashes(self) -> dict[str, str | None]:
        # Of an array on ranks no process has all.
        return {path: None if isinstance(of, MpmdArray) else value_text(of) for path, of in self.leaves.items()}


@dataclass(frozen=True, eq=False)
class Factory:
    """The construction of a model, which makes each leaf alone."""

    programs: LeafPrograms

    @property
    def paths(self) -> Iterable[str]:
        return flatten(self.programs.shapes)[0].keys()

    def read(self, places: Mapping[str, Any]) -> dict[str, Any]:
        on_ranks = {path: to if isinstance(to, MpmdSharding) else None for path, to in places.items()}
        return self.programs.compute((), on_ranks, whole=True)

    def hashes(self) -> dict[str, str | None]:
        return {"the program of the model's factory (its shapes, seeds and constants)": self.programs.hash()}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint whose leaves and files are checked."""

    plan: RestorePlan

    @property
    def paths(self) -> Iterable[str]:
        return [path for path, leaf in self.plan.leaves.items() if path in self.plan.chosen or is_empty(leaf)]

    def read(self, places: Mapping[str, Any]) -> dict[str, Any]:
        return self.plan.at(places).read_leaves()

    def hashes(self) -> dict[str, str | None]:
        return {}


@dataclass(frozen=True, eq=False)
class MemoryCopy:
    """A copy in the memory of this host, which fits `leaves`: arrays or shapes by path."""

    copy: StateCopy
    leaves: Mapping[str, Any]

    @property
    def paths(self) -> Iterable[str]:
        return self.leaves.keys()

    def read(self, places: Mapping[str, Any]) -> dict[str, Any]:
        wanted = {
            path: jax.ShapeDtypeStruct(self.leaves[path].shape, self.leaves[path].dtype, sharding=to)
            for path, to in places.items()
        }
        return {path: self.copy.place(path, leaf) for path, leaf in wanted.items()}

    def hashes(self) -> dict[str, str | None]:
        return {}


@dataclass(frozen=True, eq=False)
class Files:
    """Files of weights that fit the model; `names` has the state's path of each leaf of the model."""

    plan: LoadPlan
    names: Mapping[str, str]

    @property
    def paths(self) -> Iterable[str]:
        return [self.names[own] for own in self.plan.filled]

    def read(self, places: Mapping[str, Any]) -> dict[str, Any]:
        arrays = self.plan.arrays({own_path(path): to for path, to in places.items()})
        return {self.names[own]: array for own, array in arrays}

    def hashes(self) -> dict[str, str | None]:
        return {}
