"""Tasks have names in a profile, and compiled code has the names of the user's scopes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit
from jaxpp_flax.engine.runtime import instruction_loop
from jaxpp_flax.engine.runtime.measuring.trace_names import instruction_names
from jaxpp_flax.engine.tracing.markers import mark_stage_end

MESH = MpmdMesh(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
ARGUMENTS = ([jnp.eye(2), jnp.eye(2)], jnp.ones((1, 2)))


def forward(w, x):
    with jax.named_scope("my_scope"):
        x = jnp.tanh(x @ w[0])
    return mark_stage_end(x) @ w[1]


def test_the_names_of_instructions():
    compiled = mpmd_jit(forward, MESH).compile(*ARGUMENTS)
    assert {"fwd_0 microbatch 0", "transfer 0 to 1"} <= set(instruction_names(compiled.program))


def test_compiled_code_keeps_the_scopes():
    compiled = mpmd_jit(forward, MESH).compile(*ARGUMENTS)
    assert "my_scope/tanh" in compiled._executables.tasks[1].as_text()


def test_a_step_makes_names_only_while_a_profile_runs(tmp_path, monkeypatch):
    seen = []
    named = instruction_loop.named
    monkeypatch.setattr(instruction_loop, "named", lambda *args: seen.append(1) or named(*args))
    step = mpmd_jit(forward, MESH)
    plain = step(*ARGUMENTS)
    assert not seen
    with jax.profiler.trace(tmp_path):
        profiled = step(*ARGUMENTS)
    assert len(seen) == 1
    assert (plain == profiled).all()
