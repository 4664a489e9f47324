"""The instruction loop: what is made for a program's instructions before its first step."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Transfer
from jaxpp_flax.engine.runtime import instruction_loop
from jaxpp_flax.engine.runtime.transport import routes
from jaxpp_flax.schedules import GPipe, Std1F1B, ZeroBubble
from tests.engine.toys import built, chain, gradients, mesh_of, sgd_step
from tests.helpers import batch_of, slow, tree_allclose


@pytest.mark.parametrize("make", [slow(GPipe), slow(Std1F1B), ZeroBubble])
def test_all_ranks_on_one_device_compute_the_same(make: Any):
    step, batch = sgd_step(make(3)), batch_of(4)
    one = MpmdMesh(jax.sharding.Mesh(np.array([jax.devices()[0]] * 3), ("stage",)), "stage")
    states: list[Any] = []
    for mesh in (mesh_of(3), one):
        function, state = mpmd_jit_with_loop(step, mesh, donate_argnums=0), jax.tree.map(jnp.array, chain(3))
        for _ in range(3):
            state, losses, _ = function(state, batch)
        states.append(jax.tree.map(np.asarray, (state, losses)))
    jax.tree.map(np.testing.assert_array_equal, *states)
    jax.tree.map(np.asarray, batch)  # the caller's arrays live on


class OneRankHere:
    """A mesh whose other ranks belong to other processes, as far as an instruction loop can tell."""

    local_ranks = (1,)

    def __init__(self, mesh: Any) -> None:
        self.unstack = mesh.unstack


def test_a_transfer_between_processes_is_planned_once_for_each_kind(monkeypatch: pytest.MonkeyPatch):
    """All microbatches share the plan of an edge; before, each transfer of a step had its own."""
    planned: list[Any] = []

    def counted(*arguments: Any) -> routes.Route:
        planned.append(arguments)
        return routes.plan(*arguments)

    monkeypatch.setattr(instruction_loop, "plan", counted)
    counts = list[tuple[int, int]]()
    for microbatches in (4, 12):
        compiled = mpmd_jit_with_loop(gradients(Std1F1B(3)), mesh_of(3)).compile(chain(3), batch_of(microbatches))
        window = SimpleNamespace(before_task=lambda: None)
        transport = SimpleNamespace(needs_global_order=False)
        connection = SimpleNamespace(window=window, transport=transport, group=SimpleNamespace())
        here: Any = OneRankHere(mesh_of(3))
        distributed: Any = SimpleNamespace(connection=connection)
        planned.clear()
        instruction_loop.Runtime(replace(compiled.executables, mesh=here, distributed=distributed))
        transfers = [i for i in compiled.program.instructions if isinstance(i, Transfer) and 1 in (i.source, i.target)]
        counts.append((len(planned), len(transfers)))
    assert counts == [(4, 16), (4, 48)]  # activations to the next rank, gradients to the one before


def test_what_a_rank_waits_for_is_named():
    def step(params: Any, batch: Any) -> Any:
        losses, grads = gradients(Std1F1B(2))(params, batch)
        return losses.sum() + grads[0]["b"].sum(), grads

    program = built(step, 2, chain(2), batch_of(2)).program
    transfers = [i for i in program.instructions if isinstance(i, Transfer)]
    texts = [instruction_loop._awaited(program, transfer) for transfer in transfers]
    assert texts[:4] == [
        "rank 1: what task fwd_bwd_1 (stage 1, microbatch 0) needs of rank 0",
        "rank 1: what task fwd_bwd_1 (stage 1, microbatch 1) needs of rank 0",
        "rank 0: what task bwd_0 (stage 0, microbatch 0) needs of rank 1",
        "rank 0: what task bwd_0 (stage 0, microbatch 1) needs of rank 1",
    ]
    unread = replace(transfers[0], received=(program.num_values,))
    assert instruction_loop._awaited(program, unread) == "rank 1: what a result of the step needs of rank 0"


@pytest.mark.parametrize("make", [Std1F1B, slow(ZeroBubble)])
@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
def test_a_guard_against_transfers_loses_no_state(make: Any, level: str):
    """A pipeline's own copies are its work; a guard refuses arguments before any of them is donated."""
    mesh, batch = mesh_of(2), batch_of(4)
    function = mpmd_jit_with_loop(sgd_step(make(2)), mesh, donate_argnums=0)
    host, expected = jax.device_get((chain(2), batch)), sgd_step(None)
    with jax.transfer_guard("disallow"):
        state, *_ = function(*host)
    with jax.transfer_guard(level):
        if level == "disallow_explicit":
            with pytest.raises(Exception, match="Disallowed"):
                function(state, batch)
            assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    x, y = (NamedSharding(mesh.unstack[rank], PartitionSpec()) for rank in range(2))
    batch = {"x": jax.device_put(batch["x"], x), "y": jax.device_put(batch["y"], y)}
    with jax.transfer_guard(level):
        state, *_ = function(state, batch)
    plain, *_ = expected(chain(2), batch_of(4))
    plain, *_ = expected(plain, batch_of(4))
    tree_allclose(jax.tree.map(np.asarray, state), plain, rtol=1e-5)


def test_ranks_on_one_device_get_their_own_copies_under_a_guard():
    one = MpmdMesh(jax.sharding.Mesh(np.array([jax.devices()[0]] * 2), ("stage",)), "stage")
    function = mpmd_jit_with_loop(sgd_step(Std1F1B(2)), one)
    state = jax.tree.map(lambda x: jax.device_put(x, jax.devices()[1]), chain(2))
    batch = jax.device_get(batch_of(4))
    with jax.transfer_guard("disallow"):
        function(state, batch)
