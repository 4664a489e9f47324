"""The start of a program that several processes run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxpp_flax.engine.runtime.startup import compare_programs


@pytest.mark.parametrize("owners", [{0, 1}, {2}])
def test_every_process_is_told_of_those_without_a_device(owners: set[int], monkeypatch: pytest.MonkeyPatch):
    """Process 0 as well, which would wait for the others for ever."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    mesh: Any = SimpleNamespace(processes=frozenset(owners))
    unused: Any = None
    absent = ", ".join(str(process) for process in range(4) if process not in owners)
    with pytest.raises(ValueError, match=f"has no device of process {absent}: all are of .* of 4 processes"):
        compare_programs(mesh, unused, unused, unused)
