"""The models of examples/pretrained against `transformers` itself: random weights in, equal logits, and out again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxpp_flax import PipelineTrainer
from tests.examples.running import load_example

pytestmark = [pytest.mark.transformers, pytest.mark.slow]

torch: Any = None
transformers: Any = None

DECODER = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model of `transformers`, and the example's file, model and configuration for it."""

    theirs: str
    config: str
    file: str
    ours: str
    options: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = (2,)


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    """Skip here, not where the module is imported: a run that deselects these tests shows no skipped ones."""
    global torch, transformers
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", "llama", "Llama", DECODER, (1, 2, 4)),
    "llama3 tied": Family(
        "LlamaForCausalLM", "LlamaConfig", "llama", "Llama",
        DECODER | {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE, "head_dim": 16},
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", "llama", "Llama", DECODER | {"sliding_window": 5}),
    "qwen2": Family(
        "Qwen2ForCausalLM", "Qwen2Config", "llama", "Llama", DECODER | {"tie_word_embeddings": True}
    ),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", "llama", "Llama", DECODER | {"head_dim": 8}),
    "gpt2": Family(
        "GPT2LMHeadModel", "GPT2Config", "gpt2", "GPT2",
        {"vocab_size": 48, "n_positions": 32, "n_embd": 32, "n_layer": 4, "n_head": 4, "bos_token_id": 1,
         "eos_token_id": 2},
        (1, 2, 4),
    ),
    "vit": Family(
        "ViTForImageClassification", "ViTConfig", "vit", "ViT",
        {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 40,
         "image_size": 16, "patch_size": 4, "num_labels": 5},
        (1, 2, 4),
    ),
}  # fmt: skip


def their_model(family: Family) -> Any:
    """A random model. Biases and norms are random too: zeros and ones would hide a leaf that is not filled."""
    torch.manual_seed(0)
    model = getattr(transformers, family.theirs)(getattr(transformers, family.config)(**family.options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name or "ln_" in name else 0.2 * noise)
    return model.eval()


def make_inputs(family: Family) -> np.ndarray:
    rng = np.random.default_rng(1)
    if family.file == "vit":
        return rng.normal(size=(4, 16, 16, 3)).astype(np.float32)
    return rng.integers(0, 48, (4, 24)).astype(np.int32)


def their_logits(model: Any, inputs: np.ndarray) -> np.ndarray:
    given = torch.tensor(inputs.transpose(0, 3, 1, 2) if inputs.ndim == 4 else inputs.astype(np.int64))
    with torch.no_grad():
        return model(given).logits.numpy()


def our_trainer(example: SimpleNamespace, family: Family, config: Mapping[str, Any], stages: int) -> PipelineTrainer:
    settings = getattr(example, f"{family.ours}Config").from_huggingface(config)
    model = getattr(example, family.ours)(settings, rngs=nnx.Rngs(5))
    return PipelineTrainer(
        model, optax.sgd(0.1), lambda model, x: jnp.mean(model(x)), num_stages=stages, num_microbatches=2, logging=False
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_equal_and_the_weights_come_back(name: str, tmp_path: Path):
    family = FAMILIES[name]
    theirs, inputs = their_model(family), make_inputs(family)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    expected = their_logits(theirs, inputs)
    example = load_example(f"pretrained/{family.file}.py")
    for stages in family.stages:
        trainer = our_trainer(example, family, config, stages)
        trainer.load_pretrained(tmp_path / "theirs", map=example.NAMES)
        trainer.compile(inputs)  # reads the weights to their ranks
        # Both compute in float32 and differ in the order of sums: about 1e-6 of the largest logit in four layers.
        bound = 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(trainer.predict(inputs), expected, rtol=0, atol=bound)
        out = trainer.export_pretrained(
            tmp_path / f"ours{stages}", map=example.NAMES, config=config, max_shard_bytes=20_000
        )
        back = getattr(transformers, family.theirs).from_pretrained(out).eval()
        for key, tensor in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[key], tensor), key
        np.testing.assert_array_equal(their_logits(back, inputs), expected)


def test_the_base_model_without_a_head_lacks_only_the_head(tmp_path: Path):
    family = FAMILIES["gpt2"]
    theirs = their_model(family)
    theirs.transformer.save_pretrained(tmp_path / "base")  # names without "transformer."
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    example = load_example("pretrained/gpt2.py")
    trainer = our_trainer(example, family, config, 1)
    trainer.load_pretrained(tmp_path / "base", map=example.NAMES)
    inputs = make_inputs(family)
    expected = their_logits(theirs, inputs)
    np.testing.assert_allclose(trainer.predict(inputs), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
