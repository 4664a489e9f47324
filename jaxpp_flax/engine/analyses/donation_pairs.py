"""Which output of a task takes over the memory of which donated input.

XLA writes an output into the memory of its partner. If the partner is still read afterwards, XLA copies it first. So an
input that few outputs depend on chooses first, and takes an output that depends on few inputs. In Adam's update the
moments and the parameter are updated in place, and the gradient, which all three read, is left over. Equal pairs in
equal leaves also let XLA compile one kernel for all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jaxpp_flax.engine.tracing.ir import Atom, Graph, Value, memory_kind_of, values

__all__ = ["donation_pairs", "order_of_outputs"]


def donation_pairs(graph: Graph, positions: Collection[int], pins: Iterable[tuple[int, int]] = ()) -> dict[int, int]:
    """Return the output of each input that is donated; an input without an output of its type is left out.

    Args:
      graph: of the task.
      positions: of the inputs that may be donated.
      pins: pairs of an output and an input that come first: accumulators, which must stay in place.
    """
    if not positions:
        return {}
    reached, room = _outputs_reached(graph), _by_kind(graph)
    pairs: dict[int, int] = {}

    def pair(position: int, output: int) -> None:
        pairs[position] = output
        room[_kind(graph.outputs[output])].remove(output)

    for output, position in pins:
        if position in positions and output in room[_kind(graph.inputs[position])]:
            pair(position, output)
    read_by = Counter(output for position in positions for output in _bits(reached[position]))
    for position in sorted(positions, key=lambda position: (reached[position].bit_count(), position)):
        free = [o for o in room[_kind(graph.inputs[position])] if reached[position] >> o & 1]
        if free and position not in pairs:
            pair(position, min(free, key=lambda output: (read_by[output], output)))
    for position in sorted(positions):  # the others take any output of their type: their memory is used again at least
        free = room[_kind(graph.inputs[position])]
        if free and position not in pairs:
            pair(position, free[0])
    return pairs


def order_of_outputs(graph: Graph, pairs: Mapping[int, int]) -> list[int]:
    """Return an order of the outputs in which JAX makes the pairs: of one type, the first input goes with the first.

    Outputs of other types keep their places. Types are those of whole arrays: where only some shards fit, JAX may make
    other pairs, and XLA a copy.
    """
    partner = {output: position for position, output in pairs.items()}
    order = list(range(len(graph.outputs)))
    for places in _by_kind(graph).values():
        wanted = sorted(places, key=lambda output: (partner.get(output, len(graph.inputs)), output))
        for place, output in zip(places, wanted, strict=True):
            order[place] = output
    return order


def _by_kind(graph: Graph) -> defaultdict[Any, list[int]]:
    outputs: defaultdict[Any, list[int]] = defaultdict(list)
    for output, atom in enumerate(graph.outputs):
        outputs[_kind(atom)].append(output)
    return outputs


def _outputs_reached(graph: Graph) -> list[int]:
    """Return, for each input, the outputs that depend on it, as the bits of a number."""
    reached: defaultdict[Value, int] = defaultdict(int)
    for output, atom in enumerate(graph.outputs):
        if isinstance(atom, Value):
            reached[atom] |= 1 << output
    for equation in reversed(graph.equations):
        mask = 0
        for value in equation.outputs:
            mask |= reached[value]
        if mask:
            for value in values(equation.inputs):
                reached[value] |= mask
    return [reached[value] for value in graph.inputs]


def _bits(number: int) -> Iterator[int]:
    """Yield the places of the bits that are set."""
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _kind(atom: Atom) -> Any:
    return tuple(atom.aval.shape), atom.aval.dtype, memory_kind_of(atom.aval)
