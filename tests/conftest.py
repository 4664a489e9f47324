"""Settings and fixtures of the tests; the devices are set up in the conftest.py of the project's root."""

from hypothesis import HealthCheck, settings

# No deadline, because the first example of a test may compile; derandomized, so that a failure can be repeated.
settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
