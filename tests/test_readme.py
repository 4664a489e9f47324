"""The example in the README trains, as it stands there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.helpers import python_blocks
from tests.running import ROOT

pytestmark = pytest.mark.usefixtures("all_devices")


class Block(nnx.Module):
    """What the README leaves to the reader: a layer of the model."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(cfg.dim, cfg.dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(self.linear(x))


def test_the_example_trains(capsys: pytest.CaptureFixture[str]):
    """The batches repeat, so the loss of the last step is below a uniform guess's only if the model learns them."""
    (block,) = python_blocks(ROOT / "README.md")
    vocabulary, steps = 7, 40
    tokens = np.random.default_rng(0).integers(0, vocabulary, (32, 4)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    code = block.replace("steps=1000", f"steps={steps}").replace("adamw(3e-4)", "adamw(1e-2)")
    assert f"steps={steps}" in code
    names: dict[str, Any] = {
        "__name__": "readme",
        "Block": Block,
        "cfg": SimpleNamespace(vocab=vocabulary, dim=8, layers=4),
        "batches": [batch] * steps,
    }
    exec(compile(code, "README.md", "exec"), names)
    assert int(names["trainer"].state.step) == steps
    assert float(names["trainer"].evaluate([batch])["loss"]) < 0.5 * np.log(vocabulary)
