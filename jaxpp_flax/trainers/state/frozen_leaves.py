"""Frozen parameters in checkpoints: their one place on disk, and what the optimizer keeps of trained ones alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from jaxpp_flax.checkpoint.format.paths import flatten, places_of
from jaxpp_flax.trainers.state.train_state import OF_MODEL, TrainState, own_path

__all__ = ["OtherFrozen", "disk_names", "left_out"]

_OF_TRAINED = ("opt_state/", "ema/")  # what a state keeps of trained parameters alone


def disk_names(state: TrainState, frozen: Collection[str]) -> dict[str, str]:
    """Return the path on disk of each leaf: a parameter has the same one whether it is trained or frozen.

    Args:
      frozen: the paths in `model_state` of parameters that are not trained.

    Example:
      >>> state = TrainState(step=0, params={"w": 1}, opt_state=(), model_state={"frozen": {"v": 2}, "key": 3})
      >>> disk_names(state, ["frozen/v"])
      {'step': 'step', 'params/w': 'params/w', 'model_state/frozen/v': 'params/v', 'model_state/key': 'model_state/key'}
    """
    moved = {f"model_state/{path}" for path in frozen}
    return {path: f"params/{own_path(path)}" if path in moved else path for path in flatten(state)[0]}


def left_out(frozen: Collection[str], chosen: Collection[str], stored: Collection[str]) -> list[str]:
    """Return the frozen parameters that a checkpoint has, and that are not among the leaves chosen from it.

    Args:
      frozen: the paths in `model_state` of parameters that are not trained.

    Example:
      >>> left_out(["v", "lora_base"], ["params/w"], ["params/v", "params/w"])
      ['model_state/v']
      >>> left_out(["v"], ["opt_state/0/mu/w"], ["params/v"])  # no parameter is asked for
      []
    """
    if not any(path.startswith("params/") for path in chosen):
        return []
    paths = (f"model_state/{path}" for path in frozen)
    return [path for path in paths if path not in chosen and not {*places_of(path)}.isdisjoint(stored)]


@dataclass(frozen=True)
class OtherFrozen:
    """What a state and a checkpoint do not have in common because they freeze other parameters.

    Attributes:
      fresh: leaves of the state that the checkpoint lacks: it was written while their parameters were frozen.
      unread: leaves of the checkpoint that the state lacks: their parameters are frozen now.
    """

    fresh: tuple[str, ...]
    unread: tuple[str, ...]

    @classmethod
    def of(cls, state: Collection[str], stored: Collection[str]) -> OtherFrozen:
        """Compare the paths of a state with those of a checkpoint.

        Example:
          >>> state = ["params/v", "params/w", "opt_state/0/mu/v", "opt_state/0/mu/w", "opt_state/0/count"]
          >>> OtherFrozen.of(state, ["params/v", "params/w", "opt_state/0/mu/v", "opt_state/0/count"])
          OtherFrozen(fresh=('opt_state/0/mu/w',), unread=())
          >>> OtherFrozen.of(state, ["params/v", "params/w", "opt_state/0/count"])  # of another optimizer
          OtherFrozen(fresh=(), unread=())
        """
        known = {tuple(own_path(path).split("/")) for path in state if path.startswith(OF_MODEL)}
        trained = {tuple(own_path(path).split("/")) for path in state if path.startswith("params/")}
        fresh, unread = list[str](), list[str]()
        for item in _OF_TRAINED:
            (mine, theirs) = (_owners(paths, item, known) for paths in (state, stored))
            owned = {*theirs.values()}
            if not owned:  # another optimizer wrote it, or there was no average
                continue
            fresh += [path for path, of in mine.items() if path not in theirs and of not in owned]
            unread += [path for path, of in theirs.items() if path not in mine and of not in trained]
        return cls(tuple(fresh), tuple(unread))

    @property
    def paths(self) -> frozenset[str]:
        """All these leaves."""
        return frozenset((*self.fresh, *self.unread))


def _owners(paths: Iterable[str], item: str, known: Collection[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the parameter that each leaf of an item belongs to."""
    of_item = (path for path in paths if path.startswith(item))
    found = {path: _part_in(tuple(path.split("/"))[1:], known) for path in of_item}
    return {path: owner for path, owner in found.items() if owner is not None}


def _part_in(path: tuple[str, ...], known: Collection[tuple[str, ...]]) -> tuple[str, ...] | None:
    """Return the longest part of a path that is `known`; of equally long ones the last."""
    spans = ((start, start + n) for n in range(len(path), 0, -1) for start in range(len(path) - n, -1, -1))
    return next((path[start:stop] for start, stop in spans if path[start:stop] in known), None)
