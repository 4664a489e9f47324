"""A variable of JaxPP's that is set has no effect, and is told once."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxpp_flax.api as jaxpp
from jaxpp_flax.api.steps.environment import warn_of_variables


def test_each_variable_is_named_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPP_ENABLE_LICM", "1")
    monkeypatch.setenv("JAXPP_OF_A_LATER_VERSION", "x")
    monkeypatch.setenv("JAXPP_FLAX_VERIFY", "1")
    mesh = jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:1]), ("stage",)), "stage")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for function in (jaxpp.mpmd_jit_with_loop, jaxpp.mpmd_jit_by_yield, jaxpp.mpmd_jit_with_loop):
            function(lambda x: x, mesh)
        jaxpp.mpmd_jit_rev(lambda x: x, mesh, out_refs={0})
    assert sorted(str(warning.message) for warning in told) == [
        "JAXPP_ENABLE_LICM='1' has no effect in jaxpp_flax: compute outside of the loop what does not change in it.",
        "JAXPP_OF_A_LATER_VERSION='x' has no effect in jaxpp_flax: "
        "`docs/reference/jaxpp_names.md` lists the variables of JaxPP.",
    ]


def test_without_variables_nothing_is_told():
    warn_of_variables({"JAXPP_FLAX_DUMP": "folder", "PATH": "/bin"})
