"""Settings and fixtures of the tests; the devices are set up in the conftest.py of the project's root."""

from collections.abc import Iterator

import jax
import pytest
from hypothesis import HealthCheck, settings

# No deadline, because the first example of a test may compile; derandomized, so that a failure can be repeated.
settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """Ask XLA for less optimization, for tests of what is computed and not of how: up to half the time to compile.

    Tests of rounding and of compiled code keep XLA as it is.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
