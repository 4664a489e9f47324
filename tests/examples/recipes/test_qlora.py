"""The recipe for adapters over 4 bits: equal to plain JAX, and its files hold what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax.pretrained import export_pretrained
from tests.examples.running import load_example
from tests.running import ROOT, run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of qwix
]

SIZES = {"width": 32, "hidden": 32, "layers": 2, "heads": 1, "key_value_heads": 1, "head_size": 32}


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    pytest.importorskip("qwix")
    pytest.importorskip("safetensors")
    return load_example("recipes/qlora.py")


@pytest.mark.parametrize("weights", ["nf4", "int4"])
def test_equals_plain_jax_over_the_same_bits(recipe: SimpleNamespace, weights: str):
    """float32 around the weights of 4 bits, which are the same bits on both sides: only sums differ in their order."""
    base = recipe.Llama(recipe.LlamaConfig(**SIZES), rngs=nnx.Rngs(0))
    trainer = recipe.make_trainer(recipe.with_adapters(base, weights), num_stages=2, num_microbatches=2, logging=False)
    rows = recipe.rows(seed=0, size=8, length=8)
    batches = [next(rows) for _ in range(3)]
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]
    graphdef, trained, rest = nnx.split(recipe.with_adapters(base, weights), nnx.LoRAParam, ...)
    tx = optax.adamw(5e-3)

    @jax.jit
    def step(trained: Any, opt_state: Any, batch: Any) -> Any:
        loss_of = lambda trained: recipe.loss_fn(nnx.merge(graphdef, trained, rest), batch)  # noqa: E731
        loss, gradients = jax.value_and_grad(loss_of)(trained)
        updates, opt_state = tx.update(gradients, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, loss

    opt_state, expected = tx.init(trained), []
    for batch in batches:
        trained, opt_state, loss = step(trained, opt_state, batch)
        expected.append(float(loss))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    adapted = trainer.gather_model()
    model, tokens = recipe.merged(adapted, base), batches[0]["tokens"]
    np.testing.assert_allclose(model(tokens), adapted(tokens), rtol=1e-4, atol=1e-5)  # one product in place of two


def test_from_files_to_files(recipe: SimpleNamespace, tmp_path: Path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 1}
    text = {"model_type": "llama", "vocab_size": 256, "rms_norm_eps": 1e-6, **sizes}
    base = recipe.Llama(recipe.LlamaConfig.from_huggingface(text), rngs=nnx.Rngs(1))
    export_pretrained(nnx.state(base, nnx.Param), tmp_path / "base", map=recipe.NAMES, config=text)
    out = tmp_path / "tuned"
    arguments = ["--model", str(tmp_path / "base"), "--output", str(out), "--steps", "4"]
    # qwix calls what Flax will take away, and warns of it: warnings are no errors here.
    printed = run_python(str(ROOT / "examples/recipes/qlora.py"), *arguments, XLA_FLAGS=None).stdout
    bits, merged = (float(line.split()[2].strip(",")) for line in printed.splitlines() if "held-out" in line)
    assert bits == pytest.approx(merged, abs=0.002)
    assert (out / "adapters" / "state").exists()
    again = recipe.load_base(
        recipe.LlamaConfig.from_huggingface(json.loads((out / "model/config.json").read_text())), out / "model"
    )
    assert recipe.loss_fn(again, next(recipe.rows(seed=1))) == pytest.approx(merged, abs=0.001)
