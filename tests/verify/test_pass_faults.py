"""Injected bugs of the compiler's passes are found: in the sums over the uses of a parameter, and over shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineStage, PipelineTrainer
from jaxpp_flax.engine.passes.loop import lower_loops
from jaxpp_flax.engine.tracing.ir import emit
from jaxpp_flax.verify import verification, verify
from tests.helpers import slow_but
from tests.trainers import models as m
from tests.trainers.test_matches_plain import mesh_of
from tests.verify.test_faults import cache_of_one


class Tied(nnx.Module):
    """The table of the embedding is the head's, too."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(m.VOCABULARY, m.WIDTH, rngs=rngs)
        self.blocks = nnx.List(
            [PipelineStage(nnx.Linear(m.WIDTH, m.WIDTH, rngs=rngs), name=f"block_{i}") for i in range(2)]
        )

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


def sums(parts_of: Callable[[Sequence[Any]], Sequence[Any]], over_shards: Callable[[Any], Any]) -> Callable[..., Any]:
    """A copy of the rule for the sums behind a loop, with a fault in it."""

    def wrong(parts: Sequence[Any], axes: Any, target: Any, loop: Any) -> Any:
        def total(*states: Any) -> Any:
            return reduce(jnp.add, states if axes is None else map(over_shards, states))

        return emit(total, parts_of(parts), [target])[0]

    return wrong


def all_parts(parts: Sequence[Any]) -> Sequence[Any]:
    return parts


def add_up(state: Any) -> Any:
    return state.sum(0)


# For each: the fault, the first leaf that is wrong, and a word of its class. The plain step does not know the uses of a
# parameter apart, so there is no class for them.
FAULTS = {
    "forgets the first use of a tied parameter": (sums(lambda parts: parts[-1:], add_up), "embed/embedding", "unknown"),
    "forgets the last use of a tied parameter": (sums(lambda parts: parts[:1], add_up), "embed/embedding", "unknown"),
    "counts a use of a tied parameter twice": (
        sums(lambda parts: [*parts, *parts[1:]], add_up),
        "embed/embedding",
        "unknown",
    ),
    "takes one shard for all": (sums(all_parts, lambda state: state[0]), "blocks/1/bias", "unknown"),
    "averages shards": (sums(all_parts, lambda state: state.mean(0)), "blocks/1/bias", "number of shards (1/2)"),
    "adds shards twice": (sums(all_parts, lambda state: 2 * state.sum(0)), "blocks/1/bias", "doubled reduction"),
}


@pytest.fixture(scope="module")
def plain_once() -> Iterator[None]:
    """All trainers are the same on the plain side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "cut", cache_of_one(verification.cut))
        yield


def look() -> Any:
    trainer = PipelineTrainer(
        Tied(), optax.sgd(0.1), m.mean_loss, num_stages=2, num_microbatches=4, mesh=mesh_of(2, data=2), logging=False
    )
    return verify(trainer, m.make_batch(16))


@pytest.mark.usefixtures("plain_once")
@pytest.mark.parametrize("name", slow_but(["no fault", *FAULTS], "forgets the first use of a tied parameter"))
def test_a_fault_of_the_sums_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    if name == "no fault":
        assert look().agrees
        return
    fault, leaf, word = FAULTS[name]
    monkeypatch.setattr(lower_loops, "_sum", fault)
    first = look().first
    assert first is not None
    assert first.leaf == leaf
    assert word in first.likely
