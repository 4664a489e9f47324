"""The trainer's part of inference: `evaluate` and `predict`, pipelined like a step, without a backward."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxpp_flax._compat_texts.errors import is_uneven_split
from jaxpp_flax.counts import check_count
from jaxpp_flax.engine.arrays.ambient_mesh import without_ambient_mesh
from jaxpp_flax.engine.tracing.bodies.microbatches import Microbatches
from jaxpp_flax.trainers.data.batch import InferencePart, batch_size, join_parts, resized, signature
from jaxpp_flax.trainers.data.batch_comparison import BatchComparison
from jaxpp_flax.trainers.data.batch_sharding import InferenceKind, compared_rows, one_by_one
from jaxpp_flax.trainers.data.evaluation_sets import evaluation_sets
from jaxpp_flax.trainers.data.global_arrays import is_global
from jaxpp_flax.trainers.data.padding import Form, form_for
from jaxpp_flax.trainers.data.stream import awaited
from jaxpp_flax.trainers.errors import BatchError
from jaxpp_flax.trainers.loss.loss_rule import LossTerms
from jaxpp_flax.trainers.loss.whole_batch import WholeBatchLoss
from jaxpp_flax.trainers.metrics.clock import timed
from jaxpp_flax.trainers.model.calling import call_model
from jaxpp_flax.trainers.state.train_state import TrainState
from jaxpp_flax.trainers.step.microbatch_loop import ForwardOnly, MicrobatchLoop
from jaxpp_flax.trainers.weights import WeightCalls

__all__ = ["Average", "InferenceCalls"]


class Average:
    """Adds up batches on the host, in float64; each batch counts by its weight, or by its number of examples.

    Example:
      >>> average = Average()
      >>> average.add(LossTerms(total=4.0, weight=None, metrics={}), num_microbatches=2, num_examples=8)
      >>> average.add(LossTerms(total=1.0, weight=None, metrics={}), num_microbatches=1, num_examples=4)
      >>> average.result()["loss"] == (2.0 * 8 + 1.0 * 4) / 12
      True
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, Any] = defaultdict(float)
        self._weights: defaultdict[str, Any] = defaultdict(float)

    def add(self, terms: LossTerms, num_microbatches: float, num_examples: int) -> None:
        """Add a batch's terms, summed over its microbatches, or over shares of them."""
        loss = terms.total if terms.weight is None else (terms.total, terms.weight)
        for name, value in {"loss": loss, **terms.metrics}.items():
            if isinstance(value, tuple):
                total, weight = (np.asarray(part, np.float64) for part in value)
            else:
                total = np.asarray(value, np.float64) / num_microbatches * num_examples
                weight = np.float64(num_examples)
            if name in self._sums and np.shape(self._sums[name]) != total.shape:
                raise ValueError(
                    f"the metric {name!r} has the shape {list(total.shape)} in one microbatch of the evaluation, and "
                    f"{list(np.shape(self._sums[name]))} in another one: a value for each example? A metric of an "
                    "evaluation is a mean over the examples, or a pair (sum, weight); `predict` returns values of "
                    "examples."
                )
            self._sums[name] = self._sums[name] + total
            self._weights[name] = self._weights[name] + weight

    def result(self) -> dict[str, Any]:
        """Return the averages: floats, or NumPy arrays; a metric is NaN where nothing has weight.

        Raises:
          ValueError: if no example has weight in the loss.
        """
        if np.all(self._weights["loss"] == 0):
            raise ValueError(
                "every example of the evaluation has weight 0, so the mean loss is not defined. Check the mask of the "
                "data, and the weight that the loss returns."
            )
        means: dict[str, Any] = {}
        for name, total in self._sums.items():
            weight = self._weights[name]
            mean = np.asarray(np.where(weight == 0, np.nan, total / np.where(weight == 0, 1.0, weight)))
            means[name] = float(mean) if mean.ndim == 0 else mean
        return means


class InferenceCalls(WeightCalls):
    """The methods of `PipelineTrainer` that do not change the state; batches are loaded as in training."""

    @timed("evaluation")
    def evaluate(
        self,
        data: Iterable[Any] | Mapping[str, Iterable[Any]],
        *,
        steps: int | None = None,
        global_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Compute the mean loss and metrics over all examples of `data`, pipelined; the state does not change.

        The weights are those of `Inference(params=)`. NNX modules run in `eval()` mode. For Linen, `model.training` is
        False. A loss with a parameter `training` gets False.

        Batches may have any sizes; of `Microbatches`, each is a batch of its own.
        Smaller ones than the largest so far run its program: examples fill it up by
        repetition, and each counts once, so the mean is exact. This needs a loss and metrics that are surely means, or
        pairs `(sum, weight)`, of single examples. If a trace does not show that (`exp` of the mean, a loss that
        compares examples), each size is compiled, and cut into at most `num_microbatches` parts; if the data-parallel
        devices of a stage cannot divide the last examples evenly, each device computes all of these.

        Args:
          data: an iterable of batches; for one batch, `[batch]`. Or a mapping of names to such sets.
          steps: the most batches to draw of each set; None draws all.
          global_batch_size: as in `fit`: the number of examples in a batch; each process passes only the examples that
            it reads, `rows_read(batch, "evaluate")`.

        Returns:
          Metrics as floats, at least `loss`; of several sets, `<set>/loss` and so on. `fit` returns and logs the same
          metrics with the prefix `eval_`: `eval_loss`, `eval_<set>/loss`.

        Raises:
          BatchError: if a batch cannot be cut, or lacks the rows that this process reads.
          TypeError: if `data` is one batch, or an array.
          ValueError: if a set has no batch, or no example with weight in the loss; if a name has a slash.
        """
        self._check_ready("evaluate")
        sets, steps = evaluation_sets("data", data), None if steps is None else check_count("steps", steps)
        self.held.meet("trainer.evaluate")
        found: dict[str, Any] = {}
        for name, batches in sets.items():
            means = self._means(batches, steps, global_batch_size, "data" if name is None else f"data[{name!r}]")
            found |= means if name is None else {f"{name}/{metric}": value for metric, value in means.items()}
        return found

    def _means(
        self, data: Iterable[Any], steps: int | None, global_batch_size: int | None, name: str
    ) -> dict[str, Any]:
        """Return the means over one set of data."""
        average, pending, alike = Average(), None, BatchComparison(self.mesh, "evaluation")
        state_for, forms = self._state_for_step(), dict[Any, Form]()
        drawn = itertools.islice(data, steps)
        for batch in awaited(drawn, "the next batch to evaluate"):  # the data see the mesh of the caller
            batches = [(batch, global_batch_size)]
            if isinstance(batch, Microbatches):
                whole = self.steps.rows.whole(batch, global_batch_size)
                alike.shapes(whole, by_rows=whole is not batch)
                batches = one_by_one(batch, whole)
            evaluated = functools.partial(self._evaluated, state_for=state_for, alike=alike, forms=forms)
            for terms, part in itertools.chain.from_iterable(itertools.starmap(evaluated, batches)):
                if pending is not None:
                    average.add(*pending)
                count = part.num_microbatches if part.shares is None else part.shares.sum(dtype=np.float64)
                pending = (terms, count, part.num_examples)
        if pending is None:
            raise ValueError(f"evaluate got {name} (a {type(data).__name__}) without a single batch.")
        average.add(*pending)
        alike.end()
        return average.result()

    @without_ambient_mesh
    def _evaluated(
        self,
        batch: Any,
        global_batch_size: int | None,
        state_for: Callable[[], TrainState],
        alike: BatchComparison,
        forms: dict[Any, Form],
    ) -> list[tuple[LossTerms, InferencePart]]:
        """Return the terms of each part of a batch, without waiting for them."""
        whole = self.steps.rows.whole(batch, global_batch_size)
        own = batch if whole is not batch else None
        parts = None if own is not None else self._padded(whole, forms)
        if parts is None:
            together = isinstance(self._eval_loss_fn, WholeBatchLoss)
            parts = self.steps.rows.inference_parts(whole, rows_only=own is not None, together=together)
        found = list[tuple[LossTerms, InferencePart]]()
        for part in parts:
            compiled, taken = self._ready("evaluate", part, own, alike)
            shares = np.ones(part.num_microbatches, np.float32) if part.shares is None else part.shares
            found.append((compiled(state_for(), taken, shares), part))
        return found

    def _padded(self, whole: Any, forms: dict[Any, Form]) -> list[InferencePart] | None:
        """Return the parts of a batch in the form of the largest batch so far, whose program runs them.

        None if a program of its own is due: the batch fills one exactly and none is larger, or examples may not be
        repeated.

        Args:
          forms: the forms so far, by the structure of an example.
        """
        size, shards, count = batch_size(whole), self.steps.rows.batch_shards, self.num_microbatches
        if not size:
            return None  # `inference_parts` refuses it
        key = signature(resized(whole, 1))
        form = forms.get(key)
        if form is None or size > form.size:
            fits = size % (count * shards) == 0
            form = Form(count, size // count) if fits else form_for(size, count, shards)
        if size != form.size or form.num_microbatches != count:
            if not self._may_repeat(whole, form):
                return None
            forms[key] = form
            return self.steps.rows.padded_parts(whole, form)
        forms[key] = form
        return None

    def _may_repeat(self, whole: Any, form: Form) -> bool:
        """Return whether a mean stays the same if examples of a batch are repeated, and all of them are here."""
        here = not any(map(is_global, jax.tree.leaves(whole)))
        one = resized(whole, form.microbatch)
        return here and self.steps.builders.is_separable(self._eval_loss_fn, self.held.memory, one)

    @without_ambient_mesh
    def predict(self, batch: Any, *, global_batch_size: int | None = None) -> Any:
        """Compute the model's outputs for a batch of any size, pipelined: `jax.Array`s of shape (batch, ...).

        If the model returns a scalar for a microbatch, the result is an array with one value for each microbatch.

        Args:
          batch: the input of the model, or of `predict_fn`: leaves of shape (batch, ...).
          global_batch_size: as in `fit`: the number of examples in the whole batch; this process passes only the
            examples that it reads, `rows_read(batch, "predict")`. Every process gets the outputs of the whole batch.

        Raises:
          TypeError: if the batch is a dict and there is no `predict_fn` to select the model's input.
          BatchError: if the batch cannot be cut, or lacks the rows that this process reads.
        """
        self._check_ready("predict")
        if isinstance(batch, Mapping) and self.inference.predict_fn is None and not jax.tree_util.all_leaves([batch]):
            raise TypeError(
                f"predict got a dict with {', '.join(map(repr, batch))}, but not which of these the model takes. "
                "Pass the model's input, or give the trainer a predict_fn: "
                "inference=Inference(predict_fn=lambda model, batch: model(batch['x']))."
            )
        whole = self.steps.rows.whole(batch, global_batch_size)
        own = batch if whole is not batch else None
        parts = self.steps.rows.inference_parts(whole, rows_only=own is not None)
        self.held.meet("trainer.predict")
        alike, outputs, state_for = BatchComparison(self.mesh, "prediction"), [], self._state_for_step()
        for part in parts:
            compiled, taken = self._ready("predict", part, own, alike)
            outputs.append(compiled(state_for(), taken))
        return join_parts(outputs)

    @property
    def _eval_loss_fn(self) -> Callable[..., Any]:
        return self.inference.eval_loss_fn or self.steps.builders.untraced.loss_fn

    def _state_for_step(self) -> Callable[[], TrainState]:
        """Return the function that gives a compiled step its state: made once, until another step has moved it."""
        made: TrainState | None = None
        of: weakref.ref[TrainState] | None = None  # the state that the trainer held then

        def state_for() -> TrainState:
            nonlocal made, of
            if made is None or of is None or of() is not self.held.memory:
                made = self._for_inference()  # this places what is not there yet
                of = weakref.ref(self.held.memory)
            return made

        return state_for

    def _ready(self, kind: InferenceKind, part: InferencePart, own: Any, alike: BatchComparison) -> tuple[Any, Any]:
        """Return the compiled step and its microbatches, after comparison; `own` is a batch of rows, or None."""
        if own is None:
            alike.before(part.microbatches)
            return self._compiled(kind, part), part.microbatches
        compiled = self._compiled(kind, part)
        return compiled, compared_rows(compiled, own, part.microbatches, alike)

    @without_ambient_mesh
    def _compiled(self, kind: InferenceKind, part: InferencePart) -> Any:
        """Return the compiled step of this kind for a part of a batch."""
        schedule = self.schedule
        forward = ForwardOnly(schedule) if schedule is not None else None
        loop = MicrobatchLoop(num_microbatches=part.num_microbatches, schedule=forward)

        def build() -> Any:  # called only for a new signature, not for each batch
            if kind == "evaluate":
                return self.steps.builders.for_inference(self._eval_loss_fn).evaluate(loop)
            return self.steps.builders.for_inference().predict(loop, self.inference.predict_fn or call_model)

        shares = jax.ShapeDtypeStruct((part.num_microbatches,), np.float32)
        try:
            more = (shares,) if kind == "evaluate" else ()
            return self.steps.get(kind, part.microbatches, build, donate=False, more=more)
        except ValueError as error:
            if part.is_shared or not is_uneven_split(error):
                raise
            shards = self.steps.rows.batch_shards
            raise BatchError(
                f"{part.num_examples} examples of the batch are left over by the {shards} data-parallel devices "
                "of a stage, so each device computes all of these; but the model itself shards the examples "
                f"({error}). Use a batch of a multiple of {shards} examples."
            ) from error
