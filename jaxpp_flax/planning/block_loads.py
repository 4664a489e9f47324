"""The loads of stages made of a loop's blocks, for any sizes of the stages: what the model of a step starts from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from jaxpp_flax.engine.passes import stream_updates
from jaxpp_flax.planning.loads import Hardware, StageLoad
from jaxpp_flax.planning.model import StepModel
from jaxpp_flax.planning.predicted.blocks import Blocks, Holding, Work
from jaxpp_flax.planning.stages.policies import AssignmentError
from jaxpp_flax.schedules import Schedule
from jaxpp_flax.schedules.gathers import Fsdp

__all__ = ["BlockLoads", "of_optimizer"]


def of_optimizer(item: Holding, kept: Sequence[tuple[float, float]]) -> list[Holding]:
    """Return what the optimizer keeps of a parameter, on the devices and on the host; nothing for other holdings."""
    if item.argument is None or item.kind != "parameters":
        return []
    if -item.argument > len(kept):  # an array that the model's code holds, before the step's arguments
        return []
    pairs = zip(("optimizer", "streamed"), kept[item.argument], strict=True)
    return [replace(item, kind=kind, nbytes=nbytes) for kind, nbytes in pairs if nbytes]


@dataclass(frozen=True, kw_only=True)
class BlockLoads:
    """What the blocks of a loop cost and hold, and the hardware.

    A stage holds a value once, even if several of its blocks need it (a tied weight, an activation of two blocks).

    Args:
      work: the seconds of each block for one microbatch.
      holdings: the values that blocks need, those of the optimizer included.
      sent: bytes on each device that cross a cut before each block (the first is not used).
      passing: those of them that the block before the cut does not keep.
      again: the seconds that each block takes to be recomputed; empty: those of its forward.
      saving: the seconds of each block's forward that a task of forward and backward saves; empty: none.
      with_effects: the blocks that may not run twice.
      hardware: the devices and their links.
      fsdp: how often parameters are gathered; see `MeshOptions`.
    """

    work: Sequence[Work]
    holdings: Sequence[Holding]
    sent: Sequence[float]
    passing: Sequence[float]
    with_effects: frozenset[int]
    hardware: Hardware
    fsdp: Fsdp = "microbatch"
    again: Sequence[float] = ()
    saving: Sequence[float] = ()
    _stages: dict[tuple[int, int, bool], StageLoad] = field(
        default_factory=dict[tuple[int, int, bool], StageLoad], repr=False
    )

    @classmethod
    def of(
        cls,
        blocks: Blocks,
        work: Sequence[Work],
        kept: Sequence[tuple[float, float]],
        hardware: Hardware,
        fsdp: Fsdp,
    ) -> BlockLoads:
        """Make the loads from the blocks of a traced step.

        Args:
          blocks: the blocks.
          work: the seconds of each block.
          kept: for each leaf of the step's arguments, the bytes of the optimizer on the devices, and on the host.
          hardware, fsdp: as in the class.

        Raises:
          AssignmentError: if the model cannot be cut at every mark.
        """
        try:
            found = blocks.holdings
        except ValueError as error:
            raise AssignmentError(
                "a plan looks at each block alone, for which the model must be cut at every mark; that is refused: "
                f"{error} Take away the marks that cannot cut."
            ) from error
        holdings: list[Holding] = []
        for item in found:
            holdings += [item, *of_optimizer(item, kept)]
        return cls(
            work=work,
            holdings=holdings,
            sent=[0.0, *(nbytes / blocks.loop.batch_shards for nbytes in blocks.sent)],
            passing=[0.0, *blocks.passing],
            with_effects=blocks.with_effects,
            hardware=hardware,
            fsdp=fsdp,
        )

    def model(self, schedule: Schedule, num_microbatches: int, sizes: Sequence[int]) -> StepModel:
        """Return the model of a step whose stages have these numbers of blocks."""
        ends = list(itertools.accumulate(sizes))
        fused = [schedule.fuses_last_stage and end == ends[-1] for end in ends]
        return StepModel(
            schedule=schedule,
            num_microbatches=num_microbatches,
            stages=[self._stage(end - size, end, of) for size, end, of in zip(sizes, ends, fused, strict=True)],
            hardware=self.hardware,
            fsdp=self.fsdp,
            stream_window=stream_updates.WINDOW_BYTES,
        )

    def _stage(self, start: int, end: int, fused: bool) -> StageLoad:
        key = start, end, fused
        if key not in self._stages:
            self._stages[key] = self._new_stage(*key)
        return self._stages[key]

    def _new_stage(self, start: int, end: int, fused: bool) -> StageLoad:
        held: dict[str, list[float]] = {}
        for item in self.holdings:
            if any(start <= block < end for block in item.blocks):
                held.setdefault(item.kind, []).append(item.nbytes)
        values, inside, gathered, streamed = (
            held.pop(kind, []) for kind in ("activations", "fused", "gathered", "streamed")
        )
        kept, saved = (sum(held.pop(kind, [])) for kind in ("kept", "saved"))
        workspaces = held.pop("workspace", [])
        return StageLoad(
            forward=sum(work.forward for work in self.work[start:end])
            - (sum(self.saving[start:end]) if fused else 0.0),
            backward=sum(work.backward for work in self.work[start:end]),
            recomputation=sum(self.again[start:end]) if self.again else None,
            residual_bytes=sum(inside if fused else values),
            weight_bytes=kept,
            saved_bytes=saved,
            region_bytes=max(workspaces, default=0.0),
            has_effects=any(start <= block < end for block in self.with_effects),
            input_bytes=self.sent[start] if start else 0.0,
            sent_bytes=self.sent[end] if end < len(self.sent) else 0.0,
            passing_bytes=self.passing[end] if end < len(self.sent) else 0.0,
            fixed_bytes={kind: sum(sizes) for kind, sizes in held.items()},
            gathered=self._named("gathered", start, end) if gathered else {},
            streamed=streamed,
        )

    def _named(self, kind: str, start: int, end: int) -> dict[str, float]:
        """Return the holdings of a kind, each under a name of its own, which all stages that need it share."""
        return {
            str(number): item.nbytes
            for number, item in enumerate(self.holdings)
            if item.kind == kind and any(start <= block < end for block in item.blocks)
        }
