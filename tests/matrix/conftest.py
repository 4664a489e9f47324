"""Every test of the matrix verifies each structure between two passes."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _verify_between_passes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_VERIFY", "1")
        yield


@pytest.fixture
def quick_compile() -> Iterator[None]:
    """Half the time to compile, for tests of structure; those of rounding and of compiled code keep XLA as it is."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
