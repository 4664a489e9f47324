"""The script in the README trains, before and after its diff, and to the same weights."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from tests.helpers import tree_allclose
from tests.running import ROOT

pytestmark = pytest.mark.usefixtures("all_devices")


class Block(nnx.Module):
    """What the README leaves to the reader: a layer of the model."""

    def __init__(self, cfg: Any, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(cfg.dim, cfg.dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(self.linear(x))


def sides() -> tuple[str, str]:
    """The script before and after the diff on the page."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] != other) for other in "+-")


def run(code: str, batches: list[Any]) -> dict[str, Any]:
    names: dict[str, Any] = {
        "__name__": "readme",
        "Block": Block,
        "cfg": SimpleNamespace(vocab=7, dim=8, layers=4),
        "batches": batches,
    }
    exec(compile(code.replace("adamw(3e-4)", "adamw(1e-2)"), "README.md", "exec"), names)
    return names


def test_the_minutes_are_those_of_the_table_of_tiers():
    readme, table = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    (told,) = re.findall(r"runs the tests, in about (\d+) minutes on two cores", readme)
    (measured,) = re.findall(r"\| `pytest` \| (\d+), from a cold cache \|", table)
    assert told == measured


def test_both_sides_of_the_diff_train_and_end_at_the_same_weights():
    tokens = np.random.default_rng(0).integers(0, 7, (32, 4)).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    before, after = (run(code, [batch] * 10) for code in sides())
    trainer = after["trainer"]
    assert int(trainer.state.step) == 10
    # Adam divides by the root of the squared gradient: the rounding of a gradient near zero moves a weight.
    tree_allclose(
        nnx.to_pure_dict(nnx.state(trainer.gather_model(), nnx.Param)),
        nnx.to_pure_dict(nnx.state(before["model"], nnx.Param)),
        rtol=1e-3,
    )
    assert float(trainer.evaluate([batch])["loss"]) < 0.9 * np.log(7), "it learns: the batches repeat"
