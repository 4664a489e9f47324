"""The predicted step of one layout: what its seconds and its bytes are used for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from jaxpp_flax.planning.block_loads import BlockLoads
from jaxpp_flax.planning.loads import Hardware
from jaxpp_flax.planning.model import StepModel
from jaxpp_flax.planning.predicted.blocks import Work
from jaxpp_flax.planning.quoting.curves import Curves, Group
from jaxpp_flax.planning.quoting.devices import Device
from jaxpp_flax.planning.quoting.facts import TaskFacts
from jaxpp_flax.planning.quoting.layouts import HeldAtBackward, Layout, fullest_moments, fused_stages
from jaxpp_flax.planning.quoting.long_steps import prediction_of, shortened
from jaxpp_flax.planning.quoting.traced import Axes, TracedModel
from jaxpp_flax.planning.quoting.tracing.totals import gradients_of, state_bytes, sums_of_bytes
from jaxpp_flax.planning.stages.balancing import Sizes, balance
from jaxpp_flax.schedules.residuals import ResidualPlan

__all__ = ["QuotedStep", "Quoter"]


@dataclass(frozen=True, kw_only=True)
class QuotedStep:
    """A layout with its predicted step.

    Attributes:
      layout: the layout.
      sizes: the number of blocks of each stage.
      seconds: the predicted time of a step.
      spread: 80 % of measured steps are within a factor of exp(spread) of the predicted time.
      parts: the seconds of the busiest rank by purpose; their sum is `seconds`.
      nbytes: the bytes of each device of the fullest rank, by kind; "workspace" is an estimate.
      host_bytes: the bytes on the host for each device of the fullest rank.
      num_microbatches: the number of microbatches of a step.
      tokens: the number of tokens of a step; of its examples, if they are no sequences: `unit` says which.
      mfu: the model's floating-point operations as a share of the devices' peak.
      work: the seconds of each block for one microbatch.
      peaks: for each rank, the largest number of bytes on each device.
    """

    layout: Layout
    sizes: Sizes
    seconds: float
    spread: float
    parts: dict[str, float]
    nbytes: dict[str, float]
    host_bytes: float
    num_microbatches: int
    tokens: float
    mfu: float
    unit: str = "tokens"
    work: Sequence[Work] = field(repr=False, default=())
    peaks: tuple[float, ...] = ()

    @property
    def interval(self) -> tuple[float, float]:
        """The seconds between which 80 % of measured steps lie."""
        return self.seconds * math.exp(-self.spread), self.seconds * math.exp(self.spread)

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest rank waits for others."""
        return self.parts.get("bubble", 0.0) / self.seconds

    @property
    def memory(self) -> float:
        """The bytes of each device of the fullest rank."""
        return sum(self.nbytes.values())

    def cost(self, device: Device) -> float:
        """Return the price of a million of `unit`; 0 if the device has no price."""
        return device.price / 3600 * self.layout.devices * self.seconds / self.tokens * 1e6


class StageTimes(NamedTuple):
    """The seconds of a stage for one microbatch.

    `saving`: those of the forward in which it writes for a backward of another task alone; `gather`: those of its
    parameters, if each task gathers them.
    """

    forward: float
    backward: float
    again: float
    saving: float
    gather: float

    def once(self, *, fused: bool) -> float:
        """Return the seconds of forward and backward."""
        return self.forward + self.backward - (self.saving if fused else 0.0)

    def busy(self, *, fused: bool, recomputes: bool) -> float:
        """Return the seconds of all tasks: each gathers, a backward reduces; a fused one gathers and reduces."""
        again = self.again if recomputes and not fused else 0.0
        return self.once(fused=fused) + again + (2 if fused else 3) * self.gather


class BlockTimes(NamedTuple):
    """The seconds of a block for one microbatch; `again`: what recomputation adds; `sums`: those of them in sums.

    `saving`: see `StageTimes`.
    """

    work: Work
    again: float
    saving: float
    sums: Work


def _gathered_at(moment: HeldAtBackward, model: StepModel) -> float:
    """Return the bytes that are gathered once, of stages with microbatches in flight: read before, and again later."""
    if model.fsdp == "microbatch":
        return 0.0
    found: dict[str, float] = {}
    for stage in {stage for (_, stage), _ in moment.held}:
        found |= model.stages[stage].gathered
    return sum(found.values())


@dataclass(frozen=True, eq=False)
class Quoter:
    """Predicts the steps of a model on one kind of device."""

    model: TracedModel
    device: Device
    curves: Curves

    def axes(self, layout: Layout) -> Axes:
        """Return the axes that divide a layout's parameters, and its examples where their number matters."""
        data = 1 if self.model.is_linear else layout.data * layout.fsdp
        return replace(layout.axes_of_parameters, data=data)

    def group(self, size: int, stride: int) -> Group:
        return Group.of(size, stride, self.device.per_node)

    def gather_bandwidth(self, axes: Axes) -> float:
        """Return the bytes of whole parameters that a device gathers per second."""
        within = self.curves.bandwidth(self.group(axes.fsdp, axes.tensor * axes.expert), self.device)
        return within * axes.fsdp / max(axes.fsdp - 1, 1)

    @lru_cache(maxsize=512)  # noqa: B019
    def work(self, microbatch: int, axes: Axes) -> tuple[BlockTimes, ...]:
        """Return the seconds of each block."""
        groups, known = self._groups(axes), dict[int, tuple[float, float, float]]()

        def seconds(of: TaskFacts) -> tuple[float, float, float]:
            if id(of) not in known:
                sums, saving = self._moving(of, groups), self.curves.moving(of.saved, self.device)
                known[id(of)] = self.curves.compute(of, self.device) + sums, sums, saving
            return known[id(of)]

        found, gradients = list[BlockTimes](), gradients_of(self.model, microbatch, axes)
        for (ahead, back), nbytes in zip(self.model.work(microbatch, axes), gradients, strict=True):
            (forward, sums, saving), (backward, back_sums, _) = seconds(ahead), seconds(back)
            backward += self.curves.moving(2 * nbytes, self.device)  # the gradients are added to the sums
            # A backward that recomputes saves nothing, and neither does the forward then.
            again = max(forward - saving, 0.0)
            found.append(BlockTimes(Work(forward + saving, backward), again, saving, Work(sums, back_sums)))
        return tuple(found)

    def _groups(self, axes: Axes) -> dict[str, Group]:
        """Return the devices that each axis inside a rank joins."""
        inner = axes.tensor * axes.expert
        return {
            "tensor": self.group(axes.tensor, 1),
            "expert": self.group(axes.expert, axes.tensor),
            "fsdp": self.group(axes.fsdp, inner),
            "data": self.group(axes.data, inner),
        }

    def _moving(self, of: TaskFacts, groups: Mapping[str, Group]) -> float:
        """Return the seconds of a task's sums, gathers and exchanges."""
        curves = self.curves
        times = {"sum": curves.all_reduce, "gather": curves.gather, "exchange": curves.all_to_all}
        return sum(times[each.kind](each.nbytes, groups[each.axis], self.device) for each in of.collectives)

    def sizes(self, layout: Layout) -> Sizes:
        """Return the number of blocks in each of a layout's stages, with the fastest slowest stage."""
        microbatch = self.model.traces[0].microbatch if self.model.is_linear else layout.microbatch
        return self._balanced(layout.stages, microbatch, self.axes(layout).of_work)

    @lru_cache(maxsize=512)  # noqa: B019
    def _balanced(self, stages: int, microbatch: int, axes: Axes) -> Sizes:
        if stages == 1:
            return (len(self.model.names),)
        work = [of.work.total for of in self.work(microbatch, axes)]
        return balance(work, stages)

    @lru_cache(maxsize=256)  # noqa: B019
    def loads(self, microbatch: int, axes: Axes, *, in_one_node: bool) -> BlockLoads:
        """Return the loads of any stages of blocks."""
        device, curves = self.device, self.curves
        link = curves.inside * device.inside if in_one_node else curves.across * device.across
        hardware = Hardware(
            flops=1.0,
            host_bandwidth=device.host_bandwidth,
            link_bandwidth=link,
            link_latency=curves.hop,
            gather_bandwidth=self.gather_bandwidth(axes),
        )
        return BlockLoads(
            work=[of.work for of in self.work(microbatch, axes)],
            again=[of.again for of in self.work(microbatch, axes)],
            saving=[of.saving for of in self.work(microbatch, axes)],
            holdings=self.model.holdings(microbatch, axes),
            sent=self.model.sent(microbatch, axes.data),
            passing=self.model.passing(microbatch, axes.data),
            with_effects=self.model.with_effects,
            hardware=hardware,
            fsdp=axes.gather,
        )

    # ------------------------------------------------------------ a layout

    def bound(self, layout: Layout) -> float:
        """Return seconds that no step of this layout falls below, without a simulation."""
        order, count = layout.order, layout.num_microbatches(self.model.global_batch)
        whole = fused_stages(layout.schedule, layout.stages, layout.pipeline)
        first: dict[int, float] = {}
        busy = [0.0] * order.num_ranks
        before = 0.0  # until the first task of a rank, and from its last one to the end
        for stage, times in enumerate(self._stage_times(layout)):
            rank, recomputes = order.rank_of(stage), layout.residuals.recompute
            first.setdefault(rank, before)
            work = times.busy(fused=stage in whole, recomputes=recomputes)
            busy[rank] += work
            before += times.forward + times.gather if order.splits_backward else work
        once = self._once(layout)
        return self.curves.step + max(first[r] + count * work + once[r] for r, work in enumerate(busy))

    def _once(self, layout: Layout) -> list[float]:
        """Return the seconds in which each rank gathers its parameters and reduces their gradients once a step."""
        if layout.gather == "microbatch":
            return [0.0] * layout.pipeline
        axes, ranks = self.axes(layout), list(map(layout.order.rank_of, range(layout.stages)))
        moved = self._gathered(self.sizes(layout), layout.microbatch, axes, ranks)
        return [2 * nbytes / self.gather_bandwidth(axes) for nbytes in moved]

    def _stage_times(self, layout: Layout) -> tuple[StageTimes, ...]:
        sizes = self.sizes(layout)
        return self._times(sizes, layout.microbatch, self.axes(layout))

    @lru_cache(maxsize=4096)  # noqa: B019
    def _times(self, sizes: Sizes, microbatch: int, axes: Axes) -> tuple[StageTimes, ...]:
        in_tasks = replace(axes, fsdp=axes.fsdp if axes.gather == "microbatch" else 1)
        gathered, bandwidth = (
            self._gathered(sizes, microbatch, in_tasks, range(len(sizes))), self.gather_bandwidth(axes)
        )  # fmt: skip
        work, found, start = self.work(microbatch, axes), list[StageTimes](), 0
        for size, moved in zip(sizes, gathered, strict=True):
            part = work[start : start + size]
            forward, backward = (sum(getattr(of.work, name) for of in part) for name in ("forward", "backward"))
            again, saving = (sum(getattr(of, name) for of in part) for name in ("again", "saving"))
            found.append(StageTimes(forward, backward, again, saving, moved / bandwidth))
            start += size
        return tuple(found)

    def _gathered(self, sizes: Sizes, microbatch: int, axes: Axes, owners: Sequence[int]) -> list[float]:
        """Return the bytes that each owner of stages gathers: a stage, or a rank, which shares between its stages."""
        owner_of = [owner for owner, size in zip(owners, sizes, strict=True) for _ in range(size)]
        found = [0.0] * len(set(owners))
        for item in self.model.holdings(microbatch, axes) if axes.fsdp > 1 else ():
            for owner in {owner_of[block] for block in item.blocks} if item.kind == "gathered" else ():
                found[owner] += item.nbytes
        return found

    def mean(self, layout: Layout) -> float:
        """Return bytes that the fullest device holds at least: the mean of all, with one microbatch in its backward."""
        state, residuals = sums_of_bytes(self.model, layout.microbatch, self.axes(layout))
        return state / layout.pipeline + residuals / layout.stages

    def least(self, layout: Layout) -> float:
        """Return bytes that the fullest device holds at least, without a walk.

        They are those of one moment of each rank: when its schedule has most microbatches in flight.
        """
        model = shortened(self.step_model(layout))
        stages = model.costs.table(layout.stages, layout.plan).stages
        moments = fullest_moments(layout.schedule, layout.stages, layout.pipeline, model.num_microbatches)
        offloaded = layout.residuals.offload > 0
        return max(
            fixed + moment.nbytes(stages, offloaded=offloaded) + _gathered_at(moment, model)
            for fixed, moment in zip(model.rank_fixed, moments, strict=True)
        )

    def step_model(self, layout: Layout) -> StepModel:
        """Return the model of the loop over microbatches in a layout."""
        axes, count = self.axes(layout), layout.num_microbatches(self.model.global_batch)
        loads = self.loads(layout.microbatch, axes, in_one_node=layout.devices <= self.device.per_node)
        return loads.model(layout.order, count, self.sizes(layout))

    def quick(self, layout: Layout) -> float:
        """Return a quick estimate of the seconds of a step: without transfers between ranks, without a simulation."""
        return self.bound(layout) + sum(self._after(layout))

    def quoted(self, layout: Layout) -> QuotedStep:
        """Return the predicted step of a layout."""
        model, residuals = self.step_model(layout), layout.plan
        count = model.num_microbatches
        found = prediction_of(model, residuals)
        rank = max(range(layout.pipeline), key=lambda r: found.peak_bytes[r])
        nbytes = self._bytes(model, residuals, rank, found.peak_bytes[rank])
        parts = self._parts(layout, model, found.seconds, count)
        seconds = sum(parts.values())
        tokens = self.model.global_batch * self.model.tokens
        peak = self.device.peak_of("bfloat16")
        return QuotedStep(
            layout=layout,
            sizes=self.sizes(layout),
            seconds=seconds,
            spread=self.curves.spread,
            parts=parts,
            nbytes=nbytes,
            host_bytes=found.host_bytes[rank] + found.state_host_bytes[rank],
            num_microbatches=count,
            tokens=tokens,
            unit="tokens" if self.model.tokens > 1 else "examples",
            mfu=self.model.flops * self.model.global_batch / (seconds * layout.devices * peak),
            work=tuple(of.work for of in self.work(layout.microbatch, self.axes(layout))),
            peaks=found.peak_bytes,
        )

    def _parts(self, layout: Layout, model: StepModel, looped: float, count: int) -> dict[str, float]:
        """Return the seconds of the busiest rank by what they are for."""
        recomputes = layout.residuals.recompute
        whole = fused_stages(layout.schedule, layout.stages, layout.pipeline)
        of_rank = [[s for s, r in enumerate(model.rank_of) if r == rank] for rank in range(layout.pipeline)]
        times = self._stage_times(layout)
        busy = [
            count * sum(times[s].busy(fused=s in whole, recomputes=recomputes) for s in stages) for stages in of_rank
        ]
        busiest = max(range(layout.pipeline), key=lambda rank: busy[rank])
        here, twice = of_rank[busiest], [s for s in of_rank[busiest] if recomputes and s not in whole]
        main = count * sum(times[s].once(fused=s in whole) for s in here)
        more = count * sum(times[s].again for s in twice)
        sums = count * (self._sums(layout, here, "forward", "backward") + self._sums(layout, twice, "forward"))
        gathered = busy[busiest] - main - more + self._once(layout)[busiest]
        share = more / (main + more) if main + more else 0.0
        compute = main + more - sums
        reduced, updated = self._after(layout)
        parts = {
            "compute": compute * (1 - share),
            "recompute": compute * share,
            "tensor sums" if layout.expert == self.axes(layout).data == 1 else "sums and exchanges": sums,
            "fsdp gathers": gathered,
            "bubble": max(0.0, looped - main - more - gathered),
            "data sums": reduced,
            "update": updated,
            "besides": self.curves.step,
        }
        return {name: seconds for name, seconds in parts.items() if seconds > 0}

    def _sums(self, layout: Layout, stages: Sequence[int], *kinds: str) -> float:
        work = self.work(layout.microbatch, self.axes(layout))
        sizes = self.sizes(layout)
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        return sum(
            getattr(of.sums, kind)
            for kind in kinds
            for stage in stages
            for of in work[starts[stage] : starts[stage] + sizes[stage]]
        )

    def _after(self, layout: Layout) -> tuple[float, float]:
        """Return the seconds after the loop: of the sum of gradients over `data`, and of the update."""
        group = self.group(layout.data, layout.tensor * layout.expert * layout.fsdp)
        # With "step", the loop has reduced the sums to shards.
        axes = replace(self.axes(layout), gather="microbatch", data=1)
        sizes = self.sizes(layout)
        ranks = tuple(map(layout.order.rank_of, range(layout.stages)))
        products, found = self._products(axes, sizes, ranks), state_bytes(self.model, axes, sizes, ranks)
        times = [
            (self.curves.all_reduce(gradients, group, self.device), self.curves.moving(moved, self.device) + seconds)
            for (gradients, moved), seconds in zip(found, products, strict=True)
        ]
        return max(times, key=sum)

    @lru_cache(maxsize=4096)  # noqa: B019
    def _products(self, axes: Axes, sizes: Sizes, ranks: tuple[int, ...]) -> list[float]:
        """Return for each rank the seconds of the products in the optimizer's update; `ranks` are the stages'."""
        rank_of = [rank for rank, size in zip(ranks, sizes, strict=True) for _ in range(size)]
        groups, found = self._groups(axes), [0.0] * len(set(ranks))
        for blocks, facts in self.model.updates(axes):
            seconds = self.curves.compute(facts, self.device) + self._moving(facts, groups)
            for rank in {rank_of[block] for block in blocks}:
                found[rank] += seconds
        return found

    def _bytes(self, model: StepModel, residuals: ResidualPlan, rank: int, peak: float) -> dict[str, float]:
        short = shortened(model)
        found = {kind: n for kind, n in short.bytes_by_kind(rank, residuals).items() if n > 0}
        rest = peak - sum(found.values())  # residuals of more microbatches, as gpipe keeps them
        found["residuals"] = found.get("residuals", 0.0) + rest
        return {kind: n for kind, n in found.items() if n > 0}
