"""Every structure between two passes is checked in these tests."""

import pytest


@pytest.fixture(autouse=True)
def _verify(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXPP_FLAX_VERIFY", "1")
