"""Results that jump where a float moves a little: counted, told if they are recomputed, no difference at a tie."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.engine.program.program import Program, Run
from jaxpp_flax.schedules.task import TaskKind
from jaxpp_flax.trainers import Memory
from jaxpp_flax.verify import Choice, Report, verify
from tests.verify.faults import MICROBATCHES, Fault, Step, edge
from tests.verify.test_faults import Bench

DIM, ROWS = 4, 3
X = np.random.default_rng(0).normal(size=(ROWS * MICROBATCHES, DIM)).astype(np.float32)
SAVED = jax.checkpoint_policies.save_only_these_names("choice")


class Twins(nnx.Linear):
    """The first two of its numbers are equal, and larger than the others: rounding decides which is the largest."""

    def __init__(self, seed: int) -> None:
        super().__init__(DIM, DIM, rngs=nnx.Rngs(seed))
        kernel = 0.1 * np.array(self.kernel[...])
        kernel[:, 1] = kernel[:, 0]
        self.kernel[...] = jnp.asarray(kernel)
        self.bias = nnx.Param(jnp.array([5.0, 5.0, 0.0, 0.0]))


class Router(nnx.Module):
    """Experts of one matrix each, and one for each row."""

    def __init__(self, seed: int) -> None:
        self.experts = nnx.Param(jax.random.normal(jax.random.key(seed), (DIM, DIM, DIM)))

    def __call__(self, x: Any) -> Any:
        scores = jax.nn.softmax(x)
        index = checkpoint_name(jax.lax.top_k(scores, 1)[1], "choice")
        gate = jnp.take_along_axis(scores, index, -1)
        return x + gate * jnp.einsum("bi,bio->bo", x, self.experts[index[:, 0]])


class TwinsAndRouter(nnx.Module):
    """Recomputes the router alone."""

    def __init__(self, seed: int) -> None:
        self.twins, self.router = Twins(seed), Router(seed)

    def __call__(self, x: Any) -> Any:
        return nnx.remat(Router.__call__)(self.router, self.twins(x))


def router_trainer(*blocks: nnx.Module, remat: Any = (), memory: Memory | None = None) -> PipelineTrainer:
    """A stage for each block; `remat` has what each recomputes."""
    pairs = zip_longest(blocks, remat)
    stages = [PipelineStage(block, name=f"block_{i}", remat=of) for i, (block, of) in enumerate(pairs)]
    return PipelineTrainer(
        nnx.Sequential(*stages), optax.sgd(0.1), lambda model, x: (model(x) ** 2).mean(), num_stages=len(blocks),
        num_microbatches=MICROBATCHES, memory=memory, logging=False,
    )  # fmt: skip


def nudged(x: Any) -> Any:
    """By a unit of rounding, one of two twins."""
    return x * jnp.where(jnp.arange(x.shape[-1]) == 1, 1 + np.float32(2**-22), 1)


def the_choice(report: Report) -> Choice:
    (choice,) = report.choices
    assert choice.name.startswith("top_k at ")
    assert "test_choices.py:" in choice.name
    assert choice.name.endswith("(Router.__call__)")
    return choice


def test_a_recomputed_router_is_told_and_the_remedy_helps():
    """A block that recomputes all of its forward makes the choice again; one that keeps the named choice does not."""
    report = verify(router_trainer(Router(0), Router(1), remat=["full", SAVED]), X)
    assert report.agrees, report
    choice = the_choice(report)
    assert (choice.count, choice.differ, choice.recomputed) == (2 * len(X), 0, len(X))
    assert choice.otherwise is None  # of a part, it is unknown
    assert "save_only_these_names" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "recomputed"), [("full", len(X)), (SAVED, 0)])
def test_the_remat_of_a_trainer_is_told_alike(remat: Any, recomputed: int):
    report = verify(router_trainer(Router(0), memory=Memory(remat=remat)), X)
    assert the_choice(report).recomputed == recomputed


class Scanned(nnx.Module):
    """Two routers of one stack, each recomputed, in a call inside a scan; `twice` scans the stack in a scan.

    The mask of a dropout is no choice there.
    """

    def __init__(self, seed: int, *, policy: Any = None, twice: bool = False) -> None:
        self.experts = nnx.Param(jax.random.normal(jax.random.key(seed), (2, DIM, DIM)))
        self.policy, self.twice = policy, twice

    def __call__(self, x: Any) -> Any:
        @jax.jit
        def route(x: Any, experts: Any, keep: Any) -> Any:
            return x + jnp.where(keep, jnp.tanh(experts[checkpoint_name(x.argmax(-1), "choice")]), 0)

        def layer(x: Any, given: Any) -> Any:
            experts, key = given
            return route(x, experts, jax.random.bernoulli(key, 0.9, x.shape)), None

        def layers(x: Any, _: Any) -> Any:
            keys = jax.random.split(jax.random.key(0))
            return jax.lax.scan(jax.checkpoint(layer, policy=self.policy), x, (self.experts[...], keys))

        return jax.lax.scan(layers, x, length=2)[0] if self.twice else layers(x, None)[0]


def scanned_choice(report: Report) -> Choice:
    assert report.agrees, report
    (choice,) = report.choices
    assert choice.name.startswith("argmax at ")
    assert choice.name.endswith("(Scanned.__call__.<locals>.route)")
    return choice


def test_choices_inside_scans_are_counted():
    """One block scans its two routers twice and recomputes them; the other one keeps the choices that have a name."""
    report = verify(router_trainer(Scanned(0, twice=True), Scanned(1, policy=SAVED)), X)
    choice = scanned_choice(report)
    assert (choice.count, choice.differ) == ((4 + 2) * len(X), 0)
    assert (choice.recomputed, choice.otherwise) == (4 * len(X), None)
    assert "save_only_these_names" in str(report)


@pytest.mark.slow
def test_a_scan_in_a_stage_that_is_recomputed():
    saves = {"policy": jax.checkpoint_policies.everything_saveable}
    choice = scanned_choice(verify(router_trainer(Scanned(0, **saves), Scanned(1, **saves), remat=["full"] * 2), X))
    assert (choice.count, choice.recomputed, choice.otherwise) == (4 * len(X), 4 * len(X), 0)


def test_a_tie_that_rounding_decides_otherwise_is_counted_and_is_no_difference(monkeypatch: pytest.MonkeyPatch):
    """A fault behind it is found all the same."""
    bench = Bench(monkeypatch, router_trainer(Twins(0), Router(1)), X)
    report = bench.find(Fault("", edge(0, 1, lambda x, _: nudged(x)), (), ()))
    assert report.agrees, report
    choice = the_choice(report)
    assert (choice.differ, choice.recomputed, choice.otherwise) == (len(X), 0, None)
    assert "save_only_these_names" not in str(report)

    def both(x: Any, _: Any) -> Any:
        return nudged(x) * 1.01

    report = bench.find(Fault("", edge(0, 1, both), (), ()))
    assert report.first is not None
    assert report.first.kind == "choice"


def nudge_residuals(program: Program, instruction: Any, step: Step) -> Step:
    """The last stage but one keeps other numbers for its backward pass, by a unit of rounding."""
    if not isinstance(instruction, Run) or instruction.microbatch < 0:
        return step
    task = program.tasks[instruction.task]
    if task.stage != 1 or task.kind is TaskKind.FORWARD:
        return step

    def wrong(environment: list[Any]) -> None:
        for value in instruction.inputs:
            maker, _ = program.origin(value)
            array = environment[value]
            if maker is not None and maker.rank == instruction.rank and array.shape[-2:] == (ROWS, DIM):
                environment[value] = jax.device_put(nudged(array), array.sharding)
        step(environment)

    return wrong


def test_a_recomputation_that_chooses_otherwise_is_counted(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(monkeypatch, router_trainer(Twins(0), TwinsAndRouter(1), Twins(2)), X)
    report = bench.find(Fault("", nudge_residuals, (), ()))
    assert report.agrees, report
    choice = the_choice(report)
    assert (choice.differ, choice.recomputed, choice.otherwise) == (0, len(X), len(X))
    assert "save_only_these_names" in str(report)


def test_a_scan_that_chooses_otherwise_is_counted(monkeypatch: pytest.MonkeyPatch):
    """What the pipeline chooses in one step of a scan is what the plain side goes on with."""
    bench = Bench(monkeypatch, router_trainer(Twins(0), Scanned(1), Twins(2)), X)
    choice = scanned_choice(bench.find(Fault("", edge(0, 1, lambda x, _: nudged(x)), (), ())))
    assert (choice.differ, choice.otherwise) == (len(X), 0)
    choice = scanned_choice(bench.find(Fault("", nudge_residuals, (), ())))
    assert (choice.differ, choice.recomputed) == (0, 2 * len(X))
    assert choice.otherwise is not None
    assert choice.otherwise >= len(X)
