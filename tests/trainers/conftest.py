"""What the trainer's tests share as fixtures."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def verified() -> Iterator[None]:
    """Every structure is verified between two passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_VERIFY", "1")
        yield
