"""The smallest Linen program learns."""

import re

from tests.examples.running import run_example


def test_it_learns():
    found = re.fullmatch(r"loss after 100 steps: (\d\.\d{4})\n", run_example("linen_mlp.py"))
    assert found
    assert float(found[1]) < 0.02
