"""The preliminary place of a state, and moves from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.arrays import device_memory
from jaxpp_flax.engine.arrays.mesh import MpmdMesh, MpmdSharding
from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.state.placement import Ranks, check_fits, put_on_ranks
from jaxpp_flax.trainers.state.train_state import TrainState

MESH = MpmdMesh(Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("stage", "tensor")), "stage")


def state() -> TrainState:
    params = {f"w{i}": jnp.full((4, 2), float(i)) for i in range(6)}
    return TrainState(
        step=jnp.int32(0), params=params, opt_state={"mu": params}, model_state={"key": jax.random.key(0)}
    )


def places_of(tree: TrainState) -> TrainState:
    return jax.tree.unflatten(jax.tree.structure(tree), Ranks(mesh=MESH).preliminary(tree).values())


def test_each_rank_gets_neighbours_and_its_share():
    places = places_of(state())
    assert [places.params[f"w{i}"].ranks for i in range(6)] == [(0,), (0,), (1,), (1,), (2,), (2,)]
    assert places.opt_state["mu"] == places.params
    assert places.model_state["key"].ranks == places.step.ranks == (0, 1, 2)


def test_leaves_without_elements_have_a_rank():
    empty = {"buffer": jnp.zeros((0, 3))}
    first = TrainState(step=jnp.int32(0), params={"w": jnp.ones(4)}, opt_state={}, model_state=empty)
    assert places_of(first).model_state["buffer"].ranks == (0,)


def test_what_lies_on_ranks_stays_and_moves_on_request():
    first = state()
    places = places_of(first)
    there = MpmdSharding(MESH, {2}, P("tensor"))
    placed = put_on_ranks(MESH, first.params, {**places.params, "w0": there})
    assert not first.params["w0"].is_deleted()
    again = places_of(TrainState(step=first.step, params=placed, opt_state={"mu": first.params}, model_state={}))
    assert again.params["w0"] == there
    assert again.opt_state["mu"]["w0"].ranks == (2,)
    moved = put_on_ranks(MESH, placed, places.params)
    assert moved["w1"].first_mpmd_replica is placed["w1"].first_mpmd_replica
    assert placed["w0"].is_deleted()
    np.testing.assert_array_equal(np.asarray(moved["w0"]), np.zeros((4, 2)))
    mixed = put_on_ranks(MESH, {**moved, "w5": first.params["w5"]}, places.params)
    assert {name: leaf.sharding for name, leaf in mixed.items()} == places.params


def test_a_value_on_all_ranks_narrows_without_a_copy():
    key = state().model_state
    everywhere = {"key": MpmdSharding(MESH, {0, 1, 2}, P())}
    placed = put_on_ranks(MESH, key, everywhere)
    narrow = put_on_ranks(MESH, placed, {"key": MpmdSharding(MESH, {1}, P())})
    assert narrow["key"].mpmd_idxs == (1,)
    assert jnp.array_equal(jax.random.key_data(narrow["key"].first_mpmd_replica), jax.random.key_data(key["key"]))


def test_a_share_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch):
    first = state()
    places = places_of(first)
    check_fits(first, places)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 100)
    with pytest.raises(
        ModelError, match=r"the share of .* is 140 B \(step 4 B, params 64 B, opt_state 64 B, .*params/w1 with 32 B"
    ):
        check_fits(first, places)
    placed = put_on_ranks(MESH, first.params, places.params)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: 64 * 6 + 24)
    check_fits(
        TrainState(step=first.step, params=placed, opt_state={"mu": first.params}, model_state={}),
        places_without_key(places),
    )


def places_without_key(places: TrainState) -> TrainState:
    return TrainState(step=places.step, params=places.params, opt_state=places.opt_state, model_state={})
