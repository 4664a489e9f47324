"""Settings of Hypothesis and a fixture for every test; the project's root sets devices and compilation."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No deadline, because the first example of a test may compile; derandomized, so that a failure can be repeated.
settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@pytest.fixture(scope="module")
def verified() -> Iterator[None]:
    """Every structure is verified between two passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXPP_FLAX_VERIFY", "1")
        yield
