"""Groups of options of `PipelineTrainer`: each group is a small frozen dataclass that checks its values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Literal, Self, TypeAlias, cast, get_args

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxpp_flax.assignment.resolution import AssignmentLike
from jaxpp_flax.checkpoint.checkpoint_store import KeepPolicy, SavePolicy, check_interval
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.globs import NameFilter
from jaxpp_flax.trainers.assigner import check_cost, check_limit
from jaxpp_flax.trainers.loop.nonfinite import OnNonFinite
from jaxpp_flax.trainers.loop.progress import Meter
from jaxpp_flax.trainers.loop.trackers import Tracker
from jaxpp_flax.trainers.model.frozen import check_frozen
from jaxpp_flax.trainers.model.sharding import AxisRulesLike, MeshAxes, as_pairs
from jaxpp_flax.trainers.setup import check_count, check_functions
from jaxpp_flax.trainers.step.optimizer_update import DynamicLossScale

__all__ = [
    "Assignment",
    "Balanced",
    "Checkpoints",
    "Inference",
    "Logging",
    "MeshOptions",
    "Parameters",
    "Precision",
    "RandomStreams",
]

Directory: TypeAlias = str | os.PathLike[str]


class _Options:
    """Options without a short form: None means the default values."""

    @classmethod
    def of(cls, value: Self | None) -> Self:
        """Convert the trainer's argument."""
        if value is None:
            return cls()
        if not isinstance(value, cls):
            raise _misfit(cls.__name__.lower(), value, f"{cls.__name__}(...)")
        return value


@dataclass(frozen=True)
class Checkpoints:
    """The options of checkpoints, `checkpoints=`: directory, times of saves, number kept. See `docs/checkpointing.md`.

    A directory alone, `checkpoints="run"`, means `Checkpoints("run")`: `save` and `restore` use it, and only `save`
    writes.

    Args:
      directory: the parent of one directory for each step.
      every: steps between two saves in `fit`, which also saves its last step; or an Orbax save decision policy. None:
        `save` alone writes.
      keep: how many of the latest to keep, or an Orbax preservation policy; None keeps all.
      asynchronous: write in the background.
      preemption_deadline: SIGTERM ends `fit` after the current step with a checkpoint, within this many seconds. None
        does not handle the signal.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Checkpoints("run", every=100, keep=3).every
      100
    """

    directory: Directory
    _: KW_ONLY
    every: SavePolicy | None = None
    keep: KeepPolicy | None = None
    asynchronous: bool = True
    preemption_deadline: float | None = 30.0

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)):
            raise _misfit("directory", self.directory, "a path")
        check_interval("every", self.every)
        check_interval("keep", self.keep)
        if self.preemption_deadline is not None and not self.preemption_deadline > 0:
            raise ValueError(f"preemption_deadline={self.preemption_deadline!r}: it must be seconds above 0, or None.")

    @classmethod
    def of(cls, value: Checkpoints | Directory | None) -> Checkpoints | None:
        """Convert the trainer's `checkpoints=`."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, (str, os.PathLike)):
            return cls(value)
        raise _misfit("checkpoints", value, "a directory, or Checkpoints(directory, every=..., keep=...)")


@dataclass(frozen=True, kw_only=True)
class Precision(_Options):
    """The options of number types, loss scale and numbers that are not finite: `precision=`.

    Args:
      gradient_dtype: the type in which gradients are summed over the microbatches. None: their own type.
      loss_scale: "dynamic", a `DynamicLossScale` or a number. The loss is multiplied by this scale before
        differentiation, and a step with a gradient that is not finite is skipped.
      on_nonfinite: "stop" raises two steps after a loss that is not finite, and before anything is saved. "skip" skips
        a step whose loss or gradients are not finite. "ignore" goes on. "stop" and "skip" check the parameters before
        each save to the directory of `checkpoints=`. None: "stop", or "skip" with a loss scale.

    Raises:
      ValueError: naming the field that does not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> Precision(gradient_dtype=jnp.float32, loss_scale="dynamic").loss_scale
      'dynamic'
    """

    gradient_dtype: DTypeLike | None = None
    loss_scale: Literal["dynamic"] | DynamicLossScale | float | None = None
    on_nonfinite: OnNonFinite | None = None

    def __post_init__(self) -> None:
        if self.on_nonfinite is not None and self.on_nonfinite not in get_args(OnNonFinite):
            raise ValueError(f'on_nonfinite={self.on_nonfinite!r}: it must be "stop", "skip" or "ignore".')
        if self.loss_scale is not None and self.on_nonfinite in ("stop", "ignore"):
            raise ValueError(
                f"on_nonfinite={self.on_nonfinite!r} and loss_scale={self.loss_scale!r}: a step whose scaled gradients "
                'overflow is skipped, and the scale adapts by that. Leave on_nonfinite out, or set it to "skip".'
            )
        number = isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool) and 0 < self.scale < math.inf
        if not (number or self.scale is None or isinstance(self.scale, DynamicLossScale)):
            raise ValueError(
                f"loss_scale={self.loss_scale!r}: use None, 'dynamic', DynamicLossScale(...) or a number above 0."
            )
        if self.gradient_dtype is not None and not jnp.issubdtype(self.gradient_dtype, jnp.floating):
            raise ValueError(f"gradient_dtype={self.gradient_dtype!r} is no floating point type. Use e.g. jnp.float32.")

    @property
    def scale(self) -> DynamicLossScale | float | None:
        """The loss scale: "dynamic" is `DynamicLossScale()`."""
        return (
            DynamicLossScale() if isinstance(self.loss_scale, str) and self.loss_scale == "dynamic" else self.loss_scale
        )

    @property
    def rule(self) -> OnNonFinite:
        """`on_nonfinite`, or its default value: "stop", but "skip" with a loss scale, which skips steps anyway."""
        return self.on_nonfinite or ("stop" if self.loss_scale is None else "skip")


@dataclass(frozen=True)
class Assignment:
    """The options of the assignment of blocks to stages, `assignment=`: policy, costs of blocks, memory limit.

    A value of `how` alone, such as `assignment="even"`, means `Assignment("even")`. See `docs/assignment.md`.

    Args:
      how: "even", "balanced", sizes such as `[3, 2, 3]`, a mapping of names (globs) to stages, a `Plan` or its JSON
        file, or a policy.
      cost: the costs of the blocks, for "balanced" and for the table of the assignment: "estimated" from operations and
        bytes, "flops", "measured" (each block compiled alone and timed), numbers, or a mapping from names to numbers.
        None: "estimated" with "balanced", else no costs.
      memory_limit: bytes that each device may hold (one number, or one for each rank): parameters, gradients,
        optimizer state, and activations in flight. "balanced" keeps the limit; an assignment beyond the limit is
        refused.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Assignment([3, 2, 3], memory_limit=16e9).memory_limit
      16000000000.0
    """

    how: AssignmentLike = "even"
    _: KW_ONLY
    cost: str | Sequence[float] | Mapping[str, float] | None = None
    memory_limit: float | Sequence[float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.how, Assignment):
            raise TypeError(f"Assignment({self.how!r}) holds another assignment. Pass that one alone.")
        if self.cost is not None:
            check_cost(self.cost)
        check_limit(self.memory_limit)

    @classmethod
    def of(cls, value: Assignment | AssignmentLike) -> Assignment:
        """Convert the trainer's `assignment=`."""
        return value if isinstance(value, Assignment) else Assignment(value)


@dataclass(frozen=True)
class Balanced(Assignment):
    """A balanced assignment: short for `Assignment("balanced", cost=..., memory_limit=...)`.

    Example:
      >>> Balanced(cost="measured", memory_limit=16e9).how
      'balanced'
    """

    how: AssignmentLike = field(default="balanced", init=False)


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of devices and of shardings inside a stage: `mesh=`.

    A mesh alone, `mesh=mesh`, means `MeshOptions(mesh=mesh)`; a mapping alone, `mesh={"data": 2}`, means
    `MeshOptions(axes={"data": 2})`.

    Args:
      mesh: a `jax.sharding.Mesh` with an axis "stage", or an `MpmdMesh`. None: a mesh over `jax.devices()`.
      axes: other axes of the mesh over `jax.devices()`, e.g. `{"data": 2}`; -1 takes the remaining devices. Each
        microbatch is divided along "data" and "fsdp".
      num_ranks: the number of groups of devices, for schedules with several stages on each group. Default: the number
        of stages.
      sharding_rules: pairs (name, mesh axis or None) for the axis names in the annotations of the model's parameters.
        These rules come before the rules of Flax's `logical_axis_rules` that are active where the trainer is made.

    Raises:
      ValueError: if both a mesh and axes are given.
      TypeError: if the rules are not pairs.

    Example:
      >>> MeshOptions(axes={"data": 2}, num_ranks=2).axes
      {'data': 2}
    """

    mesh: Mesh | MpmdMesh | None = None
    axes: Mapping[str, int] | None = None
    num_ranks: int | None = None
    sharding_rules: AxisRulesLike | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None and self.axes is not None:
            raise ValueError("both mesh= and axes= are given; a mesh already says which axes it has.")
        _ = self.rules

    @cached_property
    def rules(self) -> tuple[tuple[str, MeshAxes], ...]:
        """`sharding_rules` as pairs."""
        return as_pairs(self.sharding_rules)

    @classmethod
    def of(cls, value: MeshOptions | Mesh | MpmdMesh | Mapping[str, int] | None) -> MeshOptions:
        """Convert the trainer's `mesh=`."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls(axes=value)
        if value is None or isinstance(value, (Mesh, MpmdMesh)):
            return cls(mesh=value)
        raise _misfit("mesh", value, "a jax.sharding.Mesh, an MpmdMesh, a mapping of axes, or MeshOptions(...)")


@dataclass(frozen=True, kw_only=True)
class Parameters(_Options):
    """The options of trained parameters and of their moving average: `parameters=`.

    Args:
      wrt: filter of the NNX variables to train; the other variables are not changed.
      frozen: parameters that are not changed: globs on their paths ("embed/*"), or a function of the path.
      ema_decay: keeps a moving average of the trained parameters: `ema_model`.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Parameters(frozen=["embed/*", "blocks/[01]"], ema_decay=0.999).ema_decay
      0.999
    """

    wrt: nnx.filterlib.Filter = nnx.Param
    frozen: NameFilter | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        if self.frozen is not None:
            check_frozen(self.frozen)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay={self.ema_decay!r}: it must lie between 0 and 1, e.g. 0.999, or be None.")


@dataclass(frozen=True)
class RandomStreams:
    """The seed of the trainer's random numbers, and the names of a Linen model's streams: `seed=`.

    A number alone, `seed=7`, means `RandomStreams(7)`.

    Args:
      seed: the seed of a Linen model's random numbers, and of the `rngs` of a loss (the streams of an NNX model have
        their own seeds).
      names: the names of a Linen model's random streams.

    Raises:
      TypeError: naming the field that does not fit.

    Example:
      >>> RandomStreams(7, names=("dropout", "noise")).names
      ('dropout', 'noise')
    """

    seed: int = 0
    _: KW_ONLY
    names: Sequence[str] = ("dropout",)

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, (int, np.integer)):
            raise _misfit("seed", self.seed, "a whole number")
        if isinstance(self.names, str) or not all(isinstance(name, str) for name in self.names):
            raise _misfit("names", self.names, "a sequence of names, such as ('dropout',)")

    @classmethod
    def of(cls, value: RandomStreams | int) -> RandomStreams:
        """Convert the trainer's `seed=`."""
        return value if isinstance(value, cls) else cls(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Inference(_Options):
    """The functions of `evaluate` and `predict`: `inference=`.

    Args:
      eval_loss_fn: for `evaluate`; by default the trainer's `loss_fn`, with an NNX model in `eval()` mode.
      predict_fn: `(model, microbatch) -> outputs` for `predict`; by default `model(microbatch)`, with `training=False`
        or `deterministic=True` where the model's `__call__` has such a boolean argument.

    Raises:
      TypeError: if one of them is not a function of a model and a batch.

    Example:
      >>> Inference(predict_fn=lambda model, batch: model(batch["x"])).eval_loss_fn is None
      True
    """

    eval_loss_fn: Callable[..., Any] | None = None
    predict_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        check_functions(eval_loss_fn=self.eval_loss_fn, predict_fn=self.predict_fn)


@dataclass(frozen=True, kw_only=True)
class Logging(_Options):
    """The options of metrics and of the progress display: `logging=`.

    A boolean alone means `Logging(progress=...)`: `logging=False` shows nothing.

    Args:
      tracker: gets the metrics.
      every: steps between two rows of metrics.
      progress: True for a bar on a terminal and lines elsewhere, False for nothing, or a `Meter`.

    Raises:
      TypeError, ValueError: naming the field that does not fit.

    Example:
      >>> Logging(every=100, progress=False).every
      100
    """

    tracker: Tracker | None = None
    every: int = 10
    progress: bool | Meter = True

    def __post_init__(self) -> None:
        check_count("every", self.every)
        if not isinstance(self.progress, (bool, Meter)):
            kind = type(self.progress).__name__
            raise TypeError(f"progress={self.progress!r} ({kind}): it must be True, False or a Meter.")

    @classmethod
    def of(cls, value: Logging | bool | None) -> Logging:
        """Convert the trainer's `logging=`."""
        return cls(progress=value) if isinstance(value, bool) else super().of(cast(Any, value))


def _misfit(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {type(value).__name__}: {value!r}.")
