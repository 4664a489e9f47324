"""The programs of JaxPP's page on delaying gradient reductions: one reduction a step, equal to plain JAX.

The page has two forms. On Explicit axes: types of sums (`jax.P(reduced=, unreduced=)`). On any: a mapped dimension.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from jaxpp_flax import treduce
from jaxpp_flax.engine.passes.fsdp.rule import FsdpWarning
from jaxpp_flax.schedules import Std1F1B
from tests.helpers import slow, tree_allclose

WIDTH, MICROBATCHES = 8, 4
COLLECTIVES = re.compile(r"= (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def mesh_of(kind: AxisType, axis: str = "data") -> jaxpp.MpmdMesh:
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    return jaxpp.MpmdMesh(Mesh(devices, ("stage", axis), axis_types=(kind, kind)), "stage")


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((jaxpp.mark_stage_end(jnp.tanh(x @ params[0])) @ params[1]) ** 2)


PARAMS = [jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(2)]
BATCH = jax.random.normal(jax.random.key(2), (MICROBATCHES, 4, WIDTH))


def collectives(compiled: Any) -> tuple[list[str], list[str]]:
    """The collectives of the loop's tasks, and those of all others: one entry for each array that they take."""
    found: tuple[list[str], list[str]] = [], []
    for task, executable in zip(compiled.program.tasks, compiled.executables.tasks, strict=True):
        for shapes, name in COLLECTIVES.findall(executable.as_text()):
            found[task.stage is None].extend([name] * len(re.findall(r"\w+\[", shapes)))
    return found


def summed(params: Any, batch: Any, loss: Callable[..., Any] = loss_fn, **options: Any) -> Any:
    options = {"schedule": jaxpp.Std1F1B(2), "operation": jaxpp.Add, **options}
    return jaxpp.treduce(partial(jax.grad(loss), params), batch, **options)


def typed(axis: str) -> Callable[[jax.Array], jax.Array]:
    return lambda w: jax.sharding.reshard(w, P(reduced={axis}))


def placed(grads: Any, spec: P) -> Any:
    return [jax.sharding.reshard(g, spec) for g in grads]


def of_typed_arguments(params: Any, batch: Any) -> Any:
    return placed(summed(params, batch), P())


def of_typed_parameters(params: Any, batch: Any) -> Any:
    return of_typed_arguments(list(map(typed("data"), params)), batch)


def of_gathered_parameters(params: Any, batch: Any) -> Any:
    return placed(summed(list(map(typed("fsdp"), params)), batch), P("fsdp"))


@pytest.mark.parametrize(
    ("step", "axis", "spec", "around"),
    [
        (of_typed_arguments, "data", P(reduced={"data"}), ["all-reduce"] * 2),
        slow(of_typed_parameters, "data", P(), ["all-reduce"] * 2),
        # XLA on CPU has no reduce-scatter: an all-reduce, and a slice.
        (of_gathered_parameters, "fsdp", P("fsdp"), ["all-gather"] * 2 + ["all-reduce"] * 2),
    ],
)
def test_reductions_delayed_by_types(step: Callable[..., Any], axis: str, spec: P, around: list[str]):
    """No task of the loop talks to other devices, and each gradient is reduced once in a step."""
    mesh = mesh_of(AxisType.Explicit, axis)
    compiled = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=(spec, P(None, axis))).compile(PARAMS, BATCH)
    in_loop, others = collectives(compiled)
    assert (in_loop, sorted(others)) == ([], around)
    expected = [sum(parts) for parts in zip(*(jax.grad(loss_fn)(PARAMS, x) for x in BATCH), strict=True)]
    tree_allclose(compiled(PARAMS, BATCH), expected)
    # The same step under `jax.jit`, with the types.
    with jax.set_mesh(mesh.unstack[0]):
        arguments = [
            jax.device_put(x, NamedSharding(mesh.unstack[0], s)) for x, s in ((PARAMS, spec), (BATCH, P(None, axis)))
        ]
        tree_allclose(jax.jit(step)(*arguments), expected)


def test_typed_arrays_train_for_some_steps():
    """An array's own sharding has the type too. Results have plain types, so a second step is typed by `in_specs`."""
    mesh = mesh_of(AxisType.Explicit)
    types = NamedSharding(mesh.jax_mesh, P(reduced={"data"}))

    def step(params: Any, batch: Any) -> Any:
        assert jax.typeof(params[0]).sharding.spec.reduced == {"data"}
        losses, grads = jaxpp.treduce(
            partial(jax.value_and_grad(loss_fn), params), batch, schedule=jaxpp.ZeroBubble(2)
        )  # fmt: skip
        assert jax.typeof(grads[0]).sharding.spec.unreduced == {"data"}
        plain = [jax.sharding.reshard(w, P()) for w in params]
        return [w - 0.1 * g for w, g in zip(plain, placed(grads, P()), strict=True)], losses

    pipelined = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=(P(reduced={"data"}), P(None, "data")))
    params, losses = pipelined(jax.device_put(PARAMS, types), BATCH)
    params, losses = pipelined(params, BATCH)
    assert params[0].sharding.spec == P()
    expected, plain_losses = PARAMS, None
    for _ in range(2):
        plain_losses, grads = jax.vmap(partial(jax.value_and_grad(loss_fn), expected))(BATCH)
        expected = [w - 0.1 * g.sum(0) for w, g in zip(expected, grads, strict=True)]
    tree_allclose((params, losses), (expected, plain_losses))


class OwnSum:
    def state(self, num_microbatches: int, value: Any) -> jax.Array:
        return jnp.zeros_like(value)

    def update(self, state: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
        return state + value


def of_own_operation(params: Any, batch: Any) -> Any:
    return placed(summed(params, batch, operation=OwnSum()), P())


def of_carry(params: Any, batch: Any) -> Any:
    start = [jax.sharding.reshard(jnp.zeros_like(w), P(unreduced={"data"})) for w in params]

    def body(carry: Any, x: Any) -> Any:
        grads = jax.grad(loss_fn)(params, x)
        return jax.tree.map(jnp.add, carry, grads), jnp.float32(0)

    return placed(treduce(body, batch, Std1F1B(2), operation=jaxpp.Add, init=start)[0], P())


def of_shard_map(params: Any, batch: Any) -> Any:
    def loss(params: Any, x: Any) -> Any:
        specs = P("data"), P(reduced={"data"})
        hidden = jax.shard_map(jnp.matmul, in_specs=specs, out_specs=P("data"))(x, params[0])
        return loss_fn([jnp.eye(WIDTH), params[1]], hidden)

    return placed(summed(params, batch, loss), P())


@pytest.mark.parametrize(
    ("step", "spec", "kind", "message"),
    [
        (of_own_operation, P(reduced={"data"}), AxisType.Explicit, r"reduces a result by .*OwnSum.*operation `Add`"),
        (of_carry, P(reduced={"data"}), AxisType.Explicit, r"carries \[0\].*operation `Add`"),
        (of_shard_map, P(reduced={"data"}), AxisType.Explicit, r"shard_map at .* P\(reduced=.*plain specs"),
        (of_typed_arguments, P(unreduced={"data"}), AxisType.Explicit, r"in_specs\[0\].*neither enter nor leave"),
        (of_typed_arguments, P(reduced={"dta"}), AxisType.Explicit, r"no axis 'dta'"),
        (of_typed_arguments, P(reduced={"data"}), AxisType.Auto, r"Explicit axes alone.*Leave it out"),
    ],
)
def test_types_that_a_step_cannot_keep_are_refused(step: Any, spec: P, kind: AxisType, message: str):
    pipelined = jaxpp.mpmd_jit_with_loop(step, mesh_of(kind), in_specs=(spec, P(None, "data")))
    with pytest.raises((ValueError, NotImplementedError), match=message):
        pipelined.place(PARAMS, BATCH)


def test_a_typed_result_that_is_reduced_in_every_microbatch_is_named():
    """Parts in bfloat16 would be rounded before their sum: the numbers are right, and there are more reductions."""

    def loss(params: Any, x: Any) -> Any:
        hidden = jaxpp.mark_stage_end(jnp.tanh(x @ params[0]))
        return jnp.mean((hidden @ params[1].astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    specs = (P(reduced={"data"}), P(None, "data"))
    pipelined = jaxpp.mpmd_jit_with_loop(
        lambda params, batch: placed(summed(params, batch, loss), P()), mesh_of(AxisType.Explicit), in_specs=specs
    )
    with pytest.warns(
        FsdpWarning, match=r'result 1 of the treduce .* over \[.data.\].*in every microbatch.*"step"'
    ) as told:
        pipelined.place(PARAMS, BATCH)
    assert len(told) == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_reductions_delayed_by_a_mapped_dimension(kind: AxisType):
    """No task in the loop talks over "data"; each gradient is reduced once, by the step's own sum after the loop."""
    mesh = mesh_of(kind)
    shards = NamedSharding(mesh.lowering_mesh(), P("data"))
    auto = kind == AxisType.Auto

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        if auto:  # as `nn.with_logical_constraint` does: `vmap` adds its own axis in front
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh.lowering_mesh(), P(None, None)))
        return loss_fn(params, x)

    def step(params: Any, batch: Any, *, constrained: bool = auto) -> Any:
        losses, grads = jaxpp.treduce(
            jax.vmap(partial(jax.value_and_grad(loss), params), spmd_axis_name="data"),
            batch, axis=1, schedule=jaxpp.Std1F1B(2), operation=(jaxpp.Concat(axis=1), jaxpp.Add),
        )  # fmt: skip
        if constrained:
            grads = [jax.lax.with_sharding_constraint(g, shards) for g in grads]
        return losses, [p - 0.1 * g.sum(axis=0) for p, g in zip(params, grads, strict=True)]

    batch = BATCH.reshape(2, MICROBATCHES, 2, WIDTH)
    losses = jax.vmap(jax.vmap(partial(loss_fn, PARAMS)))(batch)
    grads = jax.grad(lambda params: jax.vmap(jax.vmap(partial(loss_fn, params)))(batch).sum())(PARAMS)
    expected = losses, [p - 0.1 * g for p, g in zip(PARAMS, grads, strict=True)]
    for constrained in {auto, False}:
        pipelined = jaxpp.mpmd_jit_with_loop(
            partial(step, constrained=constrained), mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P())
        )
        compiled = pipelined.compile(PARAMS, batch)
        tree_allclose(compiled(PARAMS, batch), expected)
        in_loop, after = collectives(compiled)
        assert in_loop == []
        assert sorted(after) == ["all-reduce", "all-reduce"], "one for each of the two parameters"
