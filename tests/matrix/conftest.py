"""Every test of the matrix verifies each structure between two passes."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _verify_between_passes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_VERIFY", "1")
        yield
