"""A 1F1B loop written by hand around `jax.jit`: what one would do without this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What the loop needs of a model and its training state.

    Args:
      split: the training state cut into one part for each stage.
      merge: the inverse.
      params_of: the parameters in a part.
      forward: (stage, parameters, input) -> output; the first stage's input is a microbatch.
      loss: (the last stage's output, microbatch) -> loss.
      update: (part, gradients added up over the microbatches) -> new part.
    """

    split: Callable[[Any], Sequence[Any]]
    merge: Callable[[Sequence[Any]], Any]
    params_of: Callable[[Any], Any]
    forward: Callable[[int, Any, Any], Any]
    loss: Callable[[Any, Any], Any]
    update: Callable[[Any, Any], Any]


def hand_written_step(pieces: Pieces, schedule: Any, microbatches: int) -> Callable[..., Any]:
    """A train step that calls a jitted forward and backward for each stage, with `jax.device_put` between devices."""
    import jax
    import jax.numpy as jnp

    from jaxpp_flax.schedules import TaskKind, merge_order

    stages = schedule.num_stages
    devices = [jax.devices()[s % len(jax.devices())] for s in range(stages)]
    order = merge_order(schedule.tasks(microbatches))

    def first(params: Any, batch: Any, i: Any) -> Any:
        return jax.vjp(lambda params: pieces.forward(0, params, batch[i]), params)

    def middle(stage: int, params: Any, x: Any) -> Any:
        return jax.vjp(partial(pieces.forward, stage), params, x)

    def last(params: Any, x: Any, batch: Any, acc: Any, losses: Any, i: Any) -> Any:
        loss = lambda params, x: pieces.loss(pieces.forward(stages - 1, params, x), batch[i])  # noqa: E731
        value, (grads, cotangent) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return losses.at[i].set(value), add(acc, grads), cotangent

    def backward(pullback: Any, cotangent: Any, acc: Any) -> Any:
        grads, *cotangents = pullback(cotangent)
        return add(acc, grads), cotangents

    add = lambda acc, g: jax.tree.map(jnp.add, acc, g)  # noqa: E731
    forwards = [jax.jit(first), *(jax.jit(partial(middle, s)) for s in range(1, stages - 1))]
    last_jit = jax.jit(last, donate_argnums=(3, 4))
    backward_jit = jax.jit(backward, donate_argnums=(2,))
    zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p))
    update = jax.jit(pieces.update, donate_argnums=0)
    indices = [[jax.device_put(jnp.int32(i), d) for i in range(microbatches)] for d in devices]

    def step(state: Any, batch: Any) -> Any:
        parts = [jax.device_put(part, d) for part, d in zip(pieces.split(state), devices, strict=True)]
        own = [pieces.params_of(part) for part in parts]
        batches = jax.device_put(batch, devices[0]), jax.device_put(batch, devices[-1])
        acc = [zeros(p) for p in own]
        losses = jax.device_put(jnp.zeros(microbatches), devices[-1])
        activation: dict[Any, Any] = {}
        pullback: dict[Any, Any] = {}
        cotangent: dict[Any, Any] = {}
        for _, task in order:
            s, m = task.stage, task.microbatch
            if task.kind is TaskKind.FUSED:
                x = activation.pop((s, m))
                losses, acc[s], ct = last_jit(own[s], x, batches[1], acc[s], losses, indices[s][m])
                cotangent[s - 1, m] = jax.device_put(ct, devices[s - 1])
            elif task.kind is TaskKind.FORWARD:
                inputs = (batches[0], indices[s][m]) if s == 0 else (activation.pop((s, m)),)
                y, pullback[s, m] = forwards[s](own[s], *inputs)
                activation[s + 1, m] = jax.device_put(y, devices[s + 1])
            else:
                acc[s], cts = backward_jit(pullback.pop((s, m)), cotangent.pop((s, m)), acc[s])
                if s:
                    cotangent[s - 1, m] = jax.device_put(cts[0], devices[s - 1])
        return pieces.merge([update(part, a) for part, a in zip(parts, acc, strict=True)]), losses

    return step
