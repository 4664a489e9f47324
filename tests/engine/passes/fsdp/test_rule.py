"""The setting `fsdp=`, checked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.passes.fsdp.rule import FsdpRule
from jaxpp_flax.engine.tracing.ir import Constant
from jaxpp_flax.schedules.gathers import check_fsdp


@pytest.mark.parametrize("fsdp", ["step", "microbatch", 1, 1 << 40])
def test_settings(fsdp: Any):
    assert check_fsdp(fsdp) == fsdp
    mesh: Any = None
    rule = FsdpRule.of(fsdp, mesh, {})
    if fsdp == "microbatch":
        assert rule is None
        return
    assert rule is not None
    assert rule.limit == (None if fsdp == "step" else fsdp)
    assert rule.name_of(Constant(1, jax.typeof(jnp.int32(1)))) == "a constant"


@pytest.mark.parametrize(
    ("fsdp", "kind", "text"),
    [
        ("once", ValueError, r"fsdp='once' is no known setting\. Use \"step\" .* \"microbatch\" .* or the bytes"),
        (0, ValueError, r"fsdp=0: a limit must be at least 1 byte"),
        (True, TypeError, r"fsdp must be a word or a whole number of bytes, got bool: True"),
        (None, TypeError, r"got NoneType: None"),
        (1e9, TypeError, r"got float: 1000000000\.0"),
    ],
)
def test_other_settings_are_refused(fsdp: Any, kind: type[Exception], text: str):
    with pytest.raises(kind, match=text):
        check_fsdp(fsdp)
