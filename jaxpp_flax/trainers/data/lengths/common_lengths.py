"""The lengths of a batch that several processes, each with examples of its own, take together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxpp_flax.processes import compare_hashes, exchange_values, process_group

__all__ = ["check_declared", "common_places"]

_REMEDY = "Pass the same lengths, tokens, cost, divisible_by and num_microbatches to group_by_length in every process."


def check_declared(shapes: Sequence[tuple[int, int]], num_microbatches: int) -> None:
    """Make sure that all processes make microbatches of the same shapes (rows, length); all of them call this.

    Raises:
      ValuesMismatchError: the message names what differs, and the processes.
    """
    declared = {"the shapes (rows, length)": str([*shapes]), "num_microbatches": str(num_microbatches)}
    compare_hashes(process_group(), "what group_by_length declares", declared, _REMEDY)


def common_places(own: Sequence[int]) -> list[int]:
    """Return the lengths of the next microbatches, as numbers of declared ones; all processes call this.

    Args:
      own: those of this process's next microbatches, the longest first.

    Returns:
      For the k-th longest microbatch, the longest of all processes' k-th; as many as the process with the most has.

    Example:
      >>> common_places([2, 0, 0])  # a single process
      [2, 0, 0]
    """
    everyones = exchange_values(process_group(), "the lengths of the next microbatches", [*own], timeout_s=None)
    return [max(places) for places in itertools.zip_longest(*everyones, fillvalue=0)]
