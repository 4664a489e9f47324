"""Small trees of weights, their maps, and files of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpp_flax.pretrained import NameMap, Rule, export_pretrained

RULES = (
    Rule("embed/embedding", "model.embed.weight"),
    Rule("blocks/*/kernel", "model.layers.*.fc.weight", transpose=(1, 0)),
    Rule("blocks/*/query", "model.layers.*.q.weight", merge=(2, 1), transpose=(2, 0, 1)),
    Rule("head/kernel", "lm_head.weight", transpose=(1, 0)),
)
NAMES = NameMap(RULES, prefix="model.", ignore=("*.mask",), ties={"lm_head.weight": "model.embed.weight"})


def make_tree(blocks: int = 2, *, tied: bool = False, dtype: Any = np.float32) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    tree: dict[str, Any] = {
        "embed": {"embedding": values(6, 4)},
        "blocks": [{"kernel": values(4, 8), "query": values(4, 2, 6)} for _ in range(blocks)],
    }
    return tree if tied else {**tree, "head": {"kernel": values(4, 6)}}


def write(path: Path, tree: Any = None, **options: Any) -> Path:
    """Three shards and more, with their index, as in the map."""
    return export_pretrained(make_tree() if tree is None else tree, path, map=NAMES, max_shard_bytes=250, **options)


def shard_of(directory: Path, tensor: str) -> Path:
    named: Mapping[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return directory / named[tensor]
