"""The maps of examples/pretrained are for the names and shapes that `transformers` writes; configurations are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxpp_flax.pretrained import NameMap
from tests.examples.running import load_example

Shapes = dict[str, tuple[int, ...]]


def tensors_of(names: NameMap, model: nnx.Module) -> Shapes:
    """The tensors that an export of the model has."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    shapes = {"/".join(str(key.key) for key in path): leaf.shape for path, leaf in leaves}
    fills, faults = names.resolve(shapes)
    assert not faults
    return {fill.tensors[0]: fill.rule.tensor_shape(shapes[fill.leaf]) for fill in fills}


def made(file: str, name: str, config: dict[str, Any]) -> Shapes:
    example = load_example(f"pretrained/{file}.py")
    settings = getattr(example, f"{name}Config").from_huggingface(config)
    return tensors_of(example.NAMES, nnx.eval_shape(lambda: getattr(example, name)(settings, rngs=nnx.Rngs(0))))


def under(prefix: str, **shapes: tuple[int, ...]) -> Shapes:
    return {f"{prefix}{name.replace('__', '.')}": shape for name, shape in shapes.items()}


# What `save_pretrained` wrote for a layer of each, of width 32 and four heads.
DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
LLAMA = under(
    "model.", embed_tokens__weight=(64, 32), norm__weight=(32,)
) | under(
    "model.layers.0.", input_layernorm__weight=(32,), post_attention_layernorm__weight=(32,),
    mlp__down_proj__weight=(32, 48), mlp__gate_proj__weight=(48, 32), mlp__up_proj__weight=(48, 32),
    self_attn__k_proj__weight=(16, 32), self_attn__o_proj__weight=(32, 32), self_attn__q_proj__weight=(32, 32),
    self_attn__v_proj__weight=(16, 32),
)  # fmt: skip
HEAD = {"lm_head.weight": (64, 32)}
ATTENTION = "model.layers.0.self_attn."
CASES: dict[str, tuple[str, str, dict[str, Any], Shapes]] = {
    "llama": ("llama", "Llama", DECODER | {"model_type": "llama"}, LLAMA | HEAD),
    "mistral": ("llama", "Llama", DECODER | {"model_type": "mistral", "sliding_window": 4}, LLAMA | HEAD),
    "qwen2": (
        "llama", "Llama", DECODER | {"model_type": "qwen2", "tie_word_embeddings": True},
        LLAMA | under(ATTENTION, q_proj__bias=(32,), k_proj__bias=(16,), v_proj__bias=(16,)),
    ),
    "qwen3": (
        "llama", "Llama", DECODER | {"model_type": "qwen3", "head_dim": 8},
        LLAMA | HEAD | under(ATTENTION, q_norm__weight=(8,), k_norm__weight=(8,)),
    ),
    "gpt2": (
        "gpt2", "GPT2",
        {"model_type": "gpt2", "vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 4,
         "layer_norm_epsilon": 1e-5},
        under("transformer.", wte__weight=(64, 32), wpe__weight=(32, 32), ln_f__weight=(32,), ln_f__bias=(32,))
        | under(
            "transformer.h.0.", attn__c_attn__weight=(32, 96), attn__c_attn__bias=(96,), attn__c_proj__weight=(32, 32),
            attn__c_proj__bias=(32,), ln_1__weight=(32,), ln_1__bias=(32,), ln_2__weight=(32,), ln_2__bias=(32,),
            mlp__c_fc__weight=(32, 128), mlp__c_fc__bias=(128,), mlp__c_proj__weight=(128, 32), mlp__c_proj__bias=(32,),
        ),
    ),
    "vit": (
        "vit", "ViT",
        {"model_type": "vit", "image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": 5, "hidden_size": 32,
         "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "layer_norm_eps": 1e-12},
        under("classifier.", weight=(5, 32), bias=(5,)) | under("vit.layernorm.", weight=(32,), bias=(32,))
        | under(
            "vit.embeddings.", cls_token=(1, 1, 32), position_embeddings=(1, 17, 32),
            patch_embeddings__projection__weight=(32, 3, 4, 4), patch_embeddings__projection__bias=(32,),
        )
        | {
            f"vit.encoder.layer.0.{layer}.{name}": shape if name == "weight" else shape[:1]
            for layer, shape in {
                "attention.attention.query": (32, 32), "attention.attention.key": (32, 32),
                "attention.attention.value": (32, 32), "attention.output.dense": (32, 32),
                "intermediate.dense": (48, 32), "output.dense": (32, 48), "layernorm_before": (32,),
                "layernorm_after": (32,),
            }.items()
            for name in ("weight", "bias")
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_export_has_the_names_and_shapes_of_transformers(name: str):
    file, model, config, expected = CASES[name]
    assert made(file, model, config) == expected


@pytest.mark.parametrize(
    ("file", "model", "change", "message"),
    [
        ("llama", "Llama", {"model_type": "gemma"}, "model_type 'gemma'"),
        ("llama", "Llama", {"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ("llama", "Llama", {"model_type": "qwen2", "layer_types": ["a", "b"]}, "several kinds of attention"),
        ("gpt2", "GPT2", {"model_type": "gpt2", "activation_function": "relu"}, "activation_function 'relu'"),
        ("vit", "ViT", {"model_type": "vit", "qkv_bias": False}, "qkv_bias False"),
    ],
)
def test_a_configuration_that_the_model_does_not_compute_is_refused(
    file: str, model: str, change: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=rf"{message}.*examples/pretrained/{file}.py computes"):
        made(file, model, DECODER | change)


def test_older_configurations_of_rotary_positions(tmp_path: Path):
    example = load_example("pretrained/llama.py")
    old = {**DECODER, "model_type": "llama", "rope_theta": 5e5, "rope_parameters": None}
    config = example.LlamaConfig.from_huggingface(old | {"rope_scaling": None})
    assert (config.rope_theta, config.rope_scaling) == (5e5, None)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    scaled = example.LlamaConfig.from_huggingface(old | {"rope_scaling": scaling, "head_dim": 64})
    ratio = example.frequencies(scaled) / (5e5 ** -(np.arange(0, 64, 2) / 64))
    # Fast turns stay, slow ones are eight times slower.
    np.testing.assert_allclose([ratio[0], ratio[-1]], [1, 1 / 8], rtol=1e-6)
    assert np.all(np.diff(ratio) <= 1e-6)
