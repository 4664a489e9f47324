"""The inputs of the simulator: times, memory and links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from jaxpp_flax.schedules.errors import ScheduleError
from jaxpp_flax.schedules.memory import StageBytes
from jaxpp_flax.schedules.residuals import ResidualPlan
from jaxpp_flax.schedules.task import Task, TaskKind

PerStage = float | Sequence[float]
"""One number for every stage, or one for each."""

_F, _B, _I, _W, _FUSED = TaskKind


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The time of each kind of task on each stage, and the memory and bytes sent.

    Each is one number for all stages, or one number for each stage. Use any units: seconds and bytes, or fractions of a
    forward and of an activation.

    Args:
        forward: time of ``F``.
        backward_input: time of ``I``.
        backward_weight: time of ``W``.
        backward: time of the whole ``B``; by default ``I + W``.
        activation: memory held for each microbatch from the start of ``F`` to the end of ``B``, or, if the backward is
            split, to the end of ``I``.
        weight_activation: the part of the activation that is held from the end of ``I`` to the end of ``W``;
            by default all of it.
        sent: bytes that a stage's forward sends to the next stage; the gradient that comes back has as many bytes.
        passing: the part of the sent bytes that ``activation`` does not count. A stage that recomputes its residuals
            keeps nothing of what it sends.
        recomputation: additional time of ``B`` or ``I`` in a stage that recomputes its residuals; by default the time
            of ``F``.
        stage_input: memory held for each microbatch instead of ``activation``, from ``F`` to ``B`` or ``I``, in a
            stage that recomputes its residuals.
        region: memory that ``B`` or ``I`` needs for itself while it runs, also for what `jax.checkpoint` in the model
            recomputes, beside ``activation`` where a forward and a backward are one task. A stage that recomputes
            needs this or ``activation``, whichever is more.

    >>> costs = Costs(forward=[1.0, 1.0, 1.5], backward_input=[1.0, 1.0, 1.5])
    >>> costs.table(3).times[TaskKind.BACKWARD]
    [2.0, 2.0, 2.5]
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    activation: PerStage = 1.0
    weight_activation: PerStage | None = None
    sent: PerStage = 0.0
    passing: PerStage = 0.0
    recomputation: PerStage | None = None
    stage_input: PerStage = 0.0
    region: PerStage = 0.0

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(float(v) for v in value))
            values = value if isinstance(value, Sequence) else [value]
            for stage, v in enumerate(values):
                if not (math.isfinite(v) and v >= 0):
                    raise ScheduleError(f"{name} of stage {stage} must be a finite number >= 0, got {v!r}")

    def table(self, num_stages: int, residuals: ResidualPlan | None = None) -> CostTable:
        """These costs stage by stage, checked against the number of stages; by default every stage keeps its residuals.

        Raises:
            ScheduleError: if a list of costs, or ``residuals``, is for another number of stages.
        """

        def spread(name: str) -> list[float]:
            value = getattr(self, name)
            if not isinstance(value, Sequence):
                return [float(value)] * num_stages
            if len(value) != num_stages:
                raise ScheduleError(
                    f"{name} has {len(value)} numbers for {num_stages} stages: give one for each stage, or one for all"
                )
            return list(value)

        inputs, weights = spread("backward_input"), spread("backward_weight")
        halves = [i + w for i, w in zip(inputs, weights, strict=True)]
        whole = halves if self.backward is None else spread("backward")
        forward, activation = spread("forward"), spread("activation")
        kept = activation if self.weight_activation is None else spread("weight_activation")
        again = forward if self.recomputation is None else spread("recomputation")
        fused = [f + b for f, b in zip(forward, whole, strict=True)]  # which recomputes nothing
        stage_input, sent, passing, regions = map(spread, ("stage_input", "sent", "passing", "region"))
        gradients = [*sent[:-1], 0.0]
        residuals = ResidualPlan.keep(num_stages) if residuals is None else residuals
        residuals.check(num_stages)
        stages: list[StageBytes] = []
        for stage, entry in enumerate(residuals.stages):
            if entry.recompute:
                whole[stage] += again[stage]
                inputs[stage] += again[stage]
            stages.append(
                StageBytes(
                    activation=activation[stage],
                    saved=stage_input[stage] if entry.recompute else activation[stage],
                    kept=kept[stage],
                    passing=sent[stage] if entry.recompute else passing[stage],
                    received=gradients[stage - 1],
                    gradient=gradients[stage],
                    region=regions[stage],
                )
            )
        return CostTable({_F: forward, _B: whole, _I: inputs, _W: weights, _FUSED: fused}, stages, sent)


@dataclass(frozen=True, slots=True)
class CostTable:
    """:class:`Costs` stage by stage: the times of each kind of task, the bytes held and sent."""

    times: dict[TaskKind, list[float]]
    stages: list[StageBytes]
    sent: list[float]

    def duration(self, task: Task) -> float:
        return self.times[task.kind][task.stage]

    def sent_bytes(self, result: Task) -> float:
        """Return the bytes of a task's result: its stage's output, or the gradient of its stage's input."""
        return self.sent[result.stage if result.kind is _F else result.stage - 1]


@dataclass(frozen=True, slots=True)
class Link:
    """A link from one rank to another: a transfer takes ``latency + bytes / bandwidth``.

    >>> Link(latency=1e-5, bandwidth=50e9).time(1e9)
    0.02001
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and math.isfinite(self.latency) and self.bandwidth > 0):
            raise ScheduleError(
                f"a link needs latency >= 0 and bandwidth > 0, got latency={self.latency!r} "
                f"and bandwidth={self.bandwidth!r}"
            )

    def time(self, size: float) -> float:
        """Return the time of a transfer of ``size`` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Transfer:
    """The links between ranks: ``default`` for all pairs, ``links`` for other pairs by ``(source, target)``.

    A transfer occupies no rank and, in this model, does not slow another transfer on its link.

    >>> slow = Transfer(Link(0.1), {(1, 2): Link(0.5)})
    >>> slow.time(0, 1, 0.0), slow.time(1, 2, 0.0)
    (0.1, 0.5)
    """

    default: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def time(self, source: int, target: int, size: float) -> float:
        """Return the time of a transfer of ``size`` bytes from rank ``source`` to rank ``target``."""
        return self.links.get((source, target), self.default).time(size)

    @classmethod
    def of(cls, transfer: Transfer | Link | float | None) -> Transfer:
        """Make a `Transfer` from a link for all pairs, from a latency, or from None for instant transfers."""
        if isinstance(transfer, Transfer):
            return transfer
        if isinstance(transfer, Link):
            return cls(transfer)
        return cls(Link(0.0 if transfer is None else float(transfer)))
