"""Specs of arguments and results that a pipeline cannot keep."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.tracing.markers import mark_stage_end
from tests.matrix.harness import mesh_of


def test_partial_sums_are_refused_by_name():
    made = mesh_of(2, data=2)
    jax_mesh = jax.sharding.Mesh(made.jax_mesh.devices, made.jax_mesh.axis_names, axis_types=(AxisType.Explicit,) * 2)
    mesh, w = type(made)(jax_mesh, made.mpmd_axis_name), jnp.ones((4, 4))
    spec = P(unreduced={"data"})
    typed = NamedSharding(jax_mesh, spec)

    def apply(w: Any, x: Any) -> Any:
        return mark_stage_end(x @ w) @ w

    cases = {
        r"in_specs\[0\]": (w, {"in_specs": (spec, None)}),
        r"out_specs": (w, {"out_specs": typed}),
        r"argument\[0\]": (jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=typed), {}),
    }
    for name, (passed, options) in cases.items():
        with pytest.raises(ValueError, match=name + r" has the spec P\(unreduced=.*neither enter nor leave.*reshard"):
            mpmd_jit(apply, mesh, **options).compile(passed, w)
