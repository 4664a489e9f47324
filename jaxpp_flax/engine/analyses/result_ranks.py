"""The results that every process gets when ranks belong to several processes, such as losses and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.tracing.ir import Atom, Value

__all__ = ["ResultRanks"]

_SMALL_BYTES = 1024  # a vector of losses; larger results are sent to all processes only on request


@dataclass(frozen=True)
class ResultRanks:
    """The processes that own devices of each rank, and for each result whether every process must get it.

    Without a request, a result goes to all processes if it is a scalar, or if it is small and not the new value of an
    argument: a loss for each microbatch, but not the bias of a layer.

    Example:
      >>> result_ranks = ResultRanks(owners=(frozenset({0}), frozenset({0}), frozenset({1})), everywhere=(True,))
      >>> sorted(result_ranks.reaching_all(frozenset({2})))
      [0, 2]
    """

    owners: tuple[frozenset[int], ...]
    everywhere: tuple[bool, ...]

    @classmethod
    def of(cls, mesh: MpmdMesh, everywhere: Sequence[bool]) -> ResultRanks | None:
        """Make the rule for a mesh; None if one process owns the whole mesh."""
        owners = tuple(
            frozenset(device.process_index for device in mesh.rank_devices(rank)) for rank in range(mesh.mpmd_dim)
        )
        return cls(owners, tuple(everywhere)) if len(frozenset.union(*owners)) > 1 else None

    def is_for_all(self, position: int, atom: Atom, updated: frozenset[int]) -> bool:
        """Return whether every process gets a result; `updated` are the ranks of the argument that it updates."""
        if not isinstance(atom, Value):  # a constant: every process makes its own
            return False
        small = not atom.aval.shape or (atom.nbytes <= _SMALL_BYTES and not updated)
        return self.everywhere[position] or small

    def reaching_all(self, ranks: frozenset[int]) -> frozenset[int]:
        """Return `ranks` and further ranks, so that every process owns one of them."""
        chosen = set(ranks)
        reached = frozenset[int]().union(*(self.owners[rank] for rank in ranks))
        for rank, owners in enumerate(self.owners):
            if not owners <= reached:
                chosen.add(rank)
                reached |= owners
        return frozenset(chosen)
