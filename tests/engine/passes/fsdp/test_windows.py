"""When gathers run: once, in windows under a limit, or inside the tasks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpp_flax.engine.passes.fsdp.rule import Gather
from jaxpp_flax.engine.passes.fsdp.windows import plan_gathers
from jaxpp_flax.engine.tracing.ir import Value

AVAL = jax.make_jaxpr(lambda x: x)(jnp.ones(2)).in_avals[0]
A, B, C, DATA = (Value(AVAL) for _ in range(4))
NAMES = {A: "a", B: "b", C: "c"}


def planned(tasks: Sequence[tuple[int, Sequence[Any]]], order: Sequence[int], limit: int | None) -> list[str]:
    """The gathers before each task; `tasks` gives the rank of each and what it reads."""
    part = SimpleNamespace(tasks=[SimpleNamespace(graph=SimpleNamespace(inputs=tuple(read))) for _, read in tasks])
    loop: Any = SimpleNamespace(
        partition=part,
        rank_of_task=lambda task: tasks[task][0],
        gathers={v: Gather(equation=None, spec=None, nbytes=n) for v, n in ((A, 4), (B, 4), (C, 1))},  # type: ignore[arg-type]
        gather_limit=limit,
        schedule=SimpleNamespace(num_ranks=1 + max(rank for rank, _ in tasks)),
    )
    return ["".join(NAMES[v] for v in values) for values in plan_gathers(loop, order)]


ONE_RANK = [(0, [A, C, DATA]), (0, [B, C])]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, ["ac", "b", "", "", "", ""]),
        (9, ["ac", "b", "", "", "", ""]),
        (5, ["ac", "b", "", "a", "", "b"]),  # the small one, which both read, stays
    ],
)
def test_a_rank_forgets_what_it_reads_last(limit: int | None, expected: list[str]):
    assert planned(ONE_RANK, [0, 1, 1, 0, 0, 1], limit) == expected


def test_what_is_not_read_again_goes_first():
    tasks = [(0, [A]), (0, [B]), (0, [C])]
    # When b comes, c is read again and a is not; when a comes again nothing is left to forget but b.
    assert planned(tasks, [0, 2, 1, 2], 5) == ["a", "c", "b", ""]


def test_ranks_hold_their_own():
    assert planned([(0, [A]), (1, [A])], [0, 1, 0, 1], 4) == ["a", "a", "", ""]
