"""How results are wanted: `out_specs` and `out_shardings` hold wherever a result comes from."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.program.program import Free, Program, Run
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import chain, gradients, mesh_of
from tests.helpers import batch_of, tree_allclose

WANTED = {
    "argument": P("x"),
    "parameter": (P("x"), P(None, "x")),
    "update": (P("x"), P(None, "x"), None),
    "gradient": (P("x"), P(None, "x")),
    "losses": P("x"),
    "constant": P("x"),
}


def step(params: Any, batch: Any, argument: jax.Array) -> Any:
    """Results of every origin: as it came, from an update, from the loop, known beforehand; and some of them twice."""
    losses, grads = gradients(Std1F1B(2))(params, batch)
    updated = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return {
        "argument": argument,
        "parameter": (params[0]["w"], params[1]["w"]),
        "update": (updated[0]["w"], updated[0]["w"], updated[0]["w"]),
        "gradient": (grads[1]["w"], grads[1]["w"]),
        "losses": losses,
        "constant": np.arange(4, dtype=np.float32),
    }


def last_runs_free_what_they_read(program: Program) -> None:
    """What comes as a result in another form alone is not kept beside it; an argument stays the caller's."""
    kept = {value for ranks in (*program.arguments, *program.results) for value in ranks.values()}
    own = [
        (run, behind)
        for run, behind in itertools.pairwise([*program.instructions, None])
        if isinstance(run, Run) and program.tasks[run.task].name.startswith("results_")
    ]
    freed = {value for _, free in own if isinstance(free, Free) for value in free.values}
    assert freed == {value for run, _ in own for value in run.inputs if value not in kept} != set()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_results_are_partitioned_as_they_are_wanted(kind: AxisType):
    mesh = mesh_of(2, kind, x=2)
    arguments = chain(2), batch_of(2), jnp.arange(8.0)
    pipelined = mpmd_jit_with_loop(step, mesh, out_specs=WANTED, donate_argnums=2)
    compiled = pipelined.compile(*arguments)
    compiled.program.verify()
    last_runs_free_what_they_read(compiled.program)
    results = pipelined(*arguments)
    expected = jax.jit(step)(*(chain(2), batch_of(2), jnp.arange(8.0)))
    # A few sums of float32 in another order: 1e-6 is sixteen units in the last place.
    tree_allclose(results, expected, rtol=1e-6)

    def check(result: Any, promised: Any, wanted: P | None) -> None:
        for rank, part in result._partially_addressable_arrays.items():
            if wanted is not None:
                there = NamedSharding(mesh.unstack[rank], wanted)
                assert part.sharding.is_equivalent_to(there, part.ndim)
            assert part.sharding.is_equivalent_to(promised.local_sharding(rank), part.ndim)
        assert result.sharding == promised

    jax.tree.map(check, results, compiled.out_shardings, WANTED, is_leaf=lambda x: x is None)


def test_no_task_for_a_result_that_comes_as_it_is_wanted():
    mesh = mesh_of(2, x=2)
    plain, asked = (
        mpmd_jit_with_loop(step, mesh, out_specs=specs).place(chain(2), batch_of(2), jnp.arange(8.0)).program
        for specs in (None, P())
    )
    assert [t.name for t in asked.tasks] == [t.name for t in plain.tasks]
