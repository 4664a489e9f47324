"""A 1F1B loop written by hand around `jax.jit`: what one would do without this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hand_written_step(arguments: Any, schedule: Any) -> Callable[..., Any]:
    """A train step that calls a jitted forward and backward for each stage, with `jax.device_put` between devices."""
    import jax
    import jax.numpy as jnp
    from workload import block, stage_of

    from jaxpp_flax.schedules import FusedTask, TaskKind, merge_order

    stages, count = arguments.stages, arguments.blocks or arguments.stages
    devices = [jax.devices()[s % len(jax.devices())] for s in range(stages)]
    order = merge_order(schedule.tasks(arguments.microbatches))

    def forward(params: Any, x: Any) -> Any:
        for p in params:
            x = block(p, x)
        return x

    first = jax.jit(lambda params, xs, i: jax.vjp(forward, params, xs[i]))
    middle = jax.jit(lambda params, x: jax.vjp(forward, params, x))

    def loss(params: Any, x: Any) -> Any:
        y = forward(params, x)
        return (y * y).mean()

    add = lambda acc, g: jax.tree.map(jnp.add, acc, g)  # noqa: E731

    def last(params: Any, x: Any, acc: Any, losses: Any, i: Any) -> Any:
        value, (grads, cotangent) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return losses.at[i].set(value), add(acc, grads), cotangent

    def backward(pullback: Any, cotangent: Any, acc: Any) -> Any:
        grads, cotangent = pullback(cotangent)
        return add(acc, grads), cotangent

    last_jit = jax.jit(last, donate_argnums=(2, 3))
    backward_jit = jax.jit(backward, donate_argnums=(2,))
    zeros = jax.jit(lambda p: jax.tree.map(jnp.zeros_like, p))
    update = jax.jit(
        lambda p, g: jax.tree.map(lambda p, g: p - 0.01 * g / arguments.microbatches, p, g), donate_argnums=(0, 1)
    )
    indices = [[jax.device_put(jnp.int32(i), d) for i in range(arguments.microbatches)] for d in devices]

    def step(params: Any, batch: Any) -> Any:
        own = [[p for i, p in enumerate(params) if stage_of(i, count, stages) == s] for s in range(stages)]
        own = [jax.device_put(p, d) for p, d in zip(own, devices, strict=True)]
        batch = jax.device_put(batch, devices[0])
        acc = [zeros(p) for p in own]
        losses = jax.device_put(jnp.zeros(arguments.microbatches), devices[-1])
        activation: dict[Any, Any] = {}
        pullback: dict[Any, Any] = {}
        cotangent: dict[Any, Any] = {}
        for _, task in order:
            s, m = task.stage, task.microbatch
            if isinstance(task, FusedTask):
                x = activation.pop((s, m))
                losses, acc[s], ct = last_jit(own[s], x, acc[s], losses, indices[s][m])
                cotangent[s - 1, m] = jax.device_put(ct, devices[s - 1])
            elif task.kind is TaskKind.FORWARD:
                y, pullback[s, m] = (
                    first(own[s], batch, indices[s][m]) if s == 0 else middle(own[s], activation.pop((s, m)))
                )
                activation[s + 1, m] = jax.device_put(y, devices[s + 1])
            else:
                acc[s], ct = backward_jit(pullback.pop((s, m)), cotangent.pop((s, m)), acc[s])
                if s:
                    cotangent[s - 1, m] = jax.device_put(ct, devices[s - 1])
        new = [update(p, a) for p, a in zip(own, acc, strict=True)]
        return [p for stage in new for p in stage], losses

    return step
