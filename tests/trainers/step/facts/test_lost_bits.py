"""A line at the start tells what narrow sums and narrow states lose, and the switch that keeps it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import Precision
from tests.trainers import models as m

SUMS = 'a sum loses about 0.4 of its 8 bits. precision=Precision(gradients="float32") keeps them.'
STATE = "the optimizer keeps its state in bfloat16 ("
EIGHT_BITS = "the optimizer keeps its state in int8 ("


def in_eight_bits() -> optax.GradientTransformation:
    """An optimizer with a state of 8 bits."""

    def init(params: Any) -> Any:
        return optax.tree_utils.tree_cast(params, jnp.int8)

    return optax.GradientTransformation(init, lambda grads, state, params=None: (grads, state))


@pytest.mark.parametrize(
    ("param_dtype", "tx", "precision", "lines"),
    [
        ("float32", optax.adam(0.1), "bfloat16", []),
        ("bfloat16", optax.sgd(0.1), None, [SUMS]),
        ("bfloat16", optax.sgd(0.1), Precision(gradients="float32"), []),
        ("bfloat16", optax.adam(0.1), Precision(gradients="float32"), [STATE]),
        ("float32", optax.adam(0.1, mu_dtype="bfloat16"), None, [STATE]),
        ("float32", in_eight_bits(), None, [EIGHT_BITS]),
    ],
)
def test_a_line_at_the_start(
    param_dtype: str, tx: Any, precision: Any, lines: list[str], capsys: pytest.CaptureFixture[str]
):
    model = m.Layers(rngs=nnx.Rngs(0), param_dtype=param_dtype)
    trainer = PipelineTrainer(
        model, tx, m.squared_error, num_stages=2, num_microbatches=4, mesh={}, precision=precision
    )
    trainer.compile(m.make_xy(8))
    trainer.compile(m.make_xy(16))  # another step: no second line
    found = [line for line in capsys.readouterr().out.splitlines() if " bits" in line]
    assert len(found) == len(lines)
    assert all(text in line for text, line in zip(lines, found, strict=True)), found
