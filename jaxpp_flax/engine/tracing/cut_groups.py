"""Which forward markers cut together: a block that is called in passes beside one another stays on one stage.

A loss may call a model twice with nothing between the calls: on two texts, or with its adapters off. In program order
the calls follow one another, but both need the block's weights. If the marker of the second call cut on its own, the
second pass would be a second half of the pipeline, and each weight would be on two stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpp_flax.engine.tracing.ir import Equation, Value, values
from jaxpp_flax.engine.tracing.markers import FORWARD, marker_p

__all__ = ["cut_groups"]


def cut_groups(equations: Sequence[Equation], weights: Sequence[Value]) -> tuple[tuple[Equation, ...], ...]:
    """Return the forward markers in groups that cut together, in the order of their first markers.

    Two markers are of one group if they close blocks of one name, follow the same groups and thus not one another, and
    close blocks that read a common weight. So a block that is called again on its own result cuts again.

    Args:
      equations: of a loop's body, in program order.
      weights: the constants of the loop that may be parameters.
    """
    number = {weight: k for k, weight in enumerate(weights)}
    groups: list[list[Equation]] = []
    firsts: list[tuple[object, int, int]] = []  # of each group: the block's name; the groups and weights behind it
    groups_behind: dict[Value, int] = {}  # sets as bits of a number: a body has many values
    weights_behind: dict[Value, int] = {}  # those since the last marker
    for equation in equations:
        groups_read = weights_read = 0
        for value in values(equation.inputs):
            groups_read |= groups_behind.get(value, 0)
            weights_read |= weights_behind.get(value, 0) | (1 << number[value] if value in number else 0)
        if equation.primitive is marker_p and equation.params["direction"] == FORWARD:
            name = equation.params["name"] if equation.params["closes_block"] else None
            group = next(
                (k for k, first in enumerate(firsts) if _is_beside(first, name, groups_read, weights_read)), -1
            )
            if group < 0:
                group = len(groups)
                groups.append([])
                firsts.append((name, groups_read, weights_read))
            groups[group].append(equation)
            groups_read, weights_read = groups_read | 1 << group, 0
        for value in equation.outputs:
            groups_behind[value], weights_behind[value] = groups_read, weights_read
    return tuple(map(tuple, groups))


def _is_beside(first: tuple[object, int, int], name: object, groups_read: int, weights_read: int) -> bool:
    return name is not None and first[:2] == (name, groups_read) and bool(first[2] & weights_read)
