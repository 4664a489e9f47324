"""Steps of this front: the place of values that no stage reads, steps that are placed and not compiled, dead marks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxpp_flax
import jaxpp_flax.api as jaxpp
from jaxpp_flax.engine.program.program import Transfer
from tests.helpers import tree_allclose

STAGES = 3
MESH = jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:STAGES]), ("stage",)), "stage")
PARAMS = list(jax.random.normal(jax.random.key(1), (STAGES, 4, 4)) / 2)
BATCH = jax.random.normal(jax.random.key(0), (2, 2, 4))
STATE = {"step": 3, "key": jax.random.key(5), "scale": jnp.float32(2), "params": PARAMS, "unread": jnp.ones(2)}


def activations(params: list[jax.Array], x: jax.Array, *, final_mark: bool = False) -> list[jax.Array]:
    made = []
    for number, w in enumerate(params, start=1):
        x = jnp.tanh(x @ w)
        if final_mark or number < len(params):
            x = jaxpp.mark_stage_end(x)
        made.append(x)
    return made


def train_step(state: dict[str, Any], batch: jax.Array) -> dict[str, Any]:
    gradient = jax.grad(lambda params, x: jnp.mean(activations(params, x)[-1] ** 2))
    grads = jaxpp.treduce(
        partial(gradient, state["params"]), batch, schedule=jaxpp.Std1F1B(STAGES), operation=jaxpp.Add
    )
    return {
        "step": state["step"] + 1,
        "key": jax.random.split(state["key"])[0],
        "scale": state["scale"],
        "rate": 0.5 / (state["step"] + 1),
        "seven": 7,
        "params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads),
    }


class TestIdleValues:
    def test_every_rank_computes_them_without_a_transfer(self):
        step = jaxpp.mpmd_jit_with_loop(train_step, MESH)
        expected, actual = jax.jit(train_step)(STATE, BATCH), step(STATE, BATCH)
        found = {name: leaf.mpmd_idxs for name, leaf in actual.items() if name != "params"}
        # Compiled into several programs, a quotient might be rounded differently.
        assert found == {**dict.fromkeys(["step", "key", "scale", "seven"], (0, 1, 2)), "rate": (0,)}
        key = actual.pop("key").as_jax_array()
        assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(expected.pop("key")))
        tree_allclose(actual, expected)
        with_none = jaxpp.mpmd_jit_with_loop(lambda state, batch: train_step({**STATE, **state}, batch), MESH)
        transfers = [
            sum(isinstance(i, Transfer) for i in function.compile(state, BATCH).program.instructions)
            for function, state in ((step, STATE), (with_none, {"params": PARAMS}))
        ]
        assert transfers[0] == transfers[1], "a value that is idle costs no transfer"

    def test_the_new_value_is_taken_where_it_lies(self):
        step = jaxpp.mpmd_jit_with_loop(train_step, MESH)
        first = step(STATE, BATCH)
        second = step({**STATE, "step": first["step"]}, BATCH)
        assert [int(part) for part in second["step"]._partially_addressable_arrays.values()] == [5, 5, 5]

    def test_the_engine_keeps_them_on_one_rank(self):
        step = jaxpp_flax.mpmd_jit_with_loop(train_step, MESH)
        assert step(STATE, BATCH)["step"].mpmd_idxs == (0,)

    def test_a_flag_made_of_gradients_of_several_ranks_is_not_idle(self):
        def with_flag(state: Any, batch: jax.Array) -> Any:
            new = train_step(state, batch)["params"]
            return state["step"] + jnp.all(jnp.stack([jnp.isfinite(p).all() for p in new]))

        counted = jaxpp.mpmd_jit_with_loop(with_flag, MESH)(STATE, BATCH)
        assert (int(counted), counted.mpmd_idxs) == (4, (0,))

    def test_weak_types_are_those_of_jit(self):
        expected, actual = jax.jit(train_step)(STATE, BATCH), jaxpp.mpmd_jit_with_loop(train_step, MESH)(STATE, BATCH)
        for name in ("step", "rate", "seven", "scale"):
            kinds = {expected[name].weak_type, actual[name].weak_type}
            kinds |= {part.weak_type for part in actual[name]._partially_addressable_arrays.values()}
            assert len(kinds) == 1, name


class TestPlacedStep:
    def test_it_says_where_arguments_go_and_compiles_nothing(self):
        step = jaxpp.mpmd_jit_with_loop(train_step, MESH)
        placed = step.trace_and_place(STATE, BATCH)
        (state, batch), kwargs = placed.in_shardings
        assert [sorted(sharding.mesh_ids) for sharding in state["params"]] == [[0], [1], [2]]
        assert (sorted(state["step"].mesh_ids), sorted(state["unread"].mesh_ids)) == ([0, 1, 2], [])
        assert (sorted(batch.mesh_ids), kwargs, placed.mpmd_mesh) == ([0], {}, MESH)
        assert " = fwd_0__0(" in placed.closed_jaxpr
        compiled = placed.infer_intermediate_shardings().mpmdify()
        assert compiled is step.compile(STATE, BATCH), "the plan is used again"
        assert jax.tree.leaves(compiled.in_shardings) == jax.tree.leaves(placed.in_shardings)
        tree_allclose(placed(STATE, BATCH)["params"], jax.jit(train_step)(STATE, BATCH)["params"])

    def test_it_never_asks_xla(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(jax.stages.Traced, "lower", None)
        jaxpp.mpmd_jit_with_loop(train_step, MESH).trace_and_place(STATE, BATCH)


class TestDeadMarks:
    @pytest.mark.parametrize("final_mark", [False, True])
    @pytest.mark.parametrize("kept", range(STAGES))
    def test_stages_are_counted_before_dead_work_goes(self, kept: int, final_mark: bool):
        def features(params: list[jax.Array], x: jax.Array) -> jax.Array:
            # In a jit of its own, as Flax's `nn.jit` has it.
            return jax.jit(partial(activations, final_mark=final_mark))(params, x)[kept] + params[1][0]

        step = jaxpp.mpmd_jit_by_yield(features, MESH)
        tree_allclose(step(PARAMS, BATCH[0]), jax.jit(features)(PARAMS, BATCH[0]))
        stages = min(kept + 2, STAGES)
        assert len(step.compile(PARAMS, BATCH[0]).stages) == stages
        unread = [sorted(s.mesh_ids) for s in step.compile(PARAMS, BATCH[0]).in_shardings[0][0][stages:]]
        assert unread == [[]] * (STAGES - stages)

    def test_too_few_marks_are_refused_with_the_line_of_the_program(self):
        def one_mark(params: list[jax.Array], x: jax.Array) -> jax.Array:
            return activations(params[:2], x)[-1]

        with pytest.raises(ValueError, match=r"needs 2 marks .* holds 1: unnamed at .*test_step\.py:\d+"):
            jaxpp.mpmd_jit_by_yield(one_mark, MESH)(PARAMS, BATCH[0])

    def test_the_number_of_stages_must_fit_to_the_ranks(self):
        with pytest.raises(ValueError, match="num_stages=4 cannot be divided evenly"):
            jaxpp.mpmd_jit_by_yield(activations, MESH, target_num_stages=4)
