"""Weights in: every leaf is compared before a value is read, and each device gets its own slice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpp_flax import MpmdArray, MpmdMesh, MpmdSharding
from jaxpp_flax.checkpoint import CheckpointMismatchError, save
from jaxpp_flax.pretrained import NameMap, Rule, export_pretrained, load_pretrained
from jaxpp_flax.pretrained.slices import Index, StoredTensor
from jaxpp_flax.pretrained.sources import INDEX
from tests.helpers import tree_allclose
from tests.pretrained.weights import NAMES, RULES, make_tree, shard_of, write


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name and the number of elements of each read of values."""
    done: list[tuple[str, int]] = []
    read = StoredTensor.read

    def noted(self: StoredTensor, index: Index) -> np.ndarray:
        part = read(self, index)
        done.append((self.name, part.size))
        return part

    monkeypatch.setattr(StoredTensor, "read", noted)
    return done


def faults(path: Path, target: Any, names: NameMap = NAMES, **options: Any) -> Sequence[str]:
    with pytest.raises(CheckpointMismatchError) as caught:
        load_pretrained(path, target, map=names, **options)
    return caught.value.faults


def abstract(tree: Any, sharding: Any = None) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def test_arrays_of_numpy_and_on_the_default_device(tmp_path: Path):
    path, tree = write(tmp_path / "w"), make_tree()
    loaded = load_pretrained(path, tree, map=NAMES)
    assert isinstance(loaded["embed"]["embedding"], np.ndarray)
    tree_allclose(loaded, tree, rtol=0, atol=0)
    placed = load_pretrained(path, abstract(tree), map=NAMES)
    assert placed["embed"]["embedding"].devices() == {jax.devices()[0]}
    tree_allclose(placed, tree, rtol=0, atol=0)


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data"), P(("data", "tensor")), P("tensor", "data")], ids=str)
def test_each_device_gets_its_slice_and_nothing_else_is_read(tmp_path: Path, spec: P, reads: list[tuple[str, int]]):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    sharding = NamedSharding(mesh, spec)
    tree = {"blocks": make_tree()["blocks"]}
    path = write(tmp_path / "w", tree)
    loaded = load_pretrained(path, abstract(tree, sharding), map=NAMES)
    tree_allclose(loaded, tree, rtol=0, atol=0)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(loaded))
    # Devices that hold the same slice share one read of it.
    assert sum(size for _, size in reads) == sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_every_rank_reads_its_own_leaves_and_a_tied_one_is_on_two(tmp_path: Path, reads: list[tuple[str, int]]):
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "fsdp")), "stage")
    tree = make_tree(tied=True)
    ranks = {"embed": {"embedding": {0, 1}}, "blocks": [{"kernel": {i}, "query": {i}} for i in (0, 1)]}
    target = jax.tree.map(
        lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=MpmdSharding(mesh, of, P("fsdp"))), tree, ranks
    )
    loaded = load_pretrained(write(tmp_path / "w", tree), target, map=NAMES)
    tree_allclose(jax.tree.map(np.asarray, loaded), tree, rtol=0, atol=0)
    leaf = loaded["blocks"][1]["query"]
    assert isinstance(leaf, MpmdArray)
    assert leaf.mpmd_idxs == (1,)
    assert sorted(reads)[0] == ("model.embed.weight", 12)  # a half, for one device


def test_a_step_may_donate_one_copy_and_leaves_the_other(tmp_path: Path):
    """On CPU both devices may look at the slice that was read once."""
    tree = {"embed": {"embedding": np.arange(64 * 64, dtype=np.float32).reshape(64, 64)}}
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P())
    loaded = load_pretrained(write(tmp_path / "w", tree), abstract(tree, sharding), map=NAMES)
    first, second = (shard.data for shard in loaded["embed"]["embedding"].addressable_shards)
    changed = jax.jit(lambda x: x + 1, donate_argnums=0)(first)
    np.testing.assert_array_equal(changed, tree["embed"]["embedding"] + 1)
    np.testing.assert_array_equal(second, tree["embed"]["embedding"])


def test_layers_of_a_scan(tmp_path: Path):
    names = NameMap(
        (
            *RULES[:1],
            Rule("layers/*/kernel", "model.layers.#.fc.weight", transpose=(1, 0), stack=0),
            Rule("layers/*/query", "model.layers.#.q.weight", merge=(2, 1), transpose=(2, 0, 1), stack=1),
        )
    )
    tree = make_tree(4, tied=True)
    blocks = tree["blocks"]
    path = write(tmp_path / "w", tree)
    stacked = {
        "embed": tree["embed"],
        "layers": {
            name: {
                "kernel": np.stack([blocks[i]["kernel"] for i in of]),
                "query": np.stack([blocks[i]["query"] for i in of], axis=1),
            }
            for name, of in (("stage_0", (0, 1, 2)), ("stage_1", (3,)))
        },
    }
    tree_allclose(load_pretrained(path, stacked, map=names), stacked, rtol=0, atol=0)


def test_all_faults_at_once_and_before_a_value_is_read(tmp_path: Path, reads: list[tuple[str, int]]):
    path = write(tmp_path / "w", config={"architectures": ["TinyForTests"]})
    tree = make_tree(3)
    tree["blocks"][0]["kernel"] = np.zeros((4, 9), np.float32)
    tree["embed"]["embedding"] = jnp.zeros((6, 4), jnp.bfloat16)
    tree["extra"] = np.zeros(1, np.float32)
    del tree["head"]
    with pytest.raises(CheckpointMismatchError, match=f"the weights of TinyForTests at {path}/.* do not fit the model"):
        load_pretrained(path, tree, map=NAMES)
    shard = {name: shard_of(path, name).name for name in ("model.embed.weight", "model.layers.0.fc.weight")}
    assert faults(path, tree) == (
        "extra: no rule of the map fills it. Add a Rule for it, or name it in keep=",
        f"blocks/0/kernel: model.layers.0.fc.weight in {shard['model.layers.0.fc.weight']} has shape (8, 4), wanted "
        "(9, 4) for the leaf's (4, 9). Make the model with the sizes of the files, change its rule, or name it in "
        "keep=",
        "blocks/2/kernel: the files have no model.layers.2.fc.weight. Change the map, or name the leaf in keep=",
        "blocks/2/query: the files have no model.layers.2.q.weight. Change the map, or name the leaf in keep=",
        f"embed/embedding: model.embed.weight in {shard['model.embed.weight']} has dtype float32, wanted bfloat16: "
        "pass cast=True to convert",
        f"lm_head.weight: in {shard_of(path, 'lm_head.weight').name}, and no leaf takes it. The model ties it to "
        "model.embed.weight, and these files do not: make the model with its own leaf",
    )
    assert not reads


def test_a_forgotten_transpose_is_told(tmp_path: Path):
    path = write(tmp_path / "w", {"head": {"kernel": np.ones((4, 6), np.float32)}})
    plain = NameMap((Rule("head/kernel", "lm_head.weight"),))
    (fault,) = faults(path, {"head": {"kernel": np.ones((4, 6), np.float32)}}, plain)
    assert fault.endswith("has shape (6, 4), wanted (4, 6) for the leaf's (4, 6). Give its rule transpose=(1, 0)")


def test_weights_of_another_model_are_told_in_few_lines(tmp_path: Path):
    path = write(tmp_path / "w")
    with pytest.raises(CheckpointMismatchError) as caught:
        load_pretrained(path, {"decoder": [np.zeros(1, np.float32)] * 40}, map=NAMES)
    head, *lines = str(caught.value).splitlines()
    assert head.endswith("do not fit the model. 46 leaves are wrong:")
    assert len(caught.value.faults) == 46
    assert lines[0].strip() == (
        "decoder/*: 40 times, first at decoder/0: no rule of the map fills it. Add a Rule for it, or name it in keep="
    )
    assert len(lines) == 1 + 4 + 1  # and one of each kind of tensor
    assert "Are these the weights of this model, with its sizes?" in lines[-1]


def with_adapters(tree: dict[str, Any]) -> dict[str, Any]:
    """A model whose blocks have adapters, and with a new head."""
    blocks = [{**block, "lora": {"lora_a": np.ones(2), "lora_b": np.ones(2)}} for block in tree["blocks"]]
    return {**tree, "blocks": blocks}


LACKING = {
    "adapters": (with_adapters, "", 60, 'keep="blocks/*/lora/*"'),
    "a head": (lambda tree: {**tree, "score": {"kernel": np.ones(2), "bias": np.ones(2)}}, "", 2, 'keep="score/*"'),
    "a leaf": (lambda tree: {**tree, "scale": np.ones(2)}, "", 1, 'keep="scale"'),
    "both": (
        lambda tree: {**with_adapters(tree), "score": {"kernel": np.ones(2)}}, "", 61,
        'keep=["blocks/*/lora/*", "score/kernel"]',
    ),
    "in layers": (
        lambda tree: {**tree, "blocks": [{**block, "gate": np.ones(2)} for block in tree["blocks"]]}, ["none/*"], 30,
        'keep=["none/*", "blocks/*/gate"]',
    ),
    "by a function": (
        with_adapters, lambda path: path.endswith("lora_a"), 30, "a function keep= that also names blocks/*/lora/*"
    ),
}  # fmt: skip


@pytest.mark.parametrize("mapped", [True, False], ids=["a map", "no map"])
@pytest.mark.parametrize(("change", "keep", "count", "remedy"), LACKING.values(), ids=LACKING.keys())
def test_leaves_that_the_files_lack_are_counted_and_keep_is_named(
    tmp_path: Path, mapped: bool, change: Any, keep: Any, count: int, remedy: str
):
    options: dict[str, Any] = {"map": NAMES} if mapped else {}
    tree = make_tree(30)
    path = export_pretrained(tree, tmp_path / "w", **options)
    target = change(tree)
    with pytest.raises(CheckpointMismatchError, match=r"(is|are) wrong") as caught:
        load_pretrained(path, target, keep=keep or (), **options)
    text = str(caught.value)
    assert f" {count} lea" in text.splitlines()[0]
    assert len(text.splitlines()) <= 5
    assert remedy in text
    given = {"keep": keep if callable(keep) else eval(remedy.removeprefix("keep="))}
    if not callable(keep):
        loaded = load_pretrained(path, target, **given, **options)
        np.testing.assert_array_equal(loaded["blocks"][29]["query"], tree["blocks"][29]["query"])


def test_ties(tmp_path: Path):
    tied, tree = write(tmp_path / "tied", make_tree(tied=True)), make_tree()
    (fault,) = faults(tied, tree)
    assert fault == (
        "head/kernel: the files have no lm_head.weight, because it is tied to model.embed.weight. Make the model with "
        "tied embeddings, or pass untie=True to begin with a copy"
    )
    loaded = load_pretrained(tied, tree, map=NAMES, untie=True)
    np.testing.assert_array_equal(loaded["head"]["kernel"], loaded["embed"]["embedding"].T)


def test_names_without_the_prefix_and_tensors_that_are_ignored(tmp_path: Path):
    short = NameMap(tuple(dataclasses.replace(rule, tensor=rule.tensor.removeprefix("model.")) for rule in RULES))
    path = export_pretrained(make_tree(), tmp_path / "w", map=short)
    tree_allclose(load_pretrained(path, make_tree(), map=NAMES), make_tree(), rtol=0, atol=0)
    masked = NameMap((*short.rules, Rule("mask", "layers.0.mask")))
    path = export_pretrained({**make_tree(), "mask": np.ones(3)}, tmp_path / "masked", map=masked)
    tree_allclose(load_pretrained(path, make_tree(), map=NAMES), make_tree(), rtol=0, atol=0)


def test_cast_keep_and_dtypes_that_do_not_fit(tmp_path: Path):
    path = write(tmp_path / "w", make_tree(dtype=jnp.bfloat16))
    loaded = load_pretrained(path, make_tree(), map=NAMES, cast=True)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), make_tree())
    tree_allclose(loaded, half, rtol=0, atol=0)
    tree = make_tree(dtype=jnp.bfloat16)
    tree["blocks"][0]["lora_a"] = np.full(2, 5.0)
    kept = load_pretrained(path, tree, map=NAMES, keep="*/lora_*")
    np.testing.assert_array_equal(kept["blocks"][0]["lora_a"], [5.0, 5.0])
    wrong = make_tree(dtype=jnp.bfloat16)
    wrong["head"] = {"kernel": np.zeros((4, 6), np.int32)}
    (fault,) = faults(path, wrong, cast=True)
    assert fault.endswith("has dtype bfloat16, wanted int32. Make it in bfloat16, or name it in keep=")
    keys = {**make_tree(dtype=jnp.bfloat16), "head": {"kernel": jax.random.split(jax.random.key(0), (4, 6))}}
    assert "it holds random keys, which no file of weights has. Name it in keep=" in faults(path, keys)[0]
    assert faults(path, {})[-1].startswith("the target has no leaves to fill")


def test_a_sharding_that_does_not_divide(tmp_path: Path):
    path = write(tmp_path / "w")
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("data",)), P("data"))
    assert all("does not fit the wanted sharding" in fault for fault in faults(path, abstract(make_tree(), sharding)))


def test_a_dtype_that_cannot_be_read_is_named_where_a_leaf_needs_it(tmp_path: Path):
    tree = make_tree()
    tree["head"]["kernel"] = tree["head"]["kernel"].astype(np.uint8)
    path = write(tmp_path / "w", tree)
    shard = shard_of(path, "lm_head.weight")
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'"U8"', b'"F8_E4M3"')  # the package `safetensors` reads it for PyTorch alone
    shard.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    (fault,) = faults(path, make_tree())
    assert fault == (
        f"head/kernel: lm_head.weight in {shard.name} has a dtype that cannot be read into JAX. Convert it in the "
        "library that wrote it"
    )
    with pytest.raises(CheckpointMismatchError, match=r"lm_head/weight: its dtype, None, cannot be written"):
        export_pretrained(path, tmp_path / "again")
    assert json.loads((path / INDEX).read_text())["metadata"]["total_size"] > 0


def test_through_a_map_out_of_an_orbax_checkpoint(tmp_path: Path):
    tree = make_tree()
    stored = {"w": tree["head"]["kernel"].T, "layers": [{"q": tree["blocks"][0]["query"]}]}
    path = save(tmp_path / "orbax", {"params": stored})
    names = NameMap((Rule("head/kernel", "w", (1, 0)), Rule("blocks/*/query", "layers.*.q")))
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
    target = abstract({"head": tree["head"], "blocks": [{"query": tree["blocks"][0]["query"]}]}, sharding)
    loaded = load_pretrained(path, target, map=names)
    np.testing.assert_array_equal(loaded["head"]["kernel"], tree["head"]["kernel"])
    np.testing.assert_array_equal(loaded["blocks"][0]["query"], tree["blocks"][0]["query"])
