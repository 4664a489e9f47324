"""`verify` on the models of `examples`, which follow those of Flax and of `transformers`: all are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxpp_flax import PipelineTrainer
from jaxpp_flax.trainers import MeshOptions
from jaxpp_flax.verify import verify
from tests.examples.models.comparing import load, tokens
from tests.examples.running import load_example
from tests.examples.test_pretrained_maps import CASES

pytestmark = [
    pytest.mark.slow,
    # The experts' capacity is that of a microbatch.
    pytest.mark.filterwarnings("ignore::jaxpp_flax.trainers.MicrobatchLossWarning"),
]

SIZES = {"vocabulary": 11, "width": 8, "hidden": 16, "heads": 2, "length": 6}
TEXT = tokens(0, 8, 7, 11)


def pretrained(case: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    file, name, config, _ = CASES[case]
    example = load_example(f"pretrained/{file}.py")
    settings = getattr(example, f"{name}Config").from_huggingface(config | {"num_hidden_layers": 2, "n_layer": 2})
    image = np.random.default_rng(0).normal(size=(8, 16, 16, 3)).astype(np.float32)
    inputs, targets = (image, TEXT[:, 0] % 5) if case == "vit" else (TEXT[:, :-1], TEXT[:, 1:])

    def loss_fn(model: Any, batch: Any) -> Any:
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return getattr(example, name)(settings, rngs=nnx.Rngs(0)), loss_fn, {"inputs": inputs, "targets": targets}, {}


def decoder() -> tuple[Any, Any, Any, dict[str, Any]]:
    example = load("decoder_pipelined")
    model = example.TransformerLM(example.TransformerConfig(**SIZES, layers=2), rngs=nnx.Rngs(0))
    return model, example.loss_fn, {"inputs": TEXT[:, :-1], "targets": TEXT[:, 1:]}, {}


def vit() -> tuple[Any, Any, Any, dict[str, Any]]:
    example = load("vit_pipelined")
    model = example.ViT(size=8, patch=4, channels=1, classes=5, width=8, layers=2, heads=2, rngs=nnx.Rngs(0))
    image = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
    return model, example.loss_fn, {"image": image, "label": TEXT[:, 0] % 5}, {}


def scanned() -> tuple[Any, Any, Any, dict[str, Any]]:
    example = load("scanned_pipelined")
    model = example.Transformer(example.TransformerConfig(**SIZES, layers=8))
    batch = {"tokens": TEXT[:, :-1], "targets": TEXT[:, 1:]}
    with nn.logical_axis_rules(example.AXIS_RULES):
        variables = model.init(jax.random.key(0), batch["tokens"])
    mesh = MeshOptions(axes={"data": 2}, sharding_rules=example.AXIS_RULES)
    return model, example.loss_fn, batch, {"variables": variables, "mesh": mesh}


def experts() -> tuple[Any, Any, Any, dict[str, Any]]:
    example = load_example("mixture_of_experts.py")
    batch = example.make_batch(np.random.default_rng(0), 8, 8)
    return lambda rngs: example.Model(rngs=rngs), example.loss_fn, batch, {"mesh": {"expert": 2}}


MODELS: dict[str, Callable[[], tuple[Any, Any, Any, dict[str, Any]]]] = {
    "decoder": decoder,
    "vit": vit,
    "scanned": scanned,
    "experts": experts,
    **{f"pretrained {case}": lambda case=case: pretrained(case) for case in CASES},
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_right(name: str, all_devices: None):
    model, loss_fn, batch, options = MODELS[name]()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    trainer = PipelineTrainer(
        model, tx, loss_fn, num_stages=2, num_microbatches=2, logging=False, **{"mesh": {}, **options}
    )
    report = verify(trainer, batch)
    assert report.agrees, report
    assert {"forward", "backward", "gradient", "scalar", "state"} <= {row.kind for row in report.rows}
    jax.clear_caches()
