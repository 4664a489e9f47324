"""What restoring refuses, all at once; parts of a checkpoint; new names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax.checkpoint import (
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    CorruptCheckpointError,
    UnfinishedCheckpointError,
    leaves_of,
    restore,
    save,
)
from jaxpp_flax.checkpoint.format.integrity import needed_bytes
from jaxpp_flax.checkpoint.format.paths import flatten, nest
from tests.helpers import tree_allclose


def state():
    return {
        "params": {"a": jnp.arange(6.0).reshape(2, 3), "b": {"w": jnp.ones(4), "v": jnp.zeros(4, jnp.int32)}},
        "opt_state": [jnp.ones(3)],
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("reading") / "ckpt", state())


def test_every_wrong_leaf_is_listed(path: Path):
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
    target = {
        "params": {
            "a": jnp.zeros((3, 2)),
            "b": {
                "w": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P("x"))),
                "v": jnp.zeros(4, jnp.int8),
                "new": jnp.zeros(1),
            },
        }
    }
    with pytest.raises(CheckpointMismatchError) as caught:
        restore(path, target)
    faults = {fault.partition(":")[0]: fault for fault in caught.value.faults}
    assert set(faults) == {"params/a", "params/b/w", "params/b/v", "params/b/new", "opt_state/0"}
    assert "shape (2, 3) in the checkpoint, wanted (3, 2)" in faults["params/a"]
    assert "does not fit the wanted sharding" in faults["params/b/w"]
    assert "dtype int32 in the checkpoint, wanted int8" in faults["params/b/v"]
    assert "missing in the checkpoint" in faults["params/b/new"]
    assert "not in the target" in faults["opt_state/0"]
    assert all(fault in str(caught.value) for fault in faults.values())
    assert str(path) in str(caught.value)


def test_part_of_a_checkpoint(path: Path):
    target = {"params": jax.tree.map(lambda x: x - 5, state()["params"]), "opt_state": [jnp.full(3, 9.0)]}
    restored = restore(path, target, only="params/b/*")
    tree_allclose(restored["params"]["b"], state()["params"]["b"])
    tree_allclose(restored["params"]["a"], target["params"]["a"])
    tree_allclose(restored["opt_state"], target["opt_state"])


def test_renamed_paths(path: Path):
    target = {"model": {"first": jnp.zeros((2, 3)), "rest": {"w": jnp.zeros(4), "v": jnp.zeros(4, jnp.int32)}}}
    rename = {"model": "params", "model/first": "params/a", "model/rest": "params/b"}
    restored = restore(path, target, rename=rename, only="model/*")
    tree_allclose(restored["model"]["first"], state()["params"]["a"])
    tree_allclose(restored["model"]["rest"], state()["params"]["b"])


def test_a_base_model_into_one_with_adapters(path: Path):
    adapter = jnp.full((2, 1), 0.5)
    target = {"base": jax.tree.map(jnp.zeros_like, state()["params"]), "lora": {"a": adapter}}
    with pytest.raises(CheckpointMismatchError, match="lora/a: missing"):
        restore(path, target, rename={"base": "params"}, extra="ignore")
    restored = restore(path, target, rename={"base": "params"}, extra="ignore", missing="keep")
    tree_allclose(restored["base"], state()["params"])
    assert restored["lora"]["a"] is adapter


def test_a_value_to_keep_must_exist(path: Path):
    target = {"params": {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "x": jax.ShapeDtypeStruct((1,), jnp.float32)}}
    with pytest.raises(CheckpointMismatchError, match="params/x: left out by `only`"):
        restore(path, target, only="params/a")
    with pytest.raises(CheckpointMismatchError, match="params/x: missing"):
        restore(path, target, missing="keep", extra="ignore")
    with pytest.raises(CheckpointMismatchError, match="no leaf of the target matches only='typo/"):
        restore(path, state(), only="typo/*")


def test_numpy_numbers_and_keys_come_back_as_such(tmp_path: Path):
    keys = jax.random.split(jax.random.key(3, impl="rbg"), 2)
    path = save(tmp_path / "x", {"n": np.arange(3), "i": 7, "f": 0.5, "b": True, "k": keys})
    restored = restore(path, {"n": np.zeros(3, int), "i": 0, "f": 0.0, "b": False, "k": jax.random.split(keys[0], 2)})
    assert (restored["i"], restored["f"], restored["b"]) == (7, 0.5, True)
    assert (type(restored["i"]), type(restored["b"]), type(restored["n"])) == (int, bool, np.ndarray)
    assert jax.random.key_impl(restored["k"]) == "rbg"
    np.testing.assert_array_equal(jax.random.key_data(restored["k"]), jax.random.key_data(keys))


def test_an_existing_path_is_left_alone(path: Path):
    before = leaves_of(path)
    with pytest.raises(CheckpointSaveError, match="it exists, and is left as it is"):
        save(path, {"x": jnp.ones(1)})
    assert leaves_of(path) == before


def test_wrong_paths(path: Path, tmp_path: Path):
    with pytest.raises(CheckpointNotFoundError, match="no such directory"):
        restore(tmp_path / "nothing", state())
    with pytest.raises(CheckpointNotFoundError, match="no Orbax checkpoint"):
        restore(tmp_path, state())
    (tmp_path / "7").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"of the steps 7. Pass one of them"):
        restore(tmp_path, state())
    (tmp_path / "8.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with pytest.raises(UnfinishedCheckpointError, match=r"8.orbax-checkpoint-tmp, which cannot be restored"):
        restore(tmp_path / "8", state())
    with pytest.raises(UnfinishedCheckpointError, match="cut off"):
        restore(tmp_path / "8.orbax-checkpoint-tmp", state())


def big(path: Path) -> Path:
    """The file that holds the arrays."""
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def truncate(path: Path) -> str:
    file = big(path)
    file.write_bytes(file.read_bytes()[:100])
    return rf"{file.name}: \d+ bytes, \d+ were written"


def delete(path: Path) -> str:
    file = big(path)
    file.unlink()
    return rf"{file.name}: missing"


def spoil_metadata(path: Path) -> str:
    (path / "_METADATA").write_text("{")
    return "cannot be read"


def spoil_shapes(path: Path) -> str:
    (path / "array_metadatas" / "process_0").write_text("")
    return "cannot be read"


def spoil_index(path: Path) -> str:
    """Of Orbax's database: it has a checksum."""
    file = path / "manifest.ocdbt"
    content = bytearray(file.read_bytes())
    content[-8] ^= 1
    file.write_bytes(content)
    return "cannot be read"


def lose_metadata(path: Path) -> str:
    (path / "_METADATA").unlink()
    return "_METADATA is missing"


@pytest.mark.parametrize("damage", [truncate, delete, spoil_metadata, spoil_shapes, spoil_index, lose_metadata])
def test_damage_is_noticed_and_named(damage, tmp_path: Path):
    tree = {"x": jnp.asarray(np.random.default_rng(0).normal(size=5000), jnp.float32)}
    path = save(tmp_path / "ckpt", tree)
    tree_allclose(restore(path, tree), tree)
    expected = damage(path)
    with pytest.raises(CorruptCheckpointError, match=expected):
        restore(path, tree)


def test_an_index_of_several_levels_is_read_whole(tmp_path: Path):
    config = {"max_inline_value_bytes": 10, "max_decoded_node_bytes": 5000}
    base = {"driver": "ocdbt", "base": f"file://{tmp_path}/", "config": config}
    store: Any = tensorstore.KvStore.open(base).result()  # pyright: ignore[reportAttributeAccessIssue]
    with tensorstore.Transaction() as transaction:  # pyright: ignore[reportAttributeAccessIssue]
        for number in range(2000):
            store.with_transaction(transaction)[f"leaf{number}"] = b"a value of 20 bytes."
    needed = needed_bytes(tmp_path)
    assert sum(needed.values()) > 40_000
    assert all((tmp_path / name).stat().st_size >= size for name, size in needed.items())


def test_damage_that_comes_later_gives_orbax_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = {"x": jnp.asarray(np.random.default_rng(0).normal(size=5000), jnp.float32)}
    path = save(tmp_path / "ckpt", tree)
    monkeypatch.setattr("jaxpp_flax.checkpoint.reading.check_files", lambda path: delete(path))
    with pytest.raises(CorruptCheckpointError, match=r"restore another one.*Orbax says"):
        restore(path, tree)


def test_paths_that_would_collide_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="two leaves of the tree have the path '0'"):
        flatten(_Collides())
    with pytest.raises(ValueError, match="runs through the leaf"):
        nest({"a": 1, "a/b": 2})
    with pytest.raises(ValueError, match="part of longer paths"):
        nest({"a/b": 2, "a": 1})
    with pytest.raises(ValueError, match="no leaves"):
        save(tmp_path / "x", {})


@jax.tree_util.register_pytree_with_keys_class
class _Collides:
    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.SequenceKey(0), jax.tree_util.DictKey("0"))
        return tuple((key, 1) for key in keys), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()
