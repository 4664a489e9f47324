"""The recipe for adapters: equal to plain JAX over the base's weights, and its files hold what was trained."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax.layers import add_lora
from jaxpp_flax.pretrained import export_pretrained
from tests.examples.running import load_example, run_example
from tests.helpers import tree_allclose

pytestmark = [pytest.mark.slow, pytest.mark.extras]

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
TEXT = {"model_type": "llama", "vocab_size": 256, "rms_norm_eps": 1e-6, **SIZES}


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    pytest.importorskip("safetensors")
    return load_example("recipes/lora.py")


def test_equals_plain_jax_over_the_weights_of_the_files(recipe: SimpleNamespace, tmp_path: Path):
    config = recipe.LlamaConfig.from_huggingface(TEXT)
    base = recipe.Llama(config, rngs=nnx.Rngs(3))
    export_pretrained(nnx.state(base, nnx.Param), tmp_path / "base", map=recipe.NAMES, config=TEXT)
    trainer = recipe.make_trainer(config, num_stages=2, num_microbatches=2, logging=False)
    trainer.load_pretrained(tmp_path / "base", map=recipe.NAMES, cast=True, keep="*/lora_*")
    rows = recipe.rows(seed=0, size=8, length=4)
    batches = [next(rows) for _ in range(3)]
    losses = [float(trainer.train_step(batch)["loss"]) for batch in batches]

    # The factors have the first values of the trainer's own; the base is the one in the files.
    plain = add_lora(recipe.Llama(config, rngs=nnx.Rngs(0)), rank=8, alpha=16, layers="blocks/*", rngs=nnx.Rngs(1))
    fresh = recipe.make_trainer(config, num_stages=2, num_microbatches=2, logging=False)
    nnx.update(plain, nnx.state(fresh.gather_model(), nnx.LoRAParam))
    nnx.update(plain, nnx.state(base, nnx.Param))
    optimizer, expected = nnx.Optimizer(plain, optax.adamw(5e-3), wrt=nnx.LoRAParam), []

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, gradients = nnx.value_and_grad(recipe.loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch)
        optimizer.update(model, gradients)
        return loss

    for batch in batches:
        expected.append(float(step(plain, optimizer, batch)))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # the same sums in another order
    trained = trainer.gather_model()
    of_base = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
    tree_allclose(
        nnx.to_pure_dict(nnx.state(trained, of_base)), nnx.to_pure_dict(nnx.state(plain, of_base)), rtol=0, atol=0
    )


def test_from_files_to_files(recipe: SimpleNamespace, tmp_path: Path):
    model = recipe.Llama(recipe.LlamaConfig.from_huggingface(TEXT), rngs=nnx.Rngs(3))
    export_pretrained(nnx.state(model, nnx.Param), tmp_path / "base", map=recipe.NAMES, config=TEXT)
    out = tmp_path / "tuned"
    arguments = ["--model", str(tmp_path / "base"), "--output", str(out), "--steps", "8"]
    printed = run_example("recipes/lora.py", *arguments)
    before, after, merged = (float(loss) for loss in re.findall(r"held-out loss (\S+),", printed))
    assert after < before
    assert merged == pytest.approx(after, abs=0.002)  # one product in place of two, and three digits are printed
    assert (out / "adapters" / "state").exists()


def test_the_tiny_base_is_read_as_it_was_written(recipe: SimpleNamespace, tmp_path: Path):
    recipe.write_base(tmp_path / "base")
    written = recipe.Llama(recipe.LlamaConfig.from_huggingface(recipe.TINY), rngs=nnx.Rngs(1))
    values = [nnx.to_pure_dict(nnx.state(each)) for each in (recipe.read_model(tmp_path / "base"), written)]
    tree_allclose(*values, rtol=0, atol=0)
