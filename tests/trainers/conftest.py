"""What the trainer's tests share as fixtures."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def verified_quick_compilation() -> Iterator[None]:
    """Every structure verified between two passes, and less optimization by XLA: for what is computed, not how."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_VERIFY", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", before)
