"""The search against proved optima of small cases, and the solver that proves them."""

from __future__ import annotations

import pytest

from jaxpp_flax.planning import search
from jaxpp_flax.planning.schedule_search.problem import evaluate
from jaxpp_flax.planning.schedule_search.search import problems_of
from jaxpp_flax.schedules import Costs, Transfer
from tests.running import ROOT, run_python


@pytest.fixture(autouse=True)
def _scripts_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("ranks", "microbatches", "limit", "split"),
    [(2, 3, None, True), (2, 4, 2, True), (3, 3, 2, True), (3, 4, None, False), (2, 4, 1, True)],
)
def test_the_search_is_within_two_percent_of_the_optimum(ranks, microbatches, limit, split):
    from optimum import prove

    costs = Costs(
        forward=[1.0, 1.3, 0.8][:ranks],
        backward_input=[1.2, 1.4, 0.9][:ranks],
        backward_weight=[0.7, 1.0, 0.8][:ranks],
    )
    found = search(ranks, microbatches, 1, costs, 0.2, limit, split_backward=split)
    problems = problems_of(ranks, microbatches, 1, costs, Transfer.of(0.2), limit, split)
    optimum = prove(problems, found.makespan)
    assert optimum is not None
    assert optimum <= found.makespan <= 1.02 * optimum


def test_the_solver_finds_the_optimum_from_a_loose_bound():
    from optimum import prove, solve

    (problem, _) = problems_of(2, 3, 1, Costs(), Transfer(), None, True)
    answer = solve(problem, upper=14.0, time_limit=60)
    assert answer is not None
    assert answer.proved
    assert answer.makespan == pytest.approx(10.0)  # 3 (f + i + w) + f
    found = evaluate(problem, answer.words)
    assert found is not None
    assert found[0] == pytest.approx(10.0)
    nothing = solve(problem, upper=9.0, time_limit=60)
    assert nothing is not None
    assert not nothing.words
    assert prove([problem], 14.0) == pytest.approx(10.0)


@pytest.mark.soak
def test_every_case_of_the_benchmark():
    run_python(str(ROOT / "benchmarks" / "schedules.py"), "search", "--milp-seconds", "60", timeout=86400)
