"""Whole programs against plain jax.jit: gradients, meshes of different shapes, shardings, where everything ends up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import mpmd
from tests.helpers import slow, tree_allclose
from tests.mpmd.programs import (
    accumulate,
    batches,
    block,
    config,
    in_runs,
    in_turn,
    loss,
    model,
    topology,
    train_step,
    weights,
)


@settings(max_examples=25)
@given(
    assignment=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    sizes=st.sampled_from([(1, 1, 1), (2, 2, 2), (1, 2, 4), (4, 1, 2)]),
    microbatches=st.sampled_from([0, 1, 3]),
)
@pytest.mark.slow
def test_any_assignment_gives_equal_results(assignment: list[int], sizes: tuple[int, ...], microbatches: int):
    """Random meshes for five blocks; 0 microbatches stands for one gradient without any call."""
    ws = weights(5)
    fun, args = (
        (accumulate, (ws, batches(microbatches))) if microbatches else (jax.value_and_grad(loss), (ws, batches(1)[0]))
    )
    cfg = config(topology(*sizes), {f"block_{i}": f"m{m}" for i, m in enumerate(assignment)})
    tree_allclose(mpmd.jit(fun, cfg)(*args), jax.jit(fun)(*args))


def test_hello_world_says_where_everything_is():
    def hello(w1, w2, x):
        x = mpmd.named_computation(lambda a: a @ w1, name="stage1")(x)
        return mpmd.named_computation(lambda a: a @ w2, name="stage2")(x)

    meshes = topology(2, 2)
    lowered = mpmd.jit(hello, mpmd.make_config(meshes, {"stage1": "m0", "stage2": "m1"})).lower(
        np.ones((3, 5), np.float32), np.ones((5, 7), np.float32), np.ones((10, 3), np.float32)
    )
    on = [NamedSharding(mesh, P()) for mesh in meshes.values()]
    assert lowered.function_named_shardings.input_specs == (on[0], on[1], on[0])
    assert lowered.function_named_shardings.output_specs == on[1]
    assert lowered.function_mesh_assignment.input_meshes == ("m0", "m1", "m0")
    assert lowered.function_mesh_assignment.output_meshes == "m1"
    text = lowered.as_text("mpmd")
    assert text.count(" = fwd_") == 2
    assert text.count(" send ") == 1
    assert lowered.transferred_bytes == 10 * 5 * 4


def test_another_name():
    lowered = mpmd.jit(
        lambda x: mpmd.named_computation(jnp.sin, name="a/b (c)")(x),
        mpmd.make_config(topology(1), {"a/b (c)": "m0"}),
        override_func_name="renamed",
    ).lower(jnp.ones(3))
    assert lowered.name == "renamed"
    assert [str(node.origin) for node in lowered.built.placed.nodes] == ['"a/b (c)"']


def test_a_program_without_names_runs_on_the_first_mesh():
    meshes = topology(2, 2)
    step = mpmd.jit(lambda x, y: (x + 1, y, 3.0), mpmd.make_config(meshes, {}))
    x, y, three = step(jnp.ones(2), jnp.zeros(3))
    assert {a.sharding.mesh for a in (x, y, three)} == {meshes["m0"]}
    assert (float(x[0]), float(y[0]), float(three)) == (2.0, 0.0, 3.0)


def test_arguments_that_nothing_reads_and_donation_of_them():
    step = mpmd.jit(lambda x, unused: 2 * x, mpmd.make_config(topology(1, 1), {}), donate_argnums=(0, 1))
    lowered = step.lower(jnp.ones(2), {"a": jnp.ones(3)})
    assert lowered.function_mesh_assignment.input_meshes == ("m0", {"a": "m0"})
    np.testing.assert_array_equal(lowered.compile()(jnp.ones(2), {"a": jnp.ones(3)}), [2, 2])


def test_meshes_given_to_inputs_and_outputs():
    meshes = topology(1, 1, 1)
    cfg = mpmd.make_config(
        meshes, {}, input_mesh_assignment=("m1", {"a": "m2"}), output_mesh_assignment=(None, "m1", "m0")
    )
    lowered = mpmd.jit(lambda x, y: (x + 1, y["a"]["b"], x), cfg).lower(1.0, {"a": {"b": 2.0, "c": 3.0}})
    assert lowered.function_mesh_assignment.input_meshes == ("m1", {"a": {"b": "m2", "c": "m2"}})
    assert lowered.function_mesh_assignment.output_meshes == ("m1", "m1", "m0")
    results = lowered.compile()(1.0, {"a": {"b": 2.0, "c": 3.0}})
    assert [float(r) for r in results] == [2.0, 2.0, 1.0]
    assert [r.sharding.mesh for r in results] == [meshes["m1"], meshes["m1"], meshes["m0"]]


def test_meshes_read_from_shardings():
    meshes = topology(2, 2)
    cfg = mpmd.make_config(meshes, {}, read_input_output_mesh_from_shardings=True)
    where = NamedSharding(meshes["m1"], P("data")), NamedSharding(cfg.sharding_mesh, P())
    step = mpmd.jit(lambda x, y: (x + 1, y), cfg, in_shardings=where, out_shardings=where)
    assert step.lower(jnp.ones(4), jnp.ones(4)).function_mesh_assignment.input_meshes == ("m1", "m0")
    x, y = step(jnp.ones(4), jnp.ones(4))
    assert x.sharding == where[0]
    assert y.sharding.mesh == meshes["m0"]


def test_specs_follow_the_arrays_to_their_meshes():
    """The mesh in a sharding, or on which `lower` finds an argument, does not matter: the spec does."""
    meshes = topology(2, 2)
    cfg = config(meshes, in_runs(2, 2))
    ws, x = weights(2), batches(1)[0]
    first = [jax.device_put(w, NamedSharding(meshes["m0"], P(None, "data"))) for w in ws]
    lowered = mpmd.jit(model, cfg, in_shardings=(None, NamedSharding(cfg.sharding_mesh, P("data")))).lower(first, x)
    assert [s.mesh for s in lowered.function_named_shardings.input_specs[0]] == [meshes["m0"], meshes["m1"]]
    assert [s.spec for s in lowered.function_named_shardings.input_specs[0]] == [P(None, "data")] * 2
    first = jax.device_put(first, lowered.function_named_shardings.input_specs[0])
    out = mpmd.jit(model, cfg, in_shardings=(None, P("data")), out_shardings=P("data"))(first, x)
    assert out.sharding == NamedSharding(meshes["m1"], P("data"))
    np.testing.assert_allclose(out, jax.jit(model)(ws, x), rtol=1e-5)


def test_out_shardings_are_always_respected():
    """Of an argument that comes back as it went in too, and of a value that is returned twice (a test of Shardy's)."""
    meshes = topology(2, 2)
    cfg = config(meshes, in_runs(2, 2))
    ws, x = weights(2), batches(1)[0]

    def passing(ws: list[jax.Array], x: jax.Array) -> Any:
        y = model(ws, x)
        return ws[0], ws[0], y, y, x

    wanted = P("data"), P(None, "data"), P("data"), P(None, "data"), P(None, "data")
    lowered = mpmd.jit(passing, cfg, in_shardings=P(), out_shardings=wanted).lower(ws, x)
    results = lowered.compile()(ws, x)
    promised = lowered.function_named_shardings.output_specs
    for result, spec, sharding in zip(results, wanted, promised, strict=True):
        assert result.sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), 2)
        assert result.sharding == sharding
    tree_allclose(results, jax.jit(passing)(ws, x))


def test_kinds_of_memory():
    """What a sharding or `jax.device_put` puts on the host stays there: arguments, results, values between meshes."""
    meshes = topology(2, 2)
    cfg = config(meshes, in_runs(2, 2))
    ws, x = weights(2), batches(1)[0]
    host = NamedSharding(cfg.sharding_mesh, P("data"), memory_kind="pinned_host")

    def offloading(ws: list[jax.Array], x: jax.Array) -> Any:
        ws = [jax.device_put(w, jax.memory.Space.Device) for w in ws]
        y = model(ws, x)
        return y, jax.device_put(y, jax.memory.Space.Host), y

    lowered = mpmd.jit(offloading, cfg, in_shardings=(host, None), out_shardings=(host, None, None)).lower(ws, x)
    results = lowered.compile()(ws, x)
    assert {s.memory_kind for s in lowered.function_named_shardings.input_specs[0]} == {"pinned_host"}
    kinds = ["pinned_host", "pinned_host", "device"]
    assert [s.memory_kind for s in lowered.function_named_shardings.output_specs] == kinds
    assert [result.sharding.memory_kind for result in results] == kinds
    assert results[0].sharding == NamedSharding(meshes["m1"], P("data"), memory_kind="pinned_host")
    tree_allclose(results, jax.jit(offloading)(ws, x))
    on_host = jax.device_put(ws, lowered.function_named_shardings.input_specs[0])
    carried = mpmd.jit(offloading, cfg)(on_host, x)
    assert [result.sharding.memory_kind for result in carried] == ["device", "pinned_host", "device"]


def test_state_comes_back_where_it_was():
    """The next step takes what the last one returned without moving it."""
    ws, xs = weights(4), batches(3)
    cfg = config(topology(2, 2), in_turn(4, 2), "CIRCULAR")
    step = mpmd.jit(train_step, cfg, in_shardings=(P("data"), P("data")), donate_argnums=0)
    lowered = step.lower(ws, xs)
    assert lowered.function_named_shardings.output_specs[0] == lowered.function_named_shardings.input_specs[0]
    compiled, plain = lowered.compile(), jax.jit(train_step)
    expected = ws
    placed = jax.device_put((ws, xs), lowered.function_named_shardings.input_specs)
    for _ in range(3):
        expected, expected_loss = plain(expected, xs)
        placed[0][:], found_loss = compiled(placed[0], placed[1])
    tree_allclose((placed[0], found_loss), (expected, expected_loss))


def test_meshes_of_different_shapes_and_axes():
    devices = np.array(jax.devices())
    meshes = {
        "small": Mesh(devices[:1], ("data",)),
        "wide": Mesh(devices[1:5].reshape(2, 2), ("data", "model")),
        "long": Mesh(devices[5:8], ("seq",)),
    }

    def tensor_parallel(w, x):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(meshes["wide"], P(None, "model")))
        return jnp.tanh(x @ w)

    def step(ws, x):
        def loss(ws):
            h = mpmd.named_computation(block, name="a")(ws[0], x)
            h = mpmd.named_computation(tensor_parallel, name="b")(ws[1], h)
            h = mpmd.named_computation(block, name="c")(ws[2], h)
            return jnp.sum(h**2)

        return jax.value_and_grad(loss)(ws)

    ws, x = weights(3), batches(1)[0]
    cfg = mpmd.make_config(meshes, {"a": "small", "b": "wide", "c": "long"})
    lowered = mpmd.jit(step, cfg, in_shardings=([None, P("data", "model"), None], P("data"))).lower(ws, x)
    assert lowered.function_named_shardings.input_specs[0][1] == NamedSharding(meshes["wide"], P("data", "model"))
    plain = jax.value_and_grad(lambda ws: jnp.sum(block(ws[2], jnp.tanh(block(ws[0], x) @ ws[1])) ** 2))
    tree_allclose(lowered.compile()(ws, x), jax.jit(plain)(ws))


def test_a_device_in_several_meshes():
    mesh = topology(2)["m0"]
    ws, xs = weights(2), batches(2)
    step = mpmd.jit(train_step, config({"m0": mesh, "m1": mesh}, in_runs(2, 2), "ONE_FWD_ONE_BWD"), donate_argnums=0)
    expected = jax.jit(train_step)(ws, xs)
    tree_allclose(step(ws, xs), expected)


def remat(w, x):
    return jax.checkpoint(block)(w, x)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (block(w, x), None), x, None, length=2)[0]


@jax.custom_vjp
def _clipped(x):
    return x


_clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def custom(w, x):
    return _clipped(block(w, x))


@pytest.mark.parametrize("schedule", [slow(None), slow("ONE_FWD_ONE_BWD"), "ZERO_BUBBLE_H1"])
def test_bodies(schedule: str | None):
    def fun(ws, xs):
        return accumulate(ws, xs, lambda ws, x: loss(ws, x, [scanned, remat, custom]))

    ws, xs = weights(3), batches(2)
    tree_allclose(mpmd.jit(fun, config(topology(1, 1), in_runs(3, 2), schedule))(ws, xs), jax.jit(fun)(ws, xs))


@pytest.mark.parametrize("schedule", [slow(None), "ONE_FWD_ONE_BWD", slow("ZERO_BUBBLE_H1")])
def test_remat_around_named_computations(schedule: str | None):
    def fun(ws, xs):
        return accumulate(ws, xs, jax.checkpoint(loss))

    ws, xs = weights(3), batches(2)
    tree_allclose(mpmd.jit(fun, config(topology(1, 1), in_runs(3, 2), schedule))(ws, xs), jax.jit(fun)(ws, xs))


def test_batched_and_jitted_named_computations():
    def fun(ws, xs):
        return jax.value_and_grad(lambda ws: jnp.sum(jax.jit(jax.vmap(model, in_axes=(None, 0)))(ws, xs)))(ws)

    ws, xs = weights(3), jnp.stack(batches(2))
    lowered = mpmd.jit(fun, config(topology(1, 1, 1), in_runs(3, 3))).lower(ws, xs)
    assert '"block_1"(1)' in {str(node.origin) for node in lowered.built.placed.nodes}
    tree_allclose(lowered.compile()(ws, xs), jax.jit(fun)(ws, xs))


def test_second_derivatives():
    def fun(ws, x, v):
        return jax.jvp(lambda ws: jax.grad(loss)(ws, x), (ws,), (v,))[1]

    ws, x = weights(2), batches(1)[0]
    tree_allclose(mpmd.jit(fun, config(topology(1, 1), in_runs(2, 2)))(ws, x, ws), jax.jit(fun)(ws, x, ws))


@pytest.mark.parametrize("schedule", [slow(None), "ZERO_BUBBLE_H1"])
def test_a_parameter_of_several_meshes_and_a_skip_connection(schedule: str | None):
    def tied(ws, x):
        shared, w = ws
        a = mpmd.named_computation(lambda x: x @ shared, name="block_0")(x)
        b = mpmd.named_computation(lambda a: jnp.tanh(a @ w), name="block_1")(a)
        c = mpmd.named_computation(lambda b: b @ shared.T, name="block_2")(b)
        return jnp.mean((mpmd.named_computation(jnp.add, name="block_3")(a, c)) ** 2)

    def fun(ws, xs):
        return accumulate(ws, xs, tied)

    ws, xs = weights(2), batches(4)
    step = mpmd.jit(fun, config(topology(1, 1, 1, 1), in_runs(4, 4), schedule))
    tree_allclose(step(ws, xs), jax.jit(fun)(ws, xs))


def test_named_arrays_decide_where_a_shared_gradient_is_summed():
    def update(shared, x):
        def fun(shared):
            a = mpmd.named_computation(lambda x: x @ shared, name="block_0")(x)
            return jnp.sum(mpmd.named_computation(lambda a: jnp.tanh(a @ shared), name="block_1")(a))

        value, grad = jax.value_and_grad(fun)(shared)
        return value, shared - mpmd.named_tensor(grad, name="where")

    w, x = weights(1)[0], batches(1)[0]
    for mesh in ("m0", "m1"):
        cfg = config(topology(1, 1), {"block_0": "m0", "block_1": "m1", "where": mesh})
        lowered = mpmd.jit(update, cfg).lower(w, x)
        assert lowered.function_mesh_assignment.output_meshes[1] == mesh
    tree_allclose(lowered.compile()(w, x), jax.jit(update)(w, x))


def test_branches_meet_again():
    def fun(ws, x):
        a = mpmd.named_computation(block, name="block_0")(ws[0], x)
        b = mpmd.named_computation(block, name="block_1")(ws[1], a)
        c = mpmd.named_computation(block, name="block_2")(ws[2], a)
        return mpmd.named_computation(lambda b, c: jnp.sum(b) + jnp.sum(c * c), name="block_3")(b, c)

    grad = jax.value_and_grad(fun)
    ws, x = weights(3), batches(1)[0]
    lowered = mpmd.jit(grad, config(topology(1, 1, 1, 1), in_runs(4, 4))).lower(ws, x)
    assert lowered.function_mesh_assignment.output_meshes == ("m3", ["m0", "m1", "m2"])
    tree_allclose(lowered.compile()(ws, x), jax.jit(grad)(ws, x))


@pytest.mark.parametrize("make_key", [jax.random.key, slow(jax.random.PRNGKey)], ids=["typed", "raw"])
def test_captured_arrays_and_dropout_keys(make_key: Any):
    table = np.arange(32.0, dtype=np.float32).reshape(4, 8)

    def fun(ws, key, x):
        def total(ws):
            h = mpmd.named_computation(lambda x: block(ws[0], x) + table, name="block_0")(x)
            keep = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, h.shape)
            h = mpmd.named_computation(lambda h: block(ws[1], jnp.where(keep, h, 0)) + table, name="block_1")(h)
            return jnp.mean(h**2)

        return jax.value_and_grad(total)(ws)

    args = weights(2), make_key(3), batches(1)[0]
    step = mpmd.jit(fun, config(topology(2, 1), in_runs(2, 2)))
    tree_allclose(step(*args), jax.jit(fun)(*args))


def test_a_backward_pass_written_by_hand_is_counted():
    @jax.custom_vjp
    def double(x):
        return mpmd.named_computation(lambda x: 2 * x, name="block_0")(x)

    backward = mpmd.named_computation(lambda g: 2 * g, name="block_0", transpose_count=1)
    double.defvjp(lambda x: (double(x), None), lambda _, g: (backward(g),))
    grad = jax.grad(lambda x: jnp.sum(double(x) ** 2))
    lowered = mpmd.jit(grad, mpmd.make_config(topology(1), {"block_0": "m0"})).lower(jnp.ones(3))
    assert {'"block_0"(1)', '"block_0"(2)'} & {str(node.origin) for node in lowered.built.placed.nodes}
    np.testing.assert_allclose(lowered.compile()(jnp.ones(3)), 8 * np.ones(3))


def test_calls_are_numbered_in_any_way():
    def fun(ws, xs):
        return sum(mpmd.call(loss, call_counter=3 + 10 * i)(ws, x) for i, x in enumerate(xs))

    ws, xs = weights(2), batches(3)
    step = mpmd.jit(fun, config(topology(1, 1), in_runs(2, 2), "GPIPE"))
    tree_allclose(step(ws, xs), jax.jit(fun)(ws, xs))


def test_callable_once_for_each_signature():
    step = mpmd.jit(loss, config(topology(1, 1), in_runs(2, 2)))
    ws = weights(2)
    step(ws, batches(1)[0])
    step(ws, batches(2)[1])
    assert len(set(step._placed.values())) == 1
    step(ws, batches(1, rows=2)[0])
    assert len(set(step._placed.values())) == 2


def test_results_go_back_in_without_another_compilation():
    """Results name the devices' own memory, an argument that was placed nowhere names none."""
    step = mpmd.jit(lambda x: x + 1, config(topology(1, 1), {}))
    np.testing.assert_array_equal(step(step(step(np.ones(3)))), 4 * np.ones(3))
    assert len(set(step._placed.values())) == 1
