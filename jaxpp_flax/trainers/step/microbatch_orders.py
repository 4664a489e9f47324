"""The order in which the microbatches of several shapes run: by their predicted costs, or as the data gave them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxpp_flax.engine.tracing.bodies.microbatches import StackedMicrobatches
from jaxpp_flax.planning.loads import flops_per_byte
from jaxpp_flax.planning.predicted.microbatch_costs import microbatch_costs
from jaxpp_flax.schedules import Costs, MicrobatchOrder, Schedule, order_by_cost
from jaxpp_flax.trainers.data.batch import signature

__all__ = ["MicrobatchOrders", "OrderRule"]

OrderRule = Literal["cost", "given"]

# A gain below this is not told.
_WORTH_A_LINE = 1.01

_MOST_ORDERS = 1024  # are kept: texts make any number of patterns, and an order is chosen again in milliseconds


class MicrobatchOrders:
    """Chooses the order of the microbatches of a step, and keeps the choice for each pattern of shapes.

    The order depends on the schedule and on the shapes alone: a run that resumes has the order of the run before it.

    Args:
      rule: "cost" chooses by simulation; "given" keeps the order of the data.
      tell: prints a line.
    """

    def __init__(self, rule: OrderRule, tell: Callable[[str], None]) -> None:
        self._rule, self._tell, self._has_told = rule, tell, False
        self._costs: dict[Schedule, dict[Any, Costs]] = {}  # of the shapes that are compiled
        self.chosen: dict[tuple[Schedule, tuple[Any, ...]], MicrobatchOrder] = {}

    def order_of(
        self,
        batch: StackedMicrobatches,
        schedule: Schedule,
        compiled_for: Callable[[StackedMicrobatches], Any],
        keeps_order: Callable[[StackedMicrobatches], bool],
    ) -> Sequence[int]:
        """Return the numbers of the microbatches in the order in which they shall run.

        Args:
          compiled_for: compiles the step for microbatches in their order.
          keeps_order: whether the loss depends on the order of the microbatches, by states that it hands on or by
            random keys.
        """
        kinds = tuple(map(signature, batch.items))
        if self._rule == "given" or len(set(kinds)) < 2:
            return range(len(kinds))
        key = schedule, kinds
        if key not in self.chosen:
            costs = self._learn(batch, kinds, schedule, compiled_for)  # first: what cannot be compiled is refused there
            self.chosen[key] = self._keep(kinds) if keeps_order(batch) else self._choose(kinds, schedule, costs)
            if len(self.chosen) > _MOST_ORDERS:
                del self.chosen[next(iter(self.chosen))]
        return self.chosen[key].order

    def _learn(
        self,
        batch: StackedMicrobatches,
        kinds: tuple[Any, ...],
        schedule: Schedule,
        compiled_for: Callable[[StackedMicrobatches], Any],
    ) -> dict[Any, Costs]:
        """Return the costs of each shape; a new shape is compiled."""
        costs = self._costs.setdefault(schedule, {})
        if not costs.keys() >= set(kinds):
            compiled = compiled_for(batch)
            platform = compiled.mpmd_mesh.rank_devices(0)[0].platform
            work = microbatch_costs(compiled.program, schedule.num_stages, flops_per_byte(platform))
            for kind, cost in zip(kinds, work, strict=True):
                costs.setdefault(kind, cost)
        return costs

    def _keep(self, kinds: tuple[Any, ...]) -> MicrobatchOrder:
        self._tell_once(
            "the microbatches of a step run in the order of the data: the loss hands state from one to the next, or "
            "draws random keys by their numbers"
        )
        return MicrobatchOrder(tuple(range(len(kinds))), 0.0, 0.0)

    def _choose(self, kinds: tuple[Any, ...], schedule: Schedule, costs: dict[Any, Costs]) -> MicrobatchOrder:
        order = order_by_cost(schedule, [costs[kind] for kind in kinds])
        if order.gain >= _WORTH_A_LINE:
            self._tell_once(
                f"the {len(kinds)} microbatches of a step run in an order by their cost: the first such step is "
                f"predicted to be {order.gain:.2f} times as fast as in the order of the data "
                '(`training=Training(order="given")` keeps that)'
            )
        return order

    def _tell_once(self, line: str) -> None:
        if not self._has_told:
            self._has_told = True
            self._tell(line)
