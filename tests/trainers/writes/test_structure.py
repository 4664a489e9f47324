"""What a call changes beside values is found without copies of the model: these are made if there is something."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from flax import nnx

from jaxpp_flax.trainers.errors import ModelError
from jaxpp_flax.trainers.writes.structure import changes_of


class Model(nnx.Module):
    def __init__(self) -> None:
        self.inner, self.count = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))]), 1
        self.one, self.other = nnx.Variable(jnp.zeros(2)), nnx.Variable(jnp.zeros(2))


def tie(model: Model) -> None:
    model.other = model.one


def retype(model: Model) -> None:
    model.one = nnx.Param(jnp.zeros(2))


def sow(model: Model) -> None:
    model.sown = nnx.Intermediate(jnp.zeros(2))


def count(model: Model) -> None:
    model.count = 2


def make(model: Model) -> None:
    model.inner[0].made = nnx.Variable(jnp.zeros(2))


def changed(change):
    model, before = Model(), Model()
    change(model)
    return changes_of(model, before, "the call")


def test_values_and_what_is_sown_are_no_change(monkeypatch):
    monkeypatch.setattr("jaxpp_flax.trainers.writes.structure._without_sown", None)  # copies nothing
    assert changed(lambda model: model.one.set_value(jnp.ones(2))) is None
    assert changed(sow) is None


def test_other_attributes_and_variables_are_changes():
    assert "count from 1 to 2" in changed(count).message
    assert "makes inner/0/made" in changed(make).message
    for change in (tie, retype):
        with pytest.raises(ModelError, match=r"other|one"):
            changed(change)
