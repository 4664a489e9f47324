"""The text of a compiled step has the form in which JaxPP prints it."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxpp_flax.api as jaxpp

MESH = jaxpp.MpmdMesh(Mesh(np.array(jax.devices()[:2]), ("stage",)), "stage")


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params[:40]:
        x = jnp.tanh(x @ w)
    x = jaxpp.mark_stage_end(x)
    for w in params[40:]:
        x = x @ w
    return jnp.sum(x)


def train_step(step: Any, params: list[jax.Array], batch: jax.Array, *, schedule: Any) -> Any:
    gradient = jax.value_and_grad(loss_fn)
    _, grads = jaxpp.treduce(partial(gradient, params), batch * 2, schedule=schedule)
    return step + 1, jax.tree.map(jnp.subtract, params, grads), 5


@pytest.fixture(scope="module")
def text() -> str:
    params = [jnp.full((3, 3), 0.1)] * 41
    step = jaxpp.mpmd_jit_with_loop(partial(train_step, schedule=jaxpp.Std1F1B(2)), MESH)
    return str(step.trace_and_place(0, params, jnp.ones((2, 3))).closed_jaxpr)


def test_a_task_of_the_loop(text: str):
    head, _, rest = text.partition("task_name=fwd_0\n    ] ")
    lines = [*head.rpartition("task[\n")[2].rstrip().split("\n"), "task_name=fwd_0"]
    operands = rest[: re.search(r"\n    \S", rest).start()]  # pyright: ignore[reportOptionalMemberAccess]
    names, values = zip(*(line.strip().split("=", 1) for line in lines), strict=True)
    assert names == (
        "task_info", "call_jaxpr", "mpmd_idx", "latency", "call_counter", "donate_invars", "task_name",
    )  # fmt: skip
    assert values[:5] == ("(0, TaskType.FWD)", "jaxpr", "0", "1", "0")
    first, second = operands.splitlines()
    assert re.fullmatch(r"      [a-z ]+", second), "operands are broken as JAX breaks them"
    assert len(first) + len("    ] ") <= 83 < len(first) + len("    ] ") + len(second.split()[0]) + 1


def test_the_names_of_the_other_tasks(text: str):
    names = set(re.findall(r"task_name=(\S+)", text))
    assert {"fwd_0", "bwd_0"} < names
    rest = {name for name in names if not re.match(r"(fwd|bwd)_\d$", name)}
    assert all(re.fullmatch(r"before_loop_\d_[01]|after_loop_[01]_\d|fused_fwd_1_bwd_1", name) for name in rest), rest
    assert {name.rpartition("_")[0].rpartition("_")[0] for name in rest} >= {"before_loop", "after_loop"}
    fused = text[: text.index("task_name=fused_fwd_1_bwd_1")].rsplit("task_info=", 1)[1]
    assert fused.startswith("None")
    assert "latency=3" in fused
    backward = text[: text.index("task_name=bwd_0")].rsplit("task_info=", 1)[1]
    assert backward.startswith("(0, TaskType.BWD)")
    assert "latency=2" in backward


def test_variables_are_letters_and_constants_have_types(text: str):
    assert text.startswith("{ lambda ; a:")
    assert re.search(r"\bba:f32\[3,3\]", text)
    assert re.search(r", 5:i32\[\]\) }$", text)
    assert "_:f32[" in text.split("delete[mpmd_idx=")[0].splitlines()[-1]
