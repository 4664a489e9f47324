"""Placement of what stands around the loop: where parameters live, where updates run, what travels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp_flax.engine.passes.place import PlacementWarning, ResultRanks, StepOnRanks
from jaxpp_flax.engine.tracing.ir import Atom, Value, VerificationError
from jaxpp_flax.schedules import Std1F1B
from tests.engine.toys import built, chain, chain_loss, gradients, sgd_step
from tests.helpers import batch_of

S = 3


def placed(after: Callable[..., Any], *more: Any) -> StepOnRanks:
    """A step that hands the gradients of three stages to `after(params, losses, grads, *more)`."""

    def step(params: Any, batch: Any, *more: Any) -> Any:
        losses, grads = gradients(Std1F1B(S))(params, batch)
        return after(params, losses, grads, *more)

    result = built(step, S, chain(S), batch_of(3), *more).placed
    result.verify()
    return result


def moved(result: StepOnRanks) -> list[tuple[tuple[int, ...], int, int]]:
    return [(tuple(v.aval.shape), source, target) for e in result.equations for v, source, target in result.sent_by(e)]


def at(result: StepOnRanks, atoms: Iterable[Atom]) -> list[list[int]]:
    """The ranks that hold arguments or results."""
    return [sorted(result.need[atom]) for atom in atoms if isinstance(atom, Value)]


def work(result: StepOnRanks) -> dict[int, list[str]]:
    """The primitives that each rank runs outside of the loop."""
    ranks: dict[int, list[str]] = {}
    for equation in result.equations:
        for rank in result.native.get(equation, ()):
            ranks.setdefault(rank, []).append(equation.name)
    return ranks


def test_parameters_live_where_they_are_read_and_are_updated_there():
    result = built(sgd_step(Std1F1B(S)), S, chain(S), batch_of(3)).placed
    result.verify()
    assert at(result, result.inputs) == [[0], [0], [1], [1], [2], [2], [0], [2]]
    assert at(result, result.outputs[:6]) == [[0], [0], [1], [1], [2], [2]]
    assert moved(result) == []
    assert {rank: sorted(names) for rank, names in work(result).items()} == {
        rank: ["mul", "mul", "sub", "sub"] for rank in range(S)
    }


def test_a_norm_over_all_stages_moves_scalars_alone():
    def clip(params: Any, losses: Any, grads: Any) -> Any:
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g / norm, grads), norm

    result = placed(clip)
    moves = moved(result)
    assert moves
    assert {shape for shape, _, _ in moves} == {()}
    assert all("div" in names for names in work(result).values())
    assert sorted(work(result)) == list(range(S))


def test_a_step_counter_is_computed_by_every_rank_that_needs_it():
    def decay(params: Any, losses: Any, grads: Any, count: Any) -> Any:
        return jax.tree.map(lambda p, g: p - g / (1 + count), params, grads), count + 1

    result = placed(decay, np.int32(0))
    assert moved(result) == []
    assert sorted(result.need[result.inputs[-1]]) == [0, 1, 2]
    assert sorted(result.need[result.outputs[-1]]) == [0, 1, 2], "the new counter is where the old one was"


def test_momentum_lives_with_its_parameter():
    def momentum(params: Any, losses: Any, grads: Any, velocity: Any) -> Any:
        return jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)

    result = placed(momentum, chain(S))
    assert at(result, result.inputs[-6:]) == [[0], [0], [1], [1], [2], [2]]
    assert at(result, result.outputs) == [[0], [0], [1], [1], [2], [2]]


def test_mixing_large_values_warns_and_names_the_line():
    def stack(params: Any, losses: Any, grads: Any, noise: Any) -> Any:
        big = [jnp.tile(g["w"], (4, 4)) for g in grads]
        return jnp.concatenate(big)  # large values meet

    with pytest.warns(PlacementWarning, match=r"concatenate.*test_place\.py.*ranks \[0, 1, 2\].*bytes") as caught:
        result = placed(stack, np.float32(0))
    assert len(caught) == 1
    assert len(str(caught[0].message)) < 1000
    assert len([m for m in moved(result) if len(m[0]) == 2]) == 2


def test_an_untouched_argument_stays_somewhere():
    result = placed(lambda params, losses, grads, extra: (extra, losses), np.ones(3, np.float32))
    assert len(result.need[result.outputs[0]]) == 1
    assert sorted(result.need[result.outputs[0]]) == sorted(result.need[result.inputs[-1]])


def test_a_new_value_lies_with_its_argument_however_far():
    def count_on(params: Any, losses: Any, grads: Any, count: Any) -> Any:
        new = count
        for _ in range(40):
            new = new + 1
        return jax.tree.map(lambda p, g: p - g / (1 + count), params, grads), new

    result = placed(count_on, np.int32(0))
    assert sorted(result.need[result.inputs[-1]]) == [0, 1, 2]
    assert sorted(result.need[result.outputs[-1]]) == [0, 1, 2]


def test_a_norm_is_no_new_value_of_a_scalar_behind_it():
    """The gradients were scaled, and their norm has the scale's type: still one rank is enough for it."""

    def unscale(params: Any, losses: Any, grads: Any, scale: Any) -> Any:
        grads = jax.tree.map(lambda g: g / scale, grads)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda p, g: p - g, params, grads), norm, scale * 2

    result = placed(unscale, np.float32(2))
    assert sorted(result.need[result.inputs[-1]]) == sorted(result.need[result.outputs[-1]]) == [0, 1, 2]
    assert len(result.need[result.outputs[-2]]) == 1


def test_work_that_no_result_needs_is_left_out():
    """A condition over several ranks becomes selections; here nothing reads what that of the last rank gives."""

    def choose(params: Any, losses: Any, grads: Any) -> Any:
        first, last = grads[0]["w"], grads[2]["w"]
        return jax.lax.cond(losses[0] > 1, lambda a, b: (2 * a, 3 * b), lambda a, b: (a, b), first, last)[0]

    result = placed(choose)
    names = [name for of_rank in work(result).values() for name in of_rank]
    assert (names.count("cond"), names.count("select_n")) == (0, 1)
    assert {shape for shape, _, _ in moved(result)} == {()}, "no gradient travels"


def test_text():
    def clip(params: Any, losses: Any, grads: Any) -> Any:
        return grads[0]["w"] / jnp.vdot(grads[2]["w"], grads[2]["w"])

    text = placed(clip).as_text()
    assert "loop over 3 microbatches: Std1F1B" in text
    assert "move float32[] from rank 2 to rank 0" in text
    assert re.search(r"ranks \[0\]: div makes float32\[8,8\] at .*test_place.py", text)


def test_verify_finds_what_is_missing():
    def clip(params: Any, losses: Any, grads: Any) -> Any:
        return grads[0]["w"] / jnp.vdot(grads[2]["w"], grads[2]["w"])

    result = placed(clip)
    (scalar,) = [value for e in result.equations for value, *_ in result.sent_by(e)]
    with pytest.raises(VerificationError, match=r"`div` at .*test_place.py.* reads what a rank does not have"):
        replace(result, need={**result.need, scalar: frozenset({2})}).verify()
    with pytest.raises(VerificationError, match=r"`treduce` at .* reads what a rank does not have"):
        replace(result, need={**result.need, result.inputs[0]: frozenset({1})}).verify()


def test_a_tied_parameter_is_summed_once_and_updated_where_it_is_read():
    def tied(params: Any, mb: Any) -> jax.Array:
        return chain_loss([params[0], params[1], params[0]], mb)

    result = built(sgd_step(Std1F1B(S), tied), S, chain(2), batch_of(3)).placed
    result.verify()
    (loop,) = result.loops
    assert len(loop.results) == 1 + 2 * 2 + 2
    assert at(result, result.inputs[:4]) == [[0, 2], [0, 2], [1], [1]]
    assert all(isinstance(a, Value) for a in result.outputs)
    assert at(result, result.outputs[:4]) == [[0, 2], [0, 2], [1], [1]]


def test_results_for_all_processes_go_to_a_rank_of_each():
    """Two processes: one owns the first two ranks, the other the last one."""

    def step(params: Any, batch: Any) -> Any:
        new, losses, grads = sgd_step(Std1F1B(S))(params, batch)
        return new, losses, grads[1], jnp.arange(3.0)

    arguments = chain(S), batch_of(3)
    asked = (True, *[False] * 9)
    owners = tuple(frozenset({process}) for process in (0, 0, 1))
    result = built(step, S, *arguments, result_ranks=ResultRanks(owners, asked)).placed
    result.verify()
    small = [atom.aval.size for atom in result.outputs]
    assert small == [8, 64, 8, 64, 8, 64, 3, 8, 64, 3]
    # What is asked for, and what is small and updates nothing: the losses, a bias' gradient, a list of numbers.
    assert result.for_all == (True, *[False] * 5, True, True, True, True)
    assert at(result, result.outputs) == [
        [0, 2], [0], [1], [1], [2], [2], [0, 2], [1, 2], [1, 2], [0, 2],
    ]  # fmt: skip


def test_a_shared_argument_is_returned_where_it_is_and_what_is_made_of_it_once():
    def step(params: Any, batch: Any) -> Any:
        tied = lambda params, mb: chain_loss([params[0], params[1], params[0]], mb)  # noqa: E731
        losses, _ = gradients(Std1F1B(S), tied)(params, batch)
        return losses, params[0]["w"], params[0]["w"].sum(0)[:3]

    result = built(step, S, chain(S), batch_of(3)).placed
    result.verify()
    assert at(result, result.outputs) == [[2], [0, 2], [0]]
    assert moved(result) == []


def test_the_smallest_array_stays_where_it_is_and_a_scalar_comes_to_it():
    result = placed(lambda params, losses, grads: grads[1]["b"][:2] * losses.sum())
    assert at(result, result.outputs) == [[1]]
    assert moved(result) == [((), 2, 1)]
