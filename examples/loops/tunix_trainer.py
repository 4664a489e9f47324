"""tunix's step-level trainer over a `PipelineTrainer`: tunix owns the loop, and the model is a pipeline.

tunix (in its repository since summer 2026, not yet in google-tunix 0.1.7) asks of a trainer what its class
`AbstractTrainer` names: `with_loss_fn`, `fwd_bwd`, `update`, ... Copy this file beside your program:

    trainer = PipelinedTrainer(PipelinedConfig(
        model=model, tx=optax.adamw(1e-5), options={"num_stages": 4, "num_microbatches": 8, "checkpoints": "run"},
    ))
    trainer.with_loss_fn(loss_fn, has_aux=True).with_gen_model_input_fn(lambda payload: {"tokens": payload.token_ids})
    worker = TrainerWorker(lambda: trainer)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optax
from flax import nnx
from tunix.experimental.metrics.metrics import MetricsBuffer  # pyright: ignore[reportMissingImports]
from tunix.experimental.train.abstract_trainer import AbstractTrainer  # pyright: ignore[reportMissingImports]

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.checkpoint import CheckpointNotFoundError
from jaxpp_flax.trainers import with_aux


@dataclass(kw_only=True)
class PipelinedConfig:
    """The arguments of a `PipelineTrainer` but the loss, and what sends weights to samplers.

    Args:
      model, tx, options: as in `PipelineTrainer`; `options` has its keyword arguments.
      send_weights: takes an `nnx.State` of all weights, and returns what samplers need to take them; None returns the
        weights themselves, as arrays on one device.
    """

    model: nnx.Module | Callable[..., nnx.Module]
    tx: optax.GradientTransformation
    options: Mapping[str, Any] = field(default_factory=dict)
    send_weights: Callable[[Any], Any] = lambda weights: weights


class PipelinedTrainer(AbstractTrainer):
    """See the file."""

    trainer: PipelineTrainer

    def __init__(self, config: PipelinedConfig):
        self.config, self._metrics = config, None
        self._inputs: Callable[[Any], dict[str, Any]] = lambda payload: payload

    def with_loss_fn(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> PipelinedTrainer:
        """Make a trainer for the loss; it goes on from the state of the trainer before."""
        before = getattr(self, "trainer", None)
        if before is not None and before.pending is not None:
            raise RuntimeError(f"with_loss_fn would drop {before.pending}: call update() first.")
        loss = _loss_of(loss_fn, has_aux=has_aux)
        self.trainer = PipelineTrainer(self.config.model, self.config.tx, loss, **self.config.options)
        if before is not None:
            self.trainer.set_state(before.state)
        return self

    def with_gen_model_input_fn(self, gen_model_input_fn: Callable[[Any], dict[str, Any]]) -> PipelinedTrainer:
        """Set what makes the arguments of the loss out of a payload; it runs on the host, before the step."""
        self._inputs = gen_model_input_fn
        return self

    def compile(self, dummy_data: Any) -> None:
        """Do nothing: the first `fwd_bwd` compiles, as with tunix's own trainer."""

    def fwd_bwd(self, payload: Any, **_: Any) -> None:
        """Sum the gradients of a payload on the stages' devices."""
        self.trainer.accumulate(self._batch(payload))

    def update(self, **_: Any) -> int:
        """Take one step with the mean gradients; return the number of steps."""
        metrics = self.trainer.update()
        self._metrics = MetricsBuffer(id=self.trainer.step, scalar_metrics=metrics)
        return self.trainer.step

    def eval_step(self, payload: Any, **_: Any) -> None:
        """Evaluate one payload."""
        metrics = self.trainer.evaluate([self._batch(payload)])
        self._metrics = MetricsBuffer(id=self.trainer.step, scalar_metrics=metrics, mode="eval")

    def save_checkpoint(self, metadata: Any = None, **_: Any) -> None:
        """Save the state, and the metadata beside it; gradients of `fwd_bwd` are not saved."""
        path = self._metadata_of(self.trainer.save())
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(metadata))

    def restore_checkpoint(self, **_: Any) -> Any:
        """Restore the latest checkpoint and return its metadata; `{}` without a checkpoint."""
        self.trainer.zero_grad()
        try:
            self.trainer.restore()
        except CheckpointNotFoundError:
            return {}
        return json.loads(self._metadata_of(Path(self._directory) / str(self.trainer.step)).read_text())

    def prepare_weight_sync(self, **_: Any) -> Any:
        """Hand the weights to `send_weights`."""
        return self.config.send_weights(nnx.state(self.trainer.gather_model(), nnx.Param))

    def get_metrics(self) -> MetricsBuffer:
        """Return the metrics of the last step or evaluation, once."""
        metrics, self._metrics = self._metrics, None
        return MetricsBuffer(id=-1) if metrics is None else metrics

    def close(self) -> None:
        """Drop what waits for an update."""
        self.trainer.zero_grad()

    @property
    def _directory(self) -> str:
        checkpoints = self.config.options["checkpoints"]
        return getattr(checkpoints, "directory", checkpoints)

    def _metadata_of(self, checkpoint: Path) -> Path:
        return checkpoint.parent.with_name(f"{checkpoint.parent.name}_metadata") / f"{checkpoint.name}.json"

    def _batch(self, payload: Any) -> dict[str, Any]:
        return {name: value for name, value in self._inputs(payload).items() if value is not None}


def _loss_of(loss_fn: Callable[..., Any], *, has_aux: bool) -> Callable[[Any, Any], Any]:
    """Return a loss of tunix's form as one of ours: a weighted loss is a pair of its sum and its weight."""

    def value(metric: Any) -> Any:
        return (metric.unreduced_sum, metric.denominator) if hasattr(metric, "unreduced_sum") else metric

    def loss(model: nnx.Module, batch: dict[str, Any]) -> Any:
        output = loss_fn(model, **batch)
        if hasattr(output, "primary_loss"):
            output, aux = value(output.primary_loss), output.aux_metrics
        else:
            output, aux = output if has_aux else (output, {})
        if isinstance(aux, Mapping):
            return output, {name: value(metric) for name, metric in aux.items()}
        return with_aux(lambda: (output, aux))()

    return loss
