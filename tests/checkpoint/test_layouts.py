"""Every layout to every layout that docs/guides/checkpointing.md names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpp_flax.checkpoint import restore, save
from jaxpp_flax.checkpoint.format.paths import flatten
from jaxpp_flax.engine.arrays.mesh import MpmdMesh
from jaxpp_flax.engine.arrays.mpmd_array import MpmdArray, MpmdSharding
from tests.checkpoint.layouts import LAYOUTS, make_state
from tests.helpers import slow, tree_allclose
from tests.trainers.models import LENGTH, LinenModel, Model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """One checkpoint for each layout, of states that differ."""
    root = tmp_path_factory.mktemp("layouts")
    return {
        name: save(root / str(seed), layout.put(make_state(seed)))
        for seed, (name, layout) in enumerate(LAYOUTS.items())
    }


def values(tree):
    """Every leaf as NumPy, all replicas compared with each other."""

    def one(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            replicas = list(leaf._parts.values()) if isinstance(leaf, MpmdArray) else [leaf]
            replicas = [np.asarray(jax.random.key_data(replica)) for replica in replicas]
        else:
            replicas = [np.asarray(r) for r in (leaf._parts.values() if isinstance(leaf, MpmdArray) else [leaf])]
        for other in replicas[1:]:
            np.testing.assert_array_equal(other, replicas[0])
        return replicas[0]

    return jax.tree.map(one, tree)


def pairs() -> Iterator[Any]:
    """Every layout to every layout; in the default tier each is the origin and the target of one."""
    for (first, origin), (second, to) in itertools.product(enumerate(LAYOUTS), repeat=2):
        yield (origin, to) if (second - first) % len(LAYOUTS) == 5 else slow(origin, to)


@pytest.mark.parametrize(("origin", "to"), list(pairs()))
def test_any_layout_to_any_layout(origin: str, to: str, saved: dict[str, Path]):
    expected = make_state(list(LAYOUTS).index(origin))
    restored = restore(saved[origin], LAYOUTS[to].target(expected))
    tree_allclose(values(restored), values(expected), rtol=0, atol=0)
    for path, sharding in LAYOUTS[to].shardings(expected).items():
        leaf = flatten(restored)[0][path]
        assert isinstance(leaf, MpmdArray) == isinstance(sharding, MpmdSharding), path
        assert leaf.sharding == sharding or leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path


def test_ranks_that_share_a_device_get_memory_of_their_own(saved: dict[str, Path]):
    device = jax.devices()[0]
    mesh = MpmdMesh(Mesh(np.array([device, device]), ("stage",)), "stage")
    state = {"params": {"embed": make_state()["params"]["embed"]}}
    target = {"params": {"embed": jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=MpmdSharding(mesh, {0, 1}, P()))}}
    restored = restore(saved["1 stage"], target, only="params/embed")["params"]["embed"]
    restored._parts[0].delete()  # as a step that donates it does
    np.testing.assert_array_equal(restored._parts[1], state["params"]["embed"])


def pipelined_target(tree):
    """Blocks 0 to 3 on four ranks, the rest on the first."""
    mesh = MpmdMesh(Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("stage", "data")), "stage")
    leaves, structure = flatten(tree)

    def rank(path: str) -> int:
        return next((int(digit) for digit in path if digit in "123"), 0)

    return jax.tree.unflatten(
        structure,
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=MpmdSharding(mesh, {rank(path)}, P()))
            for path, leaf in leaves.items()
        ],
    )


def test_from_an_unpipelined_nnx_model_of_stock_orbax(tmp_path: Path):
    plain = nnx.state(Model(4, rngs=nnx.Rngs(1), marked=False, dropout=0.5, batch_norm=True))
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "plain", plain)
    marked = nnx.state(Model(4, rngs=nnx.Rngs(2), dropout=0.5, batch_norm=True))
    restored = restore(tmp_path / "plain", pipelined_target(marked))
    tree_allclose(values(nnx.to_pure_dict(restored)), values(nnx.to_pure_dict(plain)), rtol=0, atol=0)
    assert flatten(restored)[0]["blocks/2/widen/kernel"].mpmd_idxs == (2,)


def test_from_an_unpipelined_linen_model_of_stock_orbax(tmp_path: Path):
    tokens = jnp.zeros((1, LENGTH), jnp.int32)
    plain = LinenModel(4, marked=False, batch_norm=True).init(jax.random.key(0), tokens)
    with ocp.StandardCheckpointer() as stock:
        stock.save(tmp_path / "plain", plain)
    marked = LinenModel(4, batch_norm=True).init(jax.random.key(1), tokens)
    restored = restore(tmp_path / "plain", pipelined_target(marked))
    tree_allclose(values(restored), values(plain), rtol=0, atol=0)


def test_the_page_names_each_layout():
    text = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "checkpointing.md").read_text(encoding="utf-8")
    assert f"{', '.join(LAYOUTS)}." in " ".join(text.split())
