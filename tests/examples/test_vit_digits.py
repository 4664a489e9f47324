"""The vision transformer on scikit-learn's digits, on a short setting."""

from __future__ import annotations

import re

import pytest

from tests.examples.running import run_example

pytest.importorskip("sklearn")
SHORT = ["--layers", "2", "--width", "32", "--batch-size", "64", "--microbatches", "2", "--steps", "200"]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--stages", "2"], ["--no-pipeline"]], ids=" ".join)
def test_it_learns_and_prints_the_accuracy(flags: list[str]):
    output = run_example("vit_digits.py", *SHORT, *flags)
    assert "1437 images to train on, 360 held out" in output
    found = re.search(r"^held-out accuracy: (\d\.\d\d)$", output, flags=re.MULTILINE)
    assert found, output
    assert float(found[1]) > 0.3, "a guess has 0.10; this setting reached 0.66"
