"""`mpmd_jit_with_loop` and `mpmd_jit` as functions: how they take arguments and what they give back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray
from jaxpp_flax.engine.jit import MpmdFunction, mpmd_jit, mpmd_jit_with_loop
from jaxpp_flax.schedules import GPipe, Std1F1B
from tests.engine.toys import chain, forward, gradients, mesh_of, sgd_step
from tests.helpers import batch_of, tree_allclose


@pytest.fixture(scope="module")
def step() -> MpmdFunction:
    return mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2))


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.tree.map(np.asarray, jax.jit(sgd_step(None))(chain(2), batch_of(2)))


def check(actual: Any, expected: Any) -> None:
    """One step in float32, summed in another order."""
    tree_allclose(actual, expected, rtol=1e-6)


def test_numpy_arrays_and_keywords(step: MpmdFunction, expected: Any):
    params, batch = jax.tree.map(np.asarray, (chain(2), batch_of(2)))
    check(step(params, batch), expected)
    check(step(params, batch=batch), expected)
    check(step(batch=batch, params=params), expected)


def test_results_are_where_they_are_made_and_go_back_in(step: MpmdFunction, expected: Any):
    params, losses, grads = step(chain(2), batch_of(2))
    assert all(isinstance(x, MpmdArray) for x in jax.tree.leaves((params, losses, grads)))
    assert [sorted(p["w"].mpmd_idxs) for p in params] == [[0], [1]]
    assert sorted(losses.mpmd_idxs) == [1]
    again = step(params, batch_of(2))
    tree_allclose(
        again,
        jax.jit(sgd_step(None))(expected[0], batch_of(2)),
        rtol=1e-6,
    )


def test_an_argument_on_the_wrong_rank_is_moved(step: MpmdFunction, expected: Any):
    """The stages' parameters change places: each is on the other's rank."""
    first, second = step(chain(2), batch_of(2))[0]
    swapped = step([second, first], batch_of(2))
    plain = jax.jit(sgd_step(None))([expected[0][1], expected[0][0]], batch_of(2))
    check(swapped, jax.tree.map(np.asarray, plain))


def test_compiling_ahead_for_shapes(step: MpmdFunction, expected: Any):
    arguments = chain(2), batch_of(2)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    compiled = step.compile(*shapes)
    assert compiled is step.compile(*arguments)
    check(compiled(*arguments), expected)
    (in_params, in_batch), in_kwargs = compiled.in_shardings
    assert in_kwargs == {}
    assert [sorted(p["w"].mesh_ids) for p in in_params] == [[0], [1]]
    assert sorted(in_batch["x"].mesh_ids) == [0]
    assert sorted(in_batch["y"].mesh_ids) == [1]
    out_params, out_losses, _ = compiled.out_shardings
    assert [sorted(p["w"].mesh_ids) for p in out_params] == [[0], [1]]
    assert sorted(out_losses.mesh_ids) == [1]
    assert compiled.in_shardings == step.in_shardings


def test_a_shape_in_place_of_a_value_that_is_read(step: MpmdFunction):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), chain(2))
    with pytest.raises(TypeError, match=r"argument\[0\]\[0\].* is a shape without a value .*an argument that no rank"):
        step(shapes, batch_of(2))


def test_text(step: MpmdFunction):
    assert "fwd_0__1" in step.compile(chain(2), batch_of(2)).as_text()


def test_stage_summary(step: MpmdFunction):
    rows = step.compile(chain(2), batch_of(2)).stages
    assert [(row.stage, row.rank) for row in rows] == [(0, 0), (1, 1)]
    assert [row.parameter_count for row in rows] == [8 * 8 + 8] * 2
    assert [row.parameter_bytes for row in rows] == [4 * (8 * 8 + 8)] * 2
    assert [row.sent_bytes for row in rows] == [4 * 16 * 8, 0]
    assert [row.blocks for row in rows] == [("layer_0",), ("after_layer_0",)]


def scaled(params: Any, batch: Any, power: int, sign: str = "+") -> Any:
    losses, grads = gradients(Std1F1B(2))(params, batch)
    return losses**power * (1 if sign == "+" else -1), grads


@pytest.mark.parametrize("static", [{"static_argnums": (2, -1)}, {"static_argnames": ("power", "sign")}], ids=str)
def test_static_arguments_by_position_and_by_name(static: Any):
    """As in `jax.jit`, naming an argument one way makes it static however it is passed."""
    args = chain(2), batch_of(2)
    pipelined = mpmd_jit_with_loop(scaled, mesh_of(2), donate_argnums=1, **static)
    plain_losses, plain_grads = jax.jit(gradients(None))(*args)
    expected = jax.tree.map(np.asarray, (-(plain_losses**3), plain_grads))
    check(pipelined(args[0], batch_of(2), 3, "-"), expected)
    check(pipelined(args[0], batch_of(2), power=3, sign="-"), expected)


@pytest.mark.parametrize("static", [{"static_argnums": 2}, {"static_argnames": "options"}], ids=str)
def test_a_static_argument_that_cannot_be_hashed(static: Any):
    def step(params: Any, batch: Any, options: Any) -> Any:
        return sgd_step(options["schedule"])(params, batch)

    pipelined, options = mpmd_jit_with_loop(step, mesh_of(2), **static), {"schedule": Std1F1B(2)}
    for call in (
        lambda: pipelined(chain(2), batch_of(2), options),
        lambda: pipelined(chain(2), batch_of(2), options=options),
    ):
        with pytest.raises(TypeError, match=r"static argument 'options' is a dict, which cannot be hashed.*a tuple"):
            call()


def test_nothing_is_donated_beside_an_argument_that_is_refused():
    """One leaf in the wrong place must not cost the caller the others."""
    donating = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2), donate_argnums=(0, 1))
    elsewhere = jax.devices()[5]  # no rank's: such arrays are copied, then deleted
    params, batch = jax.device_put(chain(2), elsewhere), jax.device_put(batch_of(2), elsewhere)
    batch["y"].delete()
    with pytest.raises(RuntimeError, match=r"argument\[1\]\['y'\] .* has been deleted"):
        donating(params, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, batch["x"])))
    donating(params, jax.device_put(batch_of(2), elsewhere))
    assert all(x.is_deleted() for x in jax.tree.leaves(params))


@pytest.mark.parametrize("donate", [{"donate_argnums": 0}, {"donate_argnames": "params"}], ids=["argnums", "argnames"])
def test_donation_by_position_and_by_name(donate: Any):
    """As in `jax.jit`, a donated argument is donated whether it is passed by position or by name."""
    pipelined = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2), **donate)
    by_position, by_name, batch = chain(2), chain(2), batch_of(2)
    pipelined(by_position, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(by_position))
    pipelined(params=by_name, batch=batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(by_name))
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))


def test_a_deleted_array_is_refused_by_name_before_anything_runs(monkeypatch: pytest.MonkeyPatch):
    donating = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2), donate_argnums=0)
    params = chain(2)
    batch = batch_of(2)
    new, _, _ = donating(params, batch)
    newer, _, _ = donating(new, batch)
    compiled = donating.compile(newer, batch)
    monkeypatch.setattr(compiled.runtime, "run", lambda *_: pytest.fail("a task ran"))
    for gone in (params, new):
        with pytest.raises(
            RuntimeError, match=r"argument\[0\]\[0\]\['b'\] \(float32\[8\]\) has been deleted"
        ) as caught:
            donating(gone, batch)
        assert "donate_argnums" in str(caught.value)
        assert "Pass what that call returned" in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_an_error_of_placing_is_not_its_own_cause(monkeypatch: pytest.MonkeyPatch):
    """Who follows the causes of an error that is its own comes to no end."""

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    compiled = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), mesh_of(2)).compile(chain(2), batch_of(2))
    monkeypatch.setattr("jaxpp_flax.engine.compiled.place", full)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        compiled(chain(2), batch_of(2))
    assert caught.value.__cause__ is None


def test_one_array_as_two_donated_arguments_is_refused_before_anything_runs():
    """As `ema = params` makes it: the first task that takes the array over would delete the other argument."""

    def step(params: Any, average: Any, batch: Any) -> Any:
        new, losses, _ = sgd_step(Std1F1B(2))(params, batch)
        return new, jax.tree.map(lambda old, now: (old + now) / 2, average, new), losses

    donating = mpmd_jit_with_loop(step, mesh_of(2), donate_argnums=(0, 1))
    params, batch = jax.device_put(chain(2), mesh_of(2).unstack[0].devices.flat[0]), batch_of(2)
    for _ in range(2):  # the mistake is refused again
        with pytest.raises(ValueError, match=r"argument\[0\].* and argument\[1\].* are one array.*Pass a copy"):
            donating(params, params, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    new, average, _ = donating(params, jax.tree.map(jnp.copy, params), batch)
    donating(new, average, batch)


def test_debug_print_in_a_stage(capfd: pytest.CaptureFixture[str]):
    def loss(params: Any, mb: Any) -> jax.Array:
        x = forward(params, mb["x"])
        jax.debug.print("largest {}", jnp.abs(x).max())
        return jnp.mean((x - mb["y"]) ** 2)

    pipelined = mpmd_jit_with_loop(gradients(Std1F1B(2), loss), mesh_of(2))
    actual = pipelined(chain(2), batch_of(2))
    check(actual, jax.tree.map(np.asarray, jax.jit(gradients(None))(chain(2), batch_of(2))))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == 2


def test_inference():
    params, x = chain(3), batch_of(1)["x"][0]
    pipelined = mpmd_jit(forward, mesh_of(3))
    result = pipelined(params, x)
    assert sorted(result.mpmd_idxs) == [2]
    check(result, np.asarray(jax.jit(forward)(params, x)))
    names = [t.name for t in pipelined.compile(params, x).program.tasks]
    assert {"fwd_0", "fwd_1", "fwd_2"} <= set(names)
    assert not [n for n in names if "bwd" in n]


def test_inference_with_more_stages_than_ranks():
    params, x = chain(4), batch_of(1)["x"][0]
    check(mpmd_jit(forward, mesh_of(2), num_stages=4)(params, x), np.asarray(jax.jit(forward)(params, x)))


def test_captured_arrays():
    """Arrays that the step closes over are placed once, and are not donated."""
    weights = chain(2)

    def closed(batch: Any) -> Any:
        return gradients(GPipe(2))(weights, batch)

    pipelined = mpmd_jit_with_loop(closed, mesh_of(2), donate_argnums=0)
    expected = jax.tree.map(np.asarray, jax.jit(gradients(None))(weights, batch_of(2)))
    for _ in range(2):
        check(pipelined(batch_of(2)), expected)
    assert not any(x.is_deleted() for x in jax.tree.leaves(weights))


def test_results_that_depend_on_no_loop():
    """Constants, arguments handed through, and one value returned twice."""

    def odd(params: Any, batch: Any) -> Any:
        losses, _ = gradients(Std1F1B(2))(params, batch)
        return losses, losses, params[0]["b"], jnp.int32(3), batch["x"].shape[0]

    args = chain(2), batch_of(2)
    check(mpmd_jit_with_loop(odd, mesh_of(2))(*args), jax.tree.map(np.asarray, jax.jit(odd)(*args)))


def test_results_that_lie_alike_share_a_sharding() -> None:
    """A call looks at each sharding of its arguments once, so a state of thousands of leaves costs little."""
    sgd = sgd_step(Std1F1B(2))
    step = mpmd_jit_with_loop(lambda params, batch: (params, sgd(params, batch)), mesh_of(2))
    leaves = jax.tree.leaves(step(chain(2), batch_of(2)))
    assert len({id(leaf.sharding) for leaf in leaves}) == len({leaf.sharding for leaf in leaves}) < len(leaves)
