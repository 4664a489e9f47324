"""A training step by hand: the gradients of the batch, or of its parts one after another, and then the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.tracing.ir import Graph, everywhere, from_jaxpr, prune, values
from jaxpp_flax.trainers import TrainState, WholeBatchLoss
from jaxpp_flax.verify.reference.begins_anew import begins_anew
from jaxpp_flax.verify.reference.plain_linen import PlainLinen
from jaxpp_flax.verify.reference.plain_loss import Terms, add_up, asked_for, read
from jaxpp_flax.verify.reference.plain_nnx import PlainNnx
from jaxpp_flax.verify.reference.plain_update import PlainUpdate

__all__ = ["LossFacts", "PlainResults", "PlainStep", "PlainPartFailed"]

# The beginnings of the names of primitives that draw random numbers.
_DRAWING = ("random_", "threefry", "rng_")


class PlainPartFailed(RuntimeError):  # noqa: N818
    """A part of a plain step, the loss or the update, has failed with an error."""

    def __init__(self, part: str, error: Exception) -> None:
        super().__init__(f"{part} failed: {error}")
        self.part, self.error = part, error


@contextmanager
def _part(name: str) -> Iterator[None]:
    """Name the part of the step in an error."""
    try:
        yield
    except Exception as error:  # the user's code, which may raise anything
        raise PlainPartFailed(name, error) from error


@dataclass(frozen=True)
class LossFacts:
    """What a trace of the loss and its gradients shows.

    Args:
      graph: both, as equations.
      is_random: they depend on random numbers.
      writes: the call writes untrained variables.
    """

    graph: Graph
    is_random: bool
    writes: bool


@dataclass(frozen=True)
class PlainResults:
    """What a step made; `gradients` are the sums over the parts of the batch, as a pipeline has them."""

    gradients: Any
    metrics: dict[str, Any]
    state: TrainState


@dataclass(frozen=True, eq=False)
class PlainStep:
    """A step of a model, a loss function and an optimizer, as one writes it with Flax and Optax alone.

    Args:
      model: the user's model.
      loss_fn: the user's loss function.
      update: the optimizer and the options of the training.
    """

    model: PlainNnx | PlainLinen
    loss_fn: Callable[..., Any]
    update: PlainUpdate
    _jitted: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self, state: TrainState, seen: tuple[Any, Any], parts: Sequence[Any], count: int, anew: Sequence[int] = ()
    ) -> PlainResults:
        """Return what a step of some parts of a batch makes: the gradients of each part, added up, and the update.

        Args:
          state: the state before the step.
          seen: the parameters and the rest of the model with which the loss is computed: those of the state, or others
            that show how far rounding leads. What the call does not write stays as it is in the state.
          parts: equal parts of the batch; one is the whole batch.
          count: the number of parts of which a pipeline adds up the gradients.
          anew: the untrained leaves that begin in each part with their values before the step.
        """
        before = self.model.computed(*seen)
        first = jax.tree.leaves(before[1])
        carried, sums, terms = before, None, list[Terms]()
        compares_all = isinstance(self.loss_fn, WholeBatchLoss)
        groups = [parts] if compares_all else [[part] for part in parts]
        divisor = None
        if any(self.model.next_by_gradient(seen[1])):  # these keep the sizes of the whole batch's gradients
            with _part("the loss"):
                divisor = self._jit("divisor", self._divisor)(*before, groups, state.step)
        for number, of in enumerate(groups):
            rest = _with_leaves(carried[1], anew, [first[i] for i in anew])
            with _part("the loss"):
                carried, (found, grads, following) = self._jit(
                    f"gradients {anew}", partial(self._gradients, anew=tuple(anew))
                )(before[0], rest, of, state.step, number, self.update.scale(state), divisor)
            terms.append(found)
            sums = (grads, following) if sums is None else self._jit("add", _add)(sums, (grads, following))
        # A sum of means grows with the number of parts, other sums do not.
        is_mean = terms[0].weight is None and not compares_all and divisor is None
        times = jnp.float32(count / len(parts) if is_mean else 1)
        with _part("the update"):
            return PlainResults(*self._jit("finish", self._finish)(state, before, carried, sums, terms, times, divisor))

    def facts(self, state: TrainState, part: Any) -> LossFacts:
        """Trace the loss and its gradients for one part of a batch; nothing is computed."""
        params, rest = jax.eval_shape(self.model.computed, state.params, state.model_state)
        leaves, tree = jax.tree.flatten(rest)

        def run(leaves: Any, params: Any, number: Any, part: Any, step: Any, scale: Any) -> Any:
            rest = jax.tree.unflatten(tree, leaves)
            (written, after), found = self._gradients(params, rest, [part], step, number, scale)
            return jax.tree.leaves(after), found, written

        number = jax.ShapeDtypeStruct((), jnp.int32)
        with _part("the loss"):
            jaxpr = jax.make_jaxpr(run)(leaves, params, number, part, state.step, self.update.scale(state))
        graph, constants = from_jaxpr(jaxpr)
        own = graph.inputs[len(constants) :]
        own_number = own[len(leaves) + len(jax.tree.leaves(params))]
        found = prune(replace(graph, outputs=graph.outputs[len(leaves) :]))
        is_random = own_number in {value for e in found.equations for value in values(e.inputs)}
        # Numbers of a constant key are others for a batch of another shape.
        is_random |= any(e.primitive.name.startswith(_DRAWING) for e in everywhere(found))
        pairs = zip(self.model.next_by_gradient(rest), graph.outputs, own, strict=False)
        writes = any(new is not old and not is_next for is_next, new, old in pairs)
        return LossFacts(graph, is_random, writes)

    def begins_anew(self, state: TrainState, parts: Sequence[Any]) -> tuple[int, ...]:
        """Return the positions of the untrained leaves that begin in each part with their values before the step."""
        params, rest = self.model.computed(state.params, state.model_state)
        leaves, tree = jax.tree.flatten(rest)

        def after(params: Any, leaves: Sequence[Any], part: Any, number: Any) -> list[Any]:
            _, (_, rest) = self._call(params, jax.tree.unflatten(tree, leaves), [part], state.step, number)
            return jax.tree.leaves(rest)

        with _part("the loss"):
            return begins_anew(jax.jit(after), params, leaves, parts, self.model.are_parameters(rest))

    def _jit(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._jitted.setdefault(name, jax.jit(function))

    def _divisor(self, params: Any, rest: Any, groups: Sequence[Sequence[Any]], step: Any) -> Any:
        """Return by what the sum of the losses of all parts is divided."""
        return add_up([self._call(params, rest, of, step, number)[0] for number, of in enumerate(groups)])[1]

    def _gradients(
        self,
        params: Any,
        rest: Any,
        parts: Sequence[Any],
        step: Any,
        number: Any,
        scale: Any,
        divisor: Any = None,
        anew: tuple[int, ...] = (),
    ) -> tuple[tuple[Any, Any], tuple[Terms, Any, list[Any]]]:
        """Return the model's variables after the call, the loss's terms, its gradients, and values that follow them."""
        leaves = jax.tree.leaves(rest)
        at = [i for i, is_next in enumerate(self.model.next_by_gradient(rest)) if is_next]

        def loss_of(params: Any, following: Sequence[Any]) -> tuple[Any, Any]:
            given = [[*(leaves[i] for i in anew), *of] for of in following]
            terms, after = self._call(params, rest, parts, step, number, ([*anew, *at], given))
            total = terms.total if divisor is None else terms.total / divisor
            return total if scale is None else total * scale, (terms, after)

        followed = [[leaves[i] for i in at]] * len(parts)  # each part reads its own: JAX adds up gradients
        grads_of = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (_, (terms, after)), (grads, of_parts) = grads_of(params, followed)
        following = [reduce(jnp.maximum, of) for of in zip(*of_parts, strict=True)]
        dtype = self.update.precision.summed
        grads = jax.tree.map(lambda grad: grad if dtype is None else grad.astype(dtype), grads)
        return after, (terms, grads, following)

    def _call(
        self,
        params: Any,
        rest: Any,
        parts: Sequence[Any],
        step: Any,
        number: Any,
        given: tuple[Sequence[int], Sequence[Sequence[Any]]] | None = None,
    ) -> tuple[Terms, Any]:
        """Call the loss function, and return what it returns and the model's variables after the call.

        `given` has positions of leaves of the rest, and for each part the values that it reads there.
        """
        at, values = given or ((), [()] * len(parts))
        loss = self.loss_fn
        if not isinstance(loss, WholeBatchLoss):
            rest = _with_leaves(rest, at, values[0])
            model, output = self._ask(loss, params, rest, parts[0], step, number)
            return read(output), self.model.written(model, params, rest)
        found, written = [], params
        for i, part in enumerate(parts):  # each has its own keys
            rest = _with_leaves(rest, at, values[i])
            model, output = self._ask(loss.embed_fn, params, rest, part, step, number + i)
            written, rest = jax.tree.map(jax.lax.stop_gradient, self.model.written(model, params, rest))
            found.append(output)
        seen = [jax.tree.map(_joined, *of) if len(of) > 1 else of[0] for of in (found, parts)]
        return read(loss.loss_fn(*seen)), (written, rest)

    def _ask(self, function: Any, params: Any, rest: Any, part: Any, step: Any, number: Any) -> tuple[Any, Any]:
        numbers = {"step": step, "microbatch": number}
        model = self.model.bind(params, rest, **numbers)
        values = {"training": lambda: True, "rngs": lambda: self.model.rngs(rest, **numbers)}
        return model, function(model, part, **{name: values[name]() for name in asked_for(function)})

    def _finish(
        self, state: TrainState, before: Any, carried: Any, sums: Any, terms: Any, times: Any, divided: Any
    ) -> Any:
        """Return gradients as the trainer's sum has them, all metrics, and the state after the step."""
        metrics, divisor = add_up(terms)
        divisor = divisor if divided is None else jnp.float32(1)  # the losses have been divided
        grads, following = sums
        scale = self.update.scale(state)
        total = divisor if scale is None else divisor * scale

        def mean(grad: Any, param: Any) -> Any:
            dtype = jnp.promote_types(jnp.promote_types(grad.dtype, param.dtype), jnp.float32)
            return (grad.astype(dtype) / total).astype(param.dtype)

        means = jax.tree.map(mean, grads, state.params)
        params, rest = _changed((state.params, state.model_state), before, carried)
        at = [i for i, is_next in enumerate(self.model.next_by_gradient(rest)) if is_next]
        rest = _with_leaves(rest, at, following)
        hook = getattr(self.update.training, "after_update", None)
        hook = None if hook is None else partial(self.model.after_update, hook)
        new, metrics = self.update.apply(state, params, rest, means, metrics, hook)
        return jax.tree.map(lambda grad: grad * times, grads), metrics, new


def _with_leaves(tree: Any, positions: Sequence[int], values: Sequence[Any]) -> Any:
    """Return a tree with other values at the positions of these leaves."""
    leaves, structure = jax.tree.flatten(tree)
    for i, value in zip(positions, values, strict=True):
        leaves[i] = value
    return jax.tree.unflatten(structure, leaves)


def _add(sums: Any, more: Any) -> Any:
    """Add up gradients; of values that follow, such as the scales of fp8, the largest one follows."""
    return jax.tree.map(jnp.add, sums[0], more[0]), jax.tree.map(jnp.maximum, sums[1], more[1])


def _changed(state: Any, before: Any, after: Any) -> Any:
    """Return the leaves of a state, and where a call has written others, those."""

    def one(own: Any, old: Any, new: Any) -> Any:
        if jnp.issubdtype(own.dtype, jax.dtypes.prng_key):
            return own
        return jnp.where(new == old, own, new.astype(own.dtype))

    return jax.tree.map(one, state, before, after)


def _joined(*leaves: Any) -> Any:
    """Join the examples of all parts; a scalar is the same in each."""
    return jnp.concatenate(leaves) if jnp.ndim(leaves[0]) else leaves[0]
