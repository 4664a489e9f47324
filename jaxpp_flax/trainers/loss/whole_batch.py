"""Losses that compare the examples of the whole batch: one part in the pipeline, one between two passes over it.

The first pass computes the embeddings of every microbatch, without a backward. Then the loss of the whole batch and its
gradient with respect to each embedding are computed at once. The second pass runs each microbatch forward again, and
backward from these gradients. Both passes have the same parameters, state and random keys, so the sum over the
microbatches is the gradient of the whole batch: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup" (GradCache), 2021, https://arxiv.org/abs/2101.06983.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.tracing.hints import place_with
from jaxpp_flax.engine.tracing.ir import from_jaxpr
from jaxpp_flax.engine.tracing.treduce import Concat, Last
from jaxpp_flax.messages import warn_user
from jaxpp_flax.trainers.errors import LossError, MicrobatchLossWarning
from jaxpp_flax.trainers.loss.loss_graph import used_inputs
from jaxpp_flax.trainers.loss.loss_rule import LossTerms, read_loss
from jaxpp_flax.trainers.loss.loss_trace import trace_loss
from jaxpp_flax.trainers.model.adapter import ModelAdapter
from jaxpp_flax.trainers.model.calling import call_function, check_function
from jaxpp_flax.trainers.state.train_state import TrainState

__all__ = ["WholeBatchLoss"]


@dataclass(frozen=True)
class WholeBatchLoss:
    """A loss in two parts that sees the whole batch: for contrastive losses, which compare examples with one another.

    The step computes the loss and the gradients of `loss_fn(embed_fn(model, batch), batch)` for the whole batch. Pass
    an instance as the `loss_fn` of a `PipelineTrainer`, or as `Inference(eval_loss_fn=)`. A step runs the model forward
    twice. Between the two passes it keeps only the embeddings and their gradients, on the rank that holds the last
    embedding.

    Args:
      embed_fn: `embed_fn(model, microbatch)`, called in the pipeline for each microbatch. Like a loss function, it may
        have the parameters `training` and `rngs`. It returns a pytree of arrays of shape (microbatch, ...), and of
        scalars that are equal in every microbatch, such as a learned temperature.
      loss_fn: `loss_fn(embeddings, batch)`, called once for the whole batch, with embeddings of shape (batch, ...) and
        the same scalars. It returns what a loss function returns: a loss, `(loss_sum, weight)`, or either with a dict
        of metrics. It cannot read the model's parameters: if it needs one, let `embed_fn` return it.

    Raises:
      TypeError: if a part is not a function of two arguments.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import nnx
      >>> from jaxpp_flax import PipelineStage, PipelineTrainer, WholeBatchLoss
      >>> class TwoTowers(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.image = PipelineStage(nnx.Linear(6, 4, rngs=rngs))
      ...         self.text = nnx.Linear(3, 4, rngs=rngs)
      ...         self.log_scale = nnx.Param(jnp.float32(1.0))
      >>> def embed_fn(model, batch):
      ...     return model.image(batch["image"]), model.text(batch["text"]), model.log_scale[...]
      >>> def loss_fn(embeddings, batch):
      ...     image, text, log_scale = embeddings
      ...     logits = jnp.exp(log_scale) * image @ text.T  # (batch, batch)
      ...     return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))).mean()
      >>> model, loss = TwoTowers(nnx.Rngs(0)), WholeBatchLoss(embed_fn, loss_fn)
      >>> trainer = PipelineTrainer(model, optax.sgd(0.1), loss, num_stages=2, num_microbatches=4, logging=False)
      >>> batch = {"image": jax.random.normal(jax.random.key(0), (8, 6)), "text": jnp.eye(8, 3)}
      >>> bool(jnp.allclose(trainer.train_step(batch)["loss"], loss(model, batch), rtol=1e-5))
      True
    """

    embed_fn: Callable[..., Any]
    loss_fn: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        advice = "Give it two arguments. A parameter of the model that loss_fn needs is returned by embed_fn."
        check_function("embed_fn", self.embed_fn, "(model, microbatch)", advice)
        check_function("loss_fn", self.loss_fn, "(embeddings, batch)", advice)
        object.__setattr__(self, "__wrapped__", self.embed_fn)  # the arguments that a call may ask for by name

    def __call__(self, model: Any, batch: Any, **asked: Any) -> Any:
        """Return the loss of `batch` at once, without a pipeline."""
        seen = (self.embed_fn(model, batch, **asked), batch)
        return self.loss_fn(*jax.tree.map(lambda leaf: _gathered(leaf, 1), seen))


Embed = Callable[[Any, Any, Any], tuple[Any, Any]]
"""Takes the carry, the index of the microbatch and the microbatch; returns the next carry and the embeddings."""


def embedding_operations(embed: Embed, carry: Any, batch: Any) -> Any:
    """Return how the embeddings of the microbatches become those of the batch: one operation for each leaf.

    Raises:
      LossError: for a leaf that has neither the axis of the examples nor one value for all microbatches.
    """
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
    size = next(leaf.shape[0] for leaf in jax.tree.leaves(microbatch) if leaf.shape)
    varying = (carry, jax.ShapeDtypeStruct((), jnp.int32), microbatch)
    jaxpr, shapes = jax.make_jaxpr(lambda *xs: embed(*xs)[1], return_shape=True)(*varying)
    graph, consts = from_jaxpr(jaxpr)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    if not leaves:
        raise LossError(f"embed_fn returned no array: {shapes!r}. Return the embeddings of the microbatch.")
    for number, (path, leaf) in enumerate(leaves):
        name = f"embed_fn returned{f' {jax.tree_util.keystr(path)}' if path else ''}"
        if leaf.shape and leaf.shape[0] != size:
            raise LossError(
                f"{name} with shape {leaf.shape} for a microbatch of {size} examples. Give each embedding the axis of "
                f"the examples first, ({size}, ...); only a scalar, such as a learned temperature, has none."
            )
        if not leaf.shape:
            wanted = [number == other for other in range(len(leaves))]
            if any(used_inputs(graph, wanted)[len(consts) :]):
                raise LossError(
                    f"{name}, a scalar that is not the same in every microbatch: it depends on the examples, or on "
                    "random numbers or state that the model writes. A scalar is for parameters, such as a learned "
                    f"temperature. Return one value for each example, shape ({size},), and reduce these in loss_fn."
                )
    return jax.tree.map(lambda leaf: Concat() if leaf.shape else Last, shapes)


def loss_of_all(loss: WholeBatchLoss, stacked: Any, batch: Any) -> LossTerms:
    """Return the terms of the whole batch; `stacked` are its embeddings, and both are stacked by microbatch."""
    embeddings, whole = _on_one_rank(stacked, batch)
    return read_loss(loss.loss_fn(embeddings, whole))


def loss_and_cotangents(
    loss: WholeBatchLoss, stacked: Any, batch: Any, scaled: Callable[[LossTerms], Any]
) -> tuple[LossTerms, list[Any]]:
    """Return the terms as `loss_of_all`, and the gradients of the scaled loss, stacked by microbatch.

    There is a gradient for each leaf of the embeddings that can have one: integers have none.
    """
    embeddings, whole = _on_one_rank(stacked, batch)
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]

    def loss_of(embeddings: Any) -> tuple[Any, LossTerms]:
        terms = read_loss(loss.loss_fn(embeddings, whole))
        return scaled(terms), terms

    (_, terms), gradients = jax.value_and_grad(loss_of, has_aux=True, allow_int=True)(embeddings)

    def divided(gradient: Any, like: Any) -> Any:
        if not like.ndim:  # each microbatch adds its share
            return jnp.broadcast_to(gradient / num_microbatches, (num_microbatches,))
        sharding, gradient = _typed_sharding(like), gradient.reshape(like.shape)
        return gradient if sharding is None else jax.sharding.reshard(gradient, sharding)

    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(stacked), strict=True)
    cotangents = [divided(gradient, like) for gradient, like in pairs if _has_gradient(like)]
    # Metrics are computed before the second pass begins: later, all that they need would wait in memory.
    return jax.lax.optimization_barrier((terms, cotangents))


def _on_one_rank(stacked: Any, batch: Any) -> tuple[Any, Any]:
    """Return the embeddings and the batch without the axis of the microbatches, on the rank of the last embedding."""
    leaves = jax.tree.leaves(stacked)
    stacked, batch = place_with((stacked, batch), [leaf for leaf in leaves if leaf.ndim][-1:] or leaves)
    embeddings = jax.tree.map(lambda x: _joined(x) if x.ndim else x, stacked)
    return embeddings, jax.tree.map(lambda x: _joined(x) if x.ndim > 1 else x[0], batch)


def second_pass(loss: WholeBatchLoss) -> Callable[..., Any]:
    """Return the loss function of the second pass, for microbatches `(microbatch, gradients of its embeddings)`.

    Its gradients are those of the whole batch's loss, as far as they flow through this microbatch.
    """

    @functools.wraps(loss.embed_fn)
    def weighed(model: Any, both: tuple[Any, list[Any]], **asked: Any) -> Any:
        microbatch, gradients = both
        embeddings = filter(_has_gradient, map(jnp.asarray, jax.tree.leaves(loss.embed_fn(model, microbatch, **asked))))
        # In JAX's convention also complex gradients are multiplied without conjugation.
        return sum(jnp.sum((e * g).real, dtype=jnp.float32) for e, g in zip(embeddings, gradients, strict=True))

    return weighed


def warn_of_mixing(loss: WholeBatchLoss, model: ModelAdapter, count: int, state: TrainState, microbatch: Any) -> bool:
    """Warn of an `embed_fn` that combines examples: it sees those of one of `count` microbatches; return whether."""

    def embed(params: Any, rest: Any, step: Any, batch: Any) -> Any:
        return call_function(loss.embed_fn, model, params, rest, batch, step=step, microbatch=0, training=True)[0]

    shapes = jax.eval_shape(embed, state.params, state.model_state, state.step, microbatch)
    gradients = [leaf for leaf in jax.tree.leaves(shapes) if _has_gradient(leaf)]
    size = next(leaf.shape[0] for leaf in jax.tree.leaves(microbatch) if leaf.shape)
    if any(leaf.shape and leaf.shape[0] != size for leaf in gradients):
        return False  # these are refused: see `embedding_operations`
    # An embedding times a gradient for each example is a sum over examples, unless it reads other examples too.
    found = trace_loss(model, second_pass(loss), state, (microbatch, gradients))
    mixes = not found.batch_statistics and bool(found.mixed or found.divided)
    if mixes:
        warn_user(
            f"embed_fn combines the examples of a microbatch. It sees one of {count} microbatches, so the loss and "
            "its gradients are not those of the whole batch. Combine examples in loss_fn, which gets the embeddings of "
            "the whole batch. If you intend this, ignore the category jaxpp_flax.trainers.MicrobatchLossWarning.",
            MicrobatchLossWarning,
        )
    return mixes


def summed(terms: LossTerms, num_microbatches: int) -> LossTerms:
    """Return terms of the whole batch as sums over its microbatches.

    Example:
      >>> summed(LossTerms(total=1.5, weight=None, metrics={"hits": (2.0, 8.0)}), 4)
      LossTerms(total=6.0, weight=None, metrics={'hits': (2.0, 8.0)})
    """
    total = terms.total if terms.weight is not None else terms.total * num_microbatches
    metrics = {name: v if isinstance(v, tuple) else v * num_microbatches for name, v in terms.metrics.items()}
    return LossTerms(total=total, weight=terms.weight, metrics=metrics)


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _joined(leaf: Any) -> Any:
    """Join the microbatches of a leaf of shape (num_microbatches, microbatch, ...)."""
    return _gathered(leaf, 2).reshape(-1, *leaf.shape[2:])


def _gathered(leaf: Any, axes: int) -> Any:
    """Return a leaf whose first axes no type shards: JAX cannot join such axes, nor compare examples along them."""
    if not np.ndim(leaf) or (sharding := _typed_sharding(leaf)) is None:
        return leaf
    spec = (*sharding.spec, *[None] * leaf.ndim)[axes : leaf.ndim]
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec(*[None] * axes, *spec)))


def _typed_sharding(leaf: Any) -> Any:
    """Return the sharding in the type of `leaf`, on an Explicit mesh; None elsewhere."""
    sharding = jax.typeof(leaf).sharding
    return None if sharding.mesh.empty or not sharding.mesh.explicit_axes else sharding
