"""Settings of Hypothesis for every test; the project's root has the settings of devices and compilation."""

from hypothesis import HealthCheck, settings

# No deadline, because the first example of a test may compile; derandomized, so that a failure can be repeated.
settings.register_profile(
    "default", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")
