"""What the names of `jaxpp.api` do, beyond the programs of its documentation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxpp_flax.api as jaxpp
from jaxpp_flax.api import distributed_utils
from jaxpp_flax.engine.passes.place import PlacementWarning
from jaxpp_flax.engine.program.program import Free, Run, Transfer
from tests.helpers import tree_allclose

STAGES = 2
BATCH = jax.random.normal(jax.random.key(0), (4, 2, 8))
PARAMS = list(jax.random.normal(jax.random.key(1), (STAGES, 8, 8)) / 3)


def mesh_of(stages: int = STAGES, data: int = 1) -> jaxpp.MpmdMesh:
    devices = np.array(jax.devices()[: stages * data]).reshape(stages, data)
    return jaxpp.MpmdMesh(Mesh(devices, ("stage", "data")), "stage")


def forward(params: list[jax.Array], x: jax.Array, *, final_mark: bool = False) -> jax.Array:
    for number, w in enumerate(params, start=1):
        x = jnp.tanh(x @ w)
        if final_mark or number < len(params):
            x = jaxpp.mark_stage_end(x)
    return x


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean((forward(params, x) - 1) ** 2)


def gradients(params: Any, batch: Any) -> Any:
    return jaxpp.treduce(partial(jax.value_and_grad(loss_fn), params), batch, schedule=jaxpp.Std1F1B(STAGES))


@cache
def pipelined() -> Any:
    """`gradients` as a pipeline, for all tests that ask something of it."""
    return jaxpp.mpmd_jit_with_loop(gradients, mesh_of())


@cache
def expected() -> Any:
    return jax.jit(gradients)(PARAMS, BATCH)


def compare(step: Callable[..., Any], *args: Any, mesh: jaxpp.MpmdMesh | None = None) -> Any:
    """The pipelined step's results, after comparing them with those of plain `jax.jit`; no warning may appear."""
    expected = jax.jit(step)(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = jaxpp.mpmd_jit_with_loop(step, mesh or mesh_of())(*args)
    tree_allclose(actual, expected)
    return actual


class TestAcrossRanks:
    def test_all_reduce_of_scalars_clips_by_the_global_norm(self):
        def step(params: Any, batch: Any) -> Any:
            losses, grads = gradients(params, batch)
            norm = jnp.sqrt(jaxpp.cross_mpmd_all_reduce(*(jnp.sum(g**2) for g in grads)))
            return losses, [g / jnp.maximum(norm, 1) for g in grads], norm

        _, grads, _ = compare(step, PARAMS, BATCH)
        assert [g.mpmd_idxs for g in grads] == [(0,), (1,)]

    def test_all_reduce_of_large_arrays_warns_of_nothing(self):
        def step(total: Callable[..., Any], params: Any, batch: Any) -> Any:
            _, grads = gradients(params, batch)
            return total(*(jnp.tile(g, (4, 4)) for g in grads))  # 4 KiB each

        compare(partial(step, jaxpp.cross_mpmd_all_reduce), PARAMS, BATCH)
        plain = partial(step, lambda *arrays: sum(arrays[1:], arrays[0]))
        with pytest.warns(PlacementWarning, match="mixes arrays of several ranks"):
            jaxpp.mpmd_jit_with_loop(plain, mesh_of()).compile(PARAMS, BATCH)

    def test_stack(self):
        def step(params: Any, batch: Any) -> Any:
            _, grads = gradients(params, batch)
            norms = jaxpp.cross_mpmd_stack([jnp.linalg.norm(g) for g in grads])
            return norms, [jaxpp.cross_mpmd_stack([jnp.tile(g, (4, 4)) for g in grads], axis=a) for a in (0, 1, -1)]

        norms, _ = compare(step, PARAMS, BATCH)
        assert norms.shape == (STAGES,)

    def test_they_are_differentiable_and_work_alone(self):
        x = jnp.arange(3.0)
        assert jax.grad(lambda x: jaxpp.cross_mpmd_all_reduce(x, x * x).sum())(x).tolist() == [1, 3, 5]
        np.testing.assert_array_equal(jaxpp.cross_mpmd_stack([x, x + 1], 1), np.stack([x, x + 1], 1))

    @pytest.mark.parametrize("function", [jaxpp.cross_mpmd_all_reduce, lambda *a: jaxpp.cross_mpmd_stack(a)])
    def test_refusals(self, function: Callable[..., Any]):
        with pytest.raises(ValueError, match="got no array"):
            function()
        with pytest.raises(TypeError, match=r"array 1 is int32\[3\], array 0 is float32\[3\]. All .* cast or reshape"):
            function(jnp.ones(3), jnp.ones(3, jnp.int32))
        with pytest.raises(TypeError, match=r"array 2 is float32\[2\], array 0 is float32\[3\]"):
            function(jnp.ones(3), jnp.ones(3), jnp.ones(2))


class TestPlaceWith:
    def test_a_value_that_no_stage_reads(self):
        def step(params: Any, counter: Any, batch: Any, *, hint: bool = True) -> Any:
            losses, grads = gradients(params, batch)
            count = {"count": counter + 1}
            return losses, grads, jaxpp.place_with(count, grads[1]) if hint else count

        args = PARAMS, jnp.arange(3), BATCH
        *_, placed = compare(step, *args)
        assert placed["count"].mpmd_idxs == (1,)
        alone = jaxpp.mpmd_jit_with_loop(partial(step, hint=False), mesh_of()).compile(*args)
        assert alone.out_shardings[2]["count"].mesh_ids == {0, 1}, "where it goes without the hint"

    def test_a_value_of_another_rank_is_sent(self):
        def step(params: Any, batch: Any) -> Any:
            _, grads = gradients(params, batch)
            return jaxpp.place_with(grads[0], params[1]) * 2

        assert compare(step, PARAMS, BATCH).mpmd_idxs == (1,)

    def test_inside_of_the_loop_it_costs_nothing(self):
        def loss(params: Any, x: jax.Array) -> jax.Array:
            params = [jaxpp.place_with(w, params[0]) for w in params]
            return loss_fn(params, x)

        def step(params: Any, batch: Any) -> Any:
            return jaxpp.treduce(partial(jax.value_and_grad(loss), params), batch, schedule=jaxpp.Std1F1B(STAGES))

        hinted = jaxpp.mpmd_jit_with_loop(step, mesh_of()).compile(PARAMS, BATCH)
        tree_allclose(hinted(PARAMS, BATCH), expected())
        assert str(hinted.closed_jaxpr) == str(pipelined().compile(PARAMS, BATCH).closed_jaxpr)

    def test_it_is_the_identity_elsewhere(self):
        x, w = jnp.arange(3.0), jnp.ones((2, 2))
        np.testing.assert_array_equal(jaxpp.place_with(x, w), x)
        np.testing.assert_array_equal(jax.grad(lambda x: (jaxpp.place_with(x, w) ** 2).sum())(x), 2 * x)
        np.testing.assert_array_equal(jax.vmap(lambda a: jaxpp.place_with(a, w))(x), x)
        with pytest.raises(ValueError, match="got no array to place beside: `like` is"):
            jaxpp.place_with(x, {})


class TestByYield:
    @pytest.mark.parametrize("final_mark", [True, False])
    def test_forward(self, final_mark: bool):
        function = jaxpp.mpmd_jit_by_yield(partial(forward, final_mark=final_mark), mpmd_mesh=mesh_of())
        actual = function(PARAMS, BATCH[0])
        tree_allclose(actual, jax.jit(forward)(PARAMS, BATCH[0]))
        assert actual.mpmd_idxs == (1,)

    def test_two_stages_on_each_rank(self):
        function = jaxpp.mpmd_jit_by_yield(forward, mesh_of(), target_num_stages=4, in_shardings=(P(), P("data")))
        four = [*PARAMS, *PARAMS]
        tree_allclose(function(four, BATCH[0]), jax.jit(forward)(four, BATCH[0]))
        (params, _), kwargs = function.in_shardings
        assert [sorted(p.mesh_ids) for p in params] == [[0], [1], [0], [1]]
        assert kwargs == {}

    def test_a_gradient(self):
        function = jaxpp.mpmd_jit_by_yield(jax.value_and_grad(loss_fn), mesh_of())
        _, grads = function(PARAMS, BATCH[0])
        tree_allclose(function(PARAMS, BATCH[0]), jax.jit(jax.value_and_grad(loss_fn))(PARAMS, BATCH[0]))
        assert [g.mpmd_idxs for g in grads] == [(0,), (1,)]


class TestLoops:
    def test_the_axis_of_the_microbatches(self):
        def step(params: Any, batch: Any) -> Any:
            return jaxpp.treduce(
                lambda x: (forward(params, x), jnp.sum(x)),
                batch, axis=1, schedule=jaxpp.Std1F1B(STAGES), operation=(jaxpp.Concat(1), jaxpp.Max),
            )  # fmt: skip

        def by_index(params: Any, batch: Any) -> Any:
            return jaxpp.treduce_i(
                lambda i: (forward(params, batch[:, i]), jnp.sum(batch)), 4, jaxpp.Std1F1B(STAGES), axis=1
            )

        swapped = jnp.swapaxes(BATCH, 0, 1)
        stacked, largest = jax.jit(step)(PARAMS, swapped)
        assert stacked.shape == (2, 4, 8)
        np.testing.assert_allclose(largest, BATCH.sum((1, 2)).max(), rtol=1e-5)
        np.testing.assert_allclose(jax.jit(by_index)(PARAMS, swapped)[0], stacked, rtol=1e-5)
        with pytest.raises(ValueError, match=r"axis=1 and the operation .* `axis` is for the default operation"):
            jaxpp.treduce_i(lambda i: i, 4, axis=1, operation=jaxpp.Add)

    def test_microbatches_sharded_over_an_explicit_axis(self):
        mesh = jaxpp.MpmdMesh(jax.make_mesh((2, 2), ("stage", "data"), devices=jax.devices()[:4]), "stage")
        step = jaxpp.mpmd_jit_with_loop(gradients, mesh, in_specs=(P(), P("data")))
        tree_allclose(step(PARAMS, BATCH), expected())

    def test_contexts_around_a_call(self):
        mesh = mesh_of(data=2)
        step = jaxpp.mpmd_jit_with_loop(gradients, mesh, in_specs=(P(), P(None, "data"))).compile(PARAMS, BATCH)
        with pytest.warns(DeprecationWarning, match="with mesh"), mesh.jax_mesh:  # JAX's own, of the older form
            tree_allclose(step(PARAMS, BATCH), expected())
        with jax.set_mesh(mesh.jax_mesh):
            tree_allclose(step(PARAMS, BATCH), expected())
        with jax.set_mesh(None):
            tree_allclose(step(PARAMS, BATCH), expected())


class TestCompiled:
    def test_the_text_has_a_line_for_each_task_transfer_and_deletion(self):
        compiled = pipelined().compile(PARAMS, BATCH)
        text, instructions = str(compiled.closed_jaxpr), compiled.program.instructions
        assert len(text.splitlines()) == len(instructions)
        counts = {kind: sum(isinstance(i, kind) for i in instructions) for kind in (Run, Transfer, Free)}
        assert text.count("(") == counts[Run]
        assert text.count(": send ") + text.count(" -> ") == 2 * counts[Transfer]
        assert text.count(": free ") == counts[Free]

    def test_where_arguments_go(self):
        step = jaxpp.mpmd_jit_with_loop(lambda params, *, batch: gradients(params, batch), mesh_of())
        (params,), kwargs = step.trace_and_place(PARAMS, batch=BATCH).in_shardings
        assert [p.mesh_ids for p in params] == [{0}, {1}]
        assert kwargs["batch"].mesh_ids == {0}

    def test_task_times(self):
        step = pipelined()
        before_it = step(PARAMS, BATCH)
        with jaxpp.collect_task_times_ms() as times:
            actual = step(PARAMS, BATCH)
            with jaxpp.collect_task_times_ms() as inner, jaxpp.collect_task_times_ms(enabled=False) as nothing:
                step(PARAMS, BATCH)
        assert nothing is None
        assert times.keys() == inner.keys() == {t.name for t in step.compile(PARAMS, BATCH).program.tasks}
        assert all(len(times[f"fwd_{stage}"]) == len(BATCH) for stage in range(STAGES - 1))
        assert all(ms > 0 for listed in times.values() for ms in listed)
        tree_allclose(actual, before_it, rtol=0, atol=0)
        before = {name: len(listed) for name, listed in times.items()}
        step(PARAMS, BATCH)
        assert before == {name: len(listed) for name, listed in times.items()}, "nothing is collected outside"

    def test_compiler_options_reach_xla(self):
        step = jaxpp.mpmd_jit_with_loop(gradients, mesh_of(), compiler_options={"no_such_option": 1})
        with pytest.raises(Exception, match="no_such_option"):
            step.compile(PARAMS, BATCH)
        fast = jaxpp.mpmd_jit_with_loop(gradients, mesh_of(), compiler_options={"xla_backend_optimization_level": 0})
        tree_allclose(fast(PARAMS, BATCH), expected())

    @pytest.mark.parametrize("function", [jaxpp.mpmd_jit_with_loop, jaxpp.mpmd_jit_by_yield])
    def test_abstracted_axes_are_refused(self, function: Callable[..., Any]):
        with pytest.raises(NotImplementedError, match=r"abstracted_axes=\('n',\): shapes are fixed .* pad batches"):
            function(gradients, mesh_of(), abstracted_axes=("n",))


class TestDistributedMain:
    def test_in_one_process(self):
        ran: list[int] = []
        distributed_utils.distributed_main(lambda: ran.append(1))
        assert ran == [1]

    def test_what_the_launcher_sets(self):
        environment = {"JAX_COORDINATOR_IP": "127.0.0.1", "JAX_COORDINATOR_PORT": "99", "NNODES": "2", "NODE_RANK": "1"}
        settings = distributed_utils._settings({**environment, "N_GPUS": "2"})
        expected = {"coordinator_address": "127.0.0.1:99", "num_processes": 2, "process_id": 1}
        assert settings == {**expected, "local_device_ids": [0, 1]}
        assert distributed_utils._settings(environment) == expected
        del environment["NNODES"]
        with pytest.raises(ValueError, match=r"but not \['NNODES'\]. Set all of .* or none of them"):
            distributed_utils._settings(environment)
