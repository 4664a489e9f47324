"""Every test of the engine verifies each structure between two passes."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _verify_between_passes(verified: None) -> None:
    """For all modules of this folder."""
