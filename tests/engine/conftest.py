"""Every test of the engine verifies each structure between two passes."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _verify_between_passes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_VERIFY", "1")
        yield


@pytest.fixture(scope="module")
def quick_compilation() -> Iterator[None]:
    """Ask XLA for less optimization, for tests of what is computed and not of how: a third less time to compile."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
