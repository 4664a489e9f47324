"""The setting `fsdp=`, checked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.tracing.ir import Constant
from jaxpp_flax.schedules.gathers import check_fsdp


def test_settings():
    mesh: Any = None
    assert check_fsdp("microbatch") == "microbatch"
    assert check_fsdp("step") == "step"
    rule = FsdpRule(mesh=mesh, names={})
    assert rule.name_of(Constant(1, jax.typeof(jnp.int32(1)))) == "a constant"


@pytest.mark.parametrize("fsdp", ["once", 1 << 30, True, None])
def test_other_settings_are_refused(fsdp: Any):
    with pytest.raises(ValueError, match=rf"fsdp={fsdp!r} is no known setting\. Use \"step\" .* or \"microbatch\""):
        check_fsdp(fsdp)
