"""The bytes of a step that is not compiled are those of the compiled one, within 5 %: random programs and options."""

from __future__ import annotations

import random
from collections.abc import Iterable

import jax
import pytest

from jaxpp_flax.engine.jit import mpmd_jit_with_loop
from jaxpp_flax.engine.predicted import predict_memory
from tests.fuzz.programs import arguments, draw, draw_storage, specs, step_of

CLOSE = 0.05


def differences(seeds: Iterable[int]) -> list[str]:
    """A line for each program in which a rank's planned bytes are not close to the compiled step's."""
    found: list[str] = []
    for seed in seeds:
        program = draw_storage(random.Random(seed), draw(seed))
        of_params, of_batch = specs(program)
        step = mpmd_jit_with_loop(
            step_of(program), program.mesh(), in_specs=(of_params, None, of_batch), static_argnums=3,
            donate_argnums=program.donate, residuals=program.residuals, fsdp=program.fsdp,
        )  # fmt: skip
        call = (*arguments(program), program.make_schedule())
        planned, exact = predict_memory(step.place(*call)), step.compile(*call).memory_analysis()
        for one, other in zip(planned, exact, strict=True):
            for name in ("argument_bytes", "peak_bytes", "host_peak_bytes"):
                want, have = getattr(other, name), getattr(one, name)
                total = other.argument_bytes + other.peak_bytes
                if abs(have - want) > CLOSE * (want if name == "host_peak_bytes" else total):
                    found.append(f"rank {other.rank}: {name} {have} for {want}, {program}")
    jax.clear_caches()
    return found


@pytest.mark.filterwarnings("ignore::jaxpp_flax.engine.passes.fsdp.rule.FsdpWarning")
@pytest.mark.parametrize("seed", range(30_000, 30_004))
def test_planned_bytes_are_close_to_the_compiled_steps(seed):
    assert not differences([seed])


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::jaxpp_flax.engine.passes.fsdp.rule.FsdpWarning")
@pytest.mark.parametrize("first", range(30_000, 30_080, 10))
def test_planned_bytes_of_many_programs_are_close_to_the_compiled_steps(first):
    found = differences(range(first, first + 10))
    assert not found, "\n".join(found)
