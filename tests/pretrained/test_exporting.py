"""Weights out: shards of the wanted size, every layout the same bytes, and nothing left of a failed export."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax import MpmdMesh, MpmdSharding
from jaxpp_flax.checkpoint import CheckpointMismatchError, CheckpointSaveError, save
from jaxpp_flax.engine.arrays.placing import place_on_ranks
from jaxpp_flax.pretrained import NameMap, Rule, export_pretrained, load_pretrained
from jaxpp_flax.pretrained.exporting import ExportPlan
from jaxpp_flax.pretrained.sources import INDEX
from tests.helpers import tree_allclose
from tests.pretrained.weights import NAMES, make_tree, write


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("spec", [P(), P("fsdp"), P(None, "fsdp")], ids=str)
def test_every_layout_writes_the_same_bytes(tmp_path: Path, spec: P):
    plain = write(tmp_path / "plain")
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("stage", "fsdp")), "stage")
    ranks = {"embed": {0, 3}, "blocks": {1, 2}, "head": {3}}
    tree = {
        part: jax.tree.map(lambda x, of=ranks[part]: place_on_ranks(x, MpmdSharding(mesh, of, spec)), leaves)
        for part, leaves in make_tree().items()
    }
    assert contents(write(tmp_path / "ranks", tree)) == contents(plain)


def test_shards_are_as_large_as_asked_and_the_index_tells_all(tmp_path: Path):
    path = write(tmp_path / "w", config={"model_type": "tiny"})
    index = json.loads((path / INDEX).read_text())
    files = sorted(file.name for file in path.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(make_tree()))
    assert json.loads((path / "config.json").read_text()) == {"model_type": "tiny"}
    one = export_pretrained(make_tree(), tmp_path / "one", map=NAMES)
    assert [file.name for file in one.iterdir()] == ["model.safetensors"]


def test_only_some_leaves_and_none(tmp_path: Path):
    path = export_pretrained(make_tree(), tmp_path / "w", map=NAMES, only="head")
    tree_allclose(load_pretrained(path, {"head": make_tree()["head"]}, map=NAMES), {"head": make_tree()["head"]})
    with pytest.raises(CheckpointMismatchError, match="no leaf of the tree matches only='typo'"):
        export_pretrained(make_tree(), tmp_path / "x", only="typo")
    with pytest.raises(ValueError, match="max_shard_bytes=0"):
        export_pretrained(make_tree(), tmp_path / "x", max_shard_bytes=0)


def test_a_map_that_does_not_fit_writes_nothing(tmp_path: Path):
    tree = {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2), "key": jax.random.key(0)}
    names = NameMap((Rule("a", "w"), Rule("b", "w"), Rule("key", "key")))
    with pytest.raises(CheckpointMismatchError) as caught:
        export_pretrained(tree, tmp_path / "w", map=names)
    assert caught.value.faults == (
        "c: no rule of the map fills it. Add a Rule for it, or name it in keep=",
        "b: its tensor w fills a too. Give each leaf its own in the map",
        "key: its dtype, key<fry>, cannot be written to safetensors. Leave it out by only=",
    )
    assert not list(tmp_path.iterdir())


def test_a_directory_that_exists_is_left_as_it_is(tmp_path: Path):
    path = write(tmp_path / "w")
    before = contents(path)
    with pytest.raises(CheckpointSaveError, match="it exists, and is left as it is"):
        write(path)
    assert contents(path) == before


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointSaveError, match=r"exporting to .*/w failed: in process 0: OSError.*No space left"):
        write(tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_no_error_leaves_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path / "w", config={"dtype": jnp.dtype("float32")})
    assert not list(tmp_path.iterdir())

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "w")
    assert not list(tmp_path.iterdir())


def test_of_two_exports_to_one_place_the_second_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = ExportPlan.write

    def overtaken(self: ExportPlan, directory: Path, leaves: Any) -> None:
        monkeypatch.undo()
        write(tmp_path / "w")
        original(self, directory, leaves)

    monkeypatch.setattr(ExportPlan, "write", overtaken)
    with pytest.raises(CheckpointSaveError, match=r"exporting to .*/w failed: OSError"):
        write(tmp_path / "w", make_tree(3))
    assert [file.name for file in tmp_path.iterdir()] == ["w"]
    tree_allclose(load_pretrained(tmp_path / "w", make_tree(), map=NAMES), make_tree(), rtol=0, atol=0)


def test_a_checkpoint_and_other_files_without_their_arrays_in_memory(tmp_path: Path):
    tree = {"head": {"kernel": jnp.arange(24.0).reshape(4, 6)}}
    saved = save(tmp_path / "run", {"params": tree, "step": jnp.int32(1), "model_state": {"key": jnp.ones(2)}})
    path = export_pretrained(saved, tmp_path / "w", map=NameMap(NAMES.rules[3:]))
    tree_allclose(load_pretrained(path, tree, map=NAMES), tree, rtol=0, atol=0)
    again = export_pretrained(path, tmp_path / "again")
    assert contents(again) == contents(path)


def test_values_on_the_host_are_not_kept(tmp_path: Path):
    """NumPy values are cached in the array that they came from."""
    array = jnp.ones((4, 6))
    export_pretrained({"head": {"kernel": array}}, tmp_path / "w", map=NAMES)
    assert [shard.data._npy_value for shard in array.addressable_shards] == [None]  # type: ignore[attr-defined]
