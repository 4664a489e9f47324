"""The smallest Linen program learns."""

import re

import pytest

from tests.examples.running import run_example


@pytest.mark.slow
def test_it_learns():
    found = re.fullmatch(r"loss after 100 steps: (\d\.\d{4})\n", run_example("linen_mlp.py"))
    assert found
    assert float(found[1]) < 0.02
