"""Where weights come from: what is found in a directory, and what is missing there."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxpp_flax.checkpoint import CheckpointNotFoundError, CorruptCheckpointError
from jaxpp_flax.pretrained import export_pretrained
from jaxpp_flax.pretrained.sources import INDEX, open_source
from tests.pretrained.weights import shard_of, write


def test_a_directory_an_index_and_one_file_are_the_same(tmp_path: Path):
    shards = write(tmp_path / "shards", config={"architectures": ["Tiny"]})
    assert len(list(shards.glob("*.safetensors"))) > 2
    one = export_pretrained({"a": np.ones(2)}, tmp_path / "one")
    assert set(open_source(shards).tensors) == set(open_source(shards / INDEX).tensors)
    assert open_source(shards).architecture == "Tiny"
    assert list(open_source(one).tensors) == list(open_source(one / "model.safetensors").tensors) == ["a"]
    (one / "model.safetensors").rename(one / "adapter_model.safetensors")
    assert list(open_source(one).tensors) == ["a"]


def test_what_is_missing_is_named(tmp_path: Path):
    with pytest.raises(CheckpointNotFoundError, match="there is no such file or directory"):
        open_source(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointNotFoundError, match=r"pytorch_model.bin is a pickle.*save_pretrained"):
        open_source(tmp_path)
    path = write(tmp_path / "shards")
    (path / INDEX).rename(tmp_path / INDEX)
    with pytest.raises(CheckpointNotFoundError, match=f"several safetensors files and no {INDEX}: model-00001"):
        open_source(path)
    (tmp_path / INDEX).rename(path / INDEX)
    shard = shard_of(path, "lm_head.weight")
    shard.unlink()
    with pytest.raises(CheckpointNotFoundError, match=rf"missing: {shard.name}; .* is in {shard.name}. Copy or"):
        open_source(path)


def test_a_damaged_index_and_one_of_other_shards(tmp_path: Path):
    path = write(tmp_path / "shards")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["other.weight"] = next(iter(index["weight_map"].values()))
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptCheckpointError, match=r"other.weight is in the shard model-.*different export"):
        open_source(path)
    for text in ("{", "[]", '{"weight_map": 3}'):
        (path / INDEX).write_text(text)
        with pytest.raises(CorruptCheckpointError, match=r"the index .* cannot be read"):
            open_source(path)


def make_hub_cache(folder: Path) -> None:
    """A cache of the Hub with one repository, as `huggingface_hub` makes it."""
    repository = folder / "models--tiny--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(write(folder / "weights", config={"model_type": "tiny"}), repository / "snapshots" / ("0" * 40))


@pytest.mark.extras
def test_a_name_of_the_hub_is_read_from_the_cache_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    make_hub_cache(tmp_path)
    opened = open_source("tiny/model")
    assert opened.architecture == "tiny"
    assert opened.tensors.keys() == open_source(tmp_path / "weights").tensors.keys()
    with pytest.raises(
        CheckpointNotFoundError, match=r"no weights at tiny/other: .* the Hugging Face Hub does not give"
    ):
        open_source("tiny/other")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "weights").rename(tmp_path / "tiny" / "model")
    monkeypatch.chdir(tmp_path)
    assert open_source("tiny/model").path == tmp_path / "tiny" / "model" / INDEX  # a directory goes first


def test_without_the_package_a_name_of_the_hub_is_refused_with_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointNotFoundError, match=r"no weights at tiny/model: .*jaxpp-flax\[huggingface\]"):
        open_source("tiny/model")
    with pytest.raises(CheckpointNotFoundError, match=r"no such file or directory. Check the path"):
        open_source(os.sep.join(["", "tiny", "model"]))
