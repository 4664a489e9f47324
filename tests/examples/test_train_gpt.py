"""The README's main command, on a short setting."""

from __future__ import annotations

import re
import sysconfig

import numpy as np
import pytest

from tests.examples.running import load_example, run_example
from tests.running import ROOT

TINY = ["--layers", "4", "--width", "16", "--length", "16", "--batch-size", "8", "--microbatches", "4", "--steps", "3"]


def held_out_loss(output: str) -> float:
    found = re.search(r"^held-out loss: (\d+\.\d{3}) nats/byte$", output, flags=re.MULTILINE)
    assert found, f"no line with the held-out loss in:\n{output}"
    return float(found[1])


@pytest.fixture(scope="module")
def plain_loss() -> float:
    return held_out_loss(run_example("train_gpt.py", *TINY, "--no-pipeline"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ["--stages", "4"],
        ["--stages", "2", "--data-parallel", "2"],
        ["--stages", "4", "--ranks", "2", "--schedule", "interleaved_1f1b"],
    ],
    ids=lambda flags: " ".join(flags),
)
def test_the_pipeline_trains_as_plain_jit_does(flags: list[str], plain_loss: float):
    output = run_example("train_gpt.py", *TINY, *flags)
    assert abs(held_out_loss(output) - plain_loss) <= 0.001
    assert "import os" in output.partition("nats/byte")[2], "a sample of text follows"


def test_training_and_held_out_text_share_no_file():
    train, held_out = load_example("train_gpt.py").read_source()
    assert train.dtype == np.uint8
    assert len(train) > 5 * len(held_out) > 100_000
    assert bytes(held_out[:200]) not in bytes(train)


def test_the_text_is_the_same_each_time(monkeypatch: pytest.MonkeyPatch):
    """Of another folder than Python's library, whose thousands of files take seconds to find."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(ROOT / "examples")})
    read_source = load_example("train_gpt.py").read_source
    (train, held_out), again = read_source(), read_source()
    assert len(train) > len(held_out) > 1000
    assert np.array_equal(train, again[0])
    assert np.array_equal(held_out, again[1])


def test_targets_are_the_tokens_one_byte_later():
    example = load_example("train_gpt.py")
    data = np.arange(100, dtype=np.uint8)
    batch = next(example.training_batches(data, batch_size=3, length=5, seed=0))
    assert batch["tokens"].shape == batch["targets"].shape == (3, 5)
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    held_out = example.held_out_batches(data, batch_size=2, length=5, batches=3)
    assert len(held_out) == 3
    assert held_out[0]["tokens"][0, 0] == 0
    assert held_out[-1]["targets"][-1, -1] == 99
